"""Teaching a head to find: some of its attention looks where the context holds the coming token already.

Much of what a model says stands in its context: names out of a passage, a sentence said before, a loop. Row s + 1 of a
head sees token s + 1 and the target's features behind token s, so a query made from the newest token can match the key
of each row that followed the same token, and that row's value tells what came then: an induction head (Olsson et al.,
arXiv 2209.11895) in one layer. Cross entropy alone finds this slowly or not at all; the attention itself, told where
to look, learns it within a minute.
"""

from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.spec import head_format as names
from engine.training.head import DraftHead, HeadBatch, finding_rows

FINDING_BATCH_TOKENS: Final = 1536
"""Answer tokens of each of them."""
_LEARNING_RATE: Final = 0.006
_RATE_DECAY: Final = 0.995
_INITIAL_STD: Final = 0.05
_FLOOR: Final = 1e-6
"""Under a share's logarithm, where attention missed altogether."""
_KNOWS_LOSS: Final = 2.0
"""A head that is better than this from the start has been taught already."""
_CODE_SCALE: Final = 0.3


def finding_loss(head: DraftHead, batch: HeadBatch, dtype: torch.dtype) -> Tensor:
    """Return the mean negative logarithm of the attention that goes to the right rows; see `DraftHead.find`."""
    found = head.find(batch, dtype)
    return -(found + _FLOOR).log().mean() if len(found) else found.sum()


def teach_finding(
    head: DraftHead,
    batches: Iterator[HeadBatch],
    generator: torch.Generator,
    dtype: torch.dtype,
    num_steps: int,
    progress: Callable[[str], None],
) -> None:
    """Teach the finding heads before all else, unless the head was taught already.

    Args:
        head: Initialised or trained; the weights of its finding heads are replaced.
        batches: One for each step, and two more.
        generator: Source of the first weights.
        dtype: In which features are computed.
        num_steps: Of Adam.
        progress: Called with one line after each step.
    """
    with torch.no_grad():
        if finding_loss(head, next(batches), dtype) < _KNOWS_LOSS:
            return
        places = finding_rows(head.target.config)
        head.weight(names.K_PROJ)[places.key].normal_(0.0, _INITIAL_STD, generator=generator)
        head.weight(names.Q_PROJ)[places.query].normal_(0.0, _INITIAL_STD, generator=generator)
    learned = [head.weight(names.K_PROJ), head.weight(names.Q_PROJ)]
    optimizer = torch.optim.Adam(learned, lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, _RATE_DECAY)
    for step in range(num_steps):
        loss = finding_loss(head, next(batches), dtype)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress(f"finding {step + 1} of {num_steps}, loss {float(loss.detach()):.2f}")
    optimizer.zero_grad()
    _tell_what_is_found(head, next(batches).taps)


@torch.no_grad()
def _tell_what_is_found(head: DraftHead, taps: Tensor) -> None:
    """Let the finding heads' values carry their row's token, and their outputs its output row.

    A head's width holds the embedding's main directions only; the output is about as long as features are.
    """
    config, places = head.target.config, finding_rows(head.target.config)
    hidden = config.hidden_size
    weight = head.weight(names.EMBEDDING_NORM)
    embedded = functional.rms_norm(head.target.embedding[head.vocab_ids], (hidden,), weight, config.rms_norm_eps)
    embedded = embedded - embedded.mean(0)
    width = min(config.head_dim, *embedded.shape)
    left, strengths, right = torch.linalg.svd(embedded, full_matrices=False)
    main = right[:width] * _CODE_SCALE
    codes = embedded @ main.T
    # Least squares from a token's code to its output row.
    told = (head.output_rows - head.output_rows.mean(0)).T @ (left[:, :width] / (strengths[:width] * _CODE_SCALE))
    length = functional.linear(taps, head.weight(names.FUSE)).norm(dim=1).median()
    told = told * length / (codes @ told.T).norm(dim=1).mean()

    value, output = head.weight(names.V_PROJ), head.weight(names.O_PROJ)
    value[places.key] = 0.0
    value[places.key.start : places.key.start + width, :hidden] = main
    output[:, places.query] = 0.0
    groups = config.num_heads // config.num_kv_heads
    for group in range(groups):
        start = places.query.start + group * config.head_dim
        output[:, start : start + width] = told / groups
