"""The one verifier: which drafted tokens the target would have sampled itself.

At each position the target's token is the sampled token of `engine/sampling`: processed distribution, keyed noise,
argmax. A draft is accepted exactly while it equals that token; the first that differs is replaced by it; when all
match, the row behind the last draft gives one more. So the tokens are those of plain decoding whatever was proposed,
for greedy and sampled requests and every sampling field, provided that a row's logits do not depend on the rows
beside it.

For a draft that is a single token this accepts with the probability that Leviathan et al. (arXiv 2211.17192) accept it:
the target's own probability of that token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from engine.request_checks import no_token_allowed
from engine.sampling.distribution import TokenHistory, is_plain_greedy, needs_processing, process_logits
from engine.sampling.rows import Draw, NumpyRows, RowSampler
from engine.sampling.sampler import SampleRequest
from kvrelay.errors import EngineError, SamplingFailed

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One sequence's rows in a step's logits."""

    first_row: int
    """Row of the sequence's last token; the drafts' rows follow it."""
    draft_token_ids: tuple[int, ...]
    request: SampleRequest
    """What to sample from the first row; later rows see the accepted drafts as history too."""


def verify(
    logits: NDArray[np.float32], items: Sequence[VerifyItem], rows: RowSampler | None = None
) -> list[tuple[int, ...]]:
    """Return each sequence's new tokens: the accepted drafts and one more; none where its first row gives no token.

    Every row is sampled as if the drafts before it were accepted; where they are not, what it gave is not looked at.

    Args:
        logits: [num_rows, vocab_size] float32; an item owns `1 + len(draft_token_ids)` consecutive rows.
        items: The sequences; without drafts this is plain sampling.
        rows: What draws from the rows; `NumpyRows` by default.
    """
    targets = target_tokens(logits, items, rows or NumpyRows())
    return [accept(targets[item.first_row :], item.draft_token_ids) for item in items]


def target_tokens(logits: NDArray[np.float32], items: Sequence[VerifyItem], rows: RowSampler) -> list[int | None]:
    """Return the target's token of each row, had the drafts before it been accepted; None where there is none."""
    draws: list[tuple[int, Draw]] = []
    targets = rows.best(logits)
    for item in items:
        try:
            draws += _settle_greedy(logits, item, targets)
        except Exception:
            # One request's fields must not end the step for the others. Its rows give no token, which ends it.
            _log.exception("sampling.row_failed", first_row=item.first_row)
            for row in range(item.first_row, item.first_row + 1 + len(item.draft_token_ids)):
                targets[row] = None
    if draws:
        for (row, _), drawn in zip(draws, rows.draw([one for _, one in draws]), strict=True):
            targets[row] = drawn
    return targets


def _settle_greedy(logits: NDArray[np.float32], item: VerifyItem, targets: list[int | None]) -> list[tuple[int, Draw]]:
    """Write the targets of an item's rows that take their likeliest token; returns the rows that need a draw."""
    draws: list[tuple[int, Draw]] = []
    request = item.request
    for row, history in enumerate(histories(item), item.first_row):
        # Without a best token the model's own logits are not finite, and no field makes a token of that.
        if targets[row] is None or is_plain_greedy(request.params, history):
            continue
        processed = logits[row]
        if needs_processing(request.params, history):
            processed = process_logits(processed, request.params, history, request.stop_ids)
        if request.params.is_greedy:
            token_id = int(processed.argmax())
            targets[row] = token_id if np.isfinite(processed[token_id]) else None
        else:
            draws.append((row, Draw(processed, request.params, len(history.token_ids))))
    return draws


def histories(item: VerifyItem) -> Iterator[TokenHistory]:
    """Yield what stands before each row: the history, and with it ever more of the drafts.

    The drafts are added to one list: who keeps a history beyond the next one copies its tokens.
    """
    history = item.request.history
    yield history
    if item.draft_token_ids:
        tokens = list(history.token_ids)
        for token_id in item.draft_token_ids:
            tokens.append(token_id)
            yield TokenHistory(tokens, history.num_prompt_tokens)


def accept(targets: Sequence[int | None], draft_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Return a sequence's new tokens, given the target's tokens from its first row on.

    A row without a token ends them; the next step meets it again as its first, and there it ends the sequence.
    """
    tokens: list[int] = []
    for offset, token_id in enumerate(targets[: len(draft_token_ids) + 1]):
        if token_id is None:
            break
        tokens.append(token_id)
        if offset == len(draft_token_ids) or token_id != draft_token_ids[offset]:
            break
    return tuple(tokens)


def failure(request: SampleRequest, *, is_finite: bool) -> EngineError:
    """Return why a sequence got no token at all.

    Args:
        request: Its parameters and history.
        is_finite: Whether the model's own logits of the row are free of NaN and of plus infinity.
    """
    if not is_finite:
        return SamplingFailed("the model's logits are not finite at this position")
    params = request.params
    if params.allowed_token_ids is None and not params.bad_words and not params.min_tokens:
        return SamplingFailed("no token could be drawn at this position")
    return no_token_allowed(params)
