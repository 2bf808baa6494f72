"""The one verifier: which drafted tokens the target would have sampled itself.

At each position the target's token is the sampled token of `engine/sampling`: processed distribution, keyed noise,
argmax. A draft is accepted exactly while it equals that token; the first that differs is replaced by it; when all
match, the row behind the last draft gives one more. So the tokens are those of plain decoding whatever was proposed,
for greedy and sampled requests and every sampling field, provided that a row's logits do not depend on the rows
beside it.

For a draft that is a single token this accepts with the probability that Leviathan et al. (arXiv 2211.17192) accept it:
the target's own probability of that token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.distribution import TokenHistory, is_plain_greedy
from engine.sampling.sampler import SampleRequest, sample_row


@dataclass(frozen=True, slots=True)
class VerifyItem:
    """One sequence's rows in a step's logits."""

    first_row: int
    """Row of the sequence's last token; the drafts' rows follow it."""
    draft_token_ids: tuple[int, ...]
    request: SampleRequest
    """What to sample from the first row; later rows see the accepted drafts as history too."""


def verify(logits: NDArray[np.float32], items: Sequence[VerifyItem]) -> list[tuple[int, ...]]:
    """Return each sequence's new tokens: the accepted drafts and one more.

    Args:
        logits: [num_rows, vocab_size] float32; an item owns `1 + len(draft_token_ids)` consecutive rows.
        items: The sequences; without drafts this is plain sampling.
    """
    best = logits.argmax(axis=1)
    return [_verify_one(logits, best, item) for item in items]


def _verify_one(logits: NDArray[np.float32], best: NDArray[np.int64], item: VerifyItem) -> tuple[int, ...]:
    request = item.request
    tokens: list[int] = []
    history = request.history
    extended: list[int] | None = None  # the history with accepted drafts, made when the first one is accepted
    for offset in range(len(item.draft_token_ids) + 1):
        row = item.first_row + offset
        if is_plain_greedy(request.params, history):
            token_id = int(best[row])
        else:
            token_id = sample_row(logits[row], SampleRequest(request.params, history, request.stop_ids))
        tokens.append(token_id)
        if offset == len(item.draft_token_ids) or token_id != item.draft_token_ids[offset]:
            break
        if extended is None:
            extended = list(history.token_ids)
            history = TokenHistory(extended, history.num_prompt_tokens)
        extended.append(token_id)
    return tuple(tokens)
