"""The processed target distribution: what a row of logits becomes before a token is drawn from it.

Order of the fields, each on the result of the one before:

    logit_bias → bans (allowed_token_ids, bad_words, stop tokens below min_tokens)
    → repetition, presence, frequency penalties → temperature → top_k → top_p → min_p

Greedy requests stop before temperature. Everything is computed in float32 from float32 logits, sums in float64, and
ties are broken towards the smaller token id, so the result depends on nothing but the row and the request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.types import SamplingParams

_TOP_P_FIRST_LOOK = 512


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tokens that may be drawn and their unnormalised log-weights."""

    token_ids: NDArray[np.int64]
    """[n], in no particular order."""
    log_weights: NDArray[np.float32]
    """[n], logits after temperature."""


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens before the position that is sampled."""

    token_ids: Sequence[int]
    """Prompt and output."""
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before the position."""
        return len(self.token_ids) - self.num_prompt_tokens


def needs_processing(params: SamplingParams, history: TokenHistory) -> bool:
    """Whether `process_logits` would change a row."""
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or params.bad_words
        or params.needs_token_counts
        or history.num_output_tokens < params.min_tokens
    )


def is_plain_greedy(params: SamplingParams, history: TokenHistory) -> bool:
    """Whether the row's argmax is the answer, so that `process_logits` can be skipped."""
    return params.is_greedy and not needs_processing(params, history)


def process_logits(
    logits: NDArray[np.float32], params: SamplingParams, history: TokenHistory, stop_ids: frozenset[int]
) -> NDArray[np.float32]:
    """Return a copy of a row with bias, bans and penalties applied.

    Args:
        logits: [vocab_size] float32, not changed.
        params: The request's parameters.
        history: The tokens before this position; accepted draft tokens count.
        stop_ids: Every token that would end the request (eos included unless ignored).

    Returns:
        [vocab_size] float32; banned tokens are -inf.
    """
    row = logits.copy()
    vocab_size = len(row)
    for token_id, bias in params.logit_bias.items():
        row[token_id] += np.float32(bias)
    if params.allowed_token_ids is not None:
        banned = np.ones(vocab_size, dtype=bool)
        banned[list(params.allowed_token_ids)] = False
        row[banned] = -np.inf
    for word in params.bad_words:
        prefix = word[:-1]
        if not prefix or tuple(history.token_ids[-len(prefix) :]) == prefix:
            row[word[-1]] = -np.inf
    if history.num_output_tokens < params.min_tokens:
        row[[token_id for token_id in stop_ids if token_id < vocab_size]] = -np.inf
    if params.needs_token_counts:
        _apply_penalties(row, params, history)
    return row


def _apply_penalties(row: NDArray[np.float32], params: SamplingParams, history: TokenHistory) -> None:
    if params.repetition_penalty != 1.0:
        seen = np.unique(np.asarray(history.token_ids, dtype=np.int64))
        values = row[seen]
        penalty = np.float32(params.repetition_penalty)
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    output = np.asarray(history.token_ids[history.num_prompt_tokens :], dtype=np.int64)
    if len(output) and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        tokens, counts = np.unique(output, return_counts=True)
        row[tokens] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts.astype(
            np.float32
        )


def candidates(row: NDArray[np.float32], params: SamplingParams) -> Candidates:
    """Return the tokens that temperature, top-k, top-p and min-p leave, with their log-weights.

    Args:
        row: [vocab_size] float32 from `process_logits`.
        params: A request that is not greedy.

    Returns:
        Nothing where no token is allowed, or where the best weight is not finite.
    """
    with np.errstate(over="ignore"):
        scaled = row / np.float32(params.temperature)
    if not np.isfinite(scaled.max()):
        return Candidates(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
    ids = np.flatnonzero(np.isfinite(scaled))
    weights = scaled[ids]
    if 0 < params.top_k < len(ids):
        keep = _best(weights, params.top_k)
        ids, weights = ids[keep], weights[keep]
    if params.top_p < 1.0:
        keep = _nucleus(weights, params.top_p)
        ids, weights = ids[keep], weights[keep]
    if params.min_p > 0.0:
        keep = np.flatnonzero(weights >= weights.max() + np.float32(np.log(params.min_p)))
        ids, weights = ids[keep], weights[keep]
    return Candidates(ids, weights)


def _best(weights: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Indices of the `count` largest weights, best first; equal weights by index."""
    if count < len(weights):
        threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
        pool = np.flatnonzero(weights >= threshold)
    else:
        pool = np.arange(len(weights))
    # A stable sort of the negated weights keeps equal ones in index order.
    order = np.argsort(-weights[pool], kind="stable")[:count]
    return np.asarray(pool[order], dtype=np.int64)


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Indices of the smallest set of best weights that reaches `top_p` (Holtzman et al., arXiv 1904.09751)."""
    probabilities = np.exp((weights - weights.max()).astype(np.float64))
    target = top_p * probabilities.sum()
    # Most nuclei are small: sorting the whole vocabulary is the exception.
    count = min(_TOP_P_FIRST_LOOK, len(weights))
    while True:
        order = _best(weights, count)
        cumulative = np.cumsum(probabilities[order])
        reached = int(np.searchsorted(cumulative, target))
        if reached < len(order):
            return order[: reached + 1]
        if count == len(weights):
            return order
        count = min(count * 8, len(weights))
