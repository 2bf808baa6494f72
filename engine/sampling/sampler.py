"""Logits to token ids: the one path that plain decoding, first tokens, verification and resumed requests share.

The token is the argmax over the processed target distribution plus Gumbel noise (Gumbel-max trick), so it is an exact
draw, and a function of the row, the request and the position alone.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.sampling.distribution import Candidates, TokenHistory, candidates, process_logits
from engine.sampling.noise import MAX_GUMBEL, gumbel_noise
from engine.types import SamplingParams
from kvrelay.values import PositionLogprobs, TokenLogprob

_NOISE_FIRST_LOOK = 256


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row to sample from."""

    params: SamplingParams
    history: TokenHistory
    stop_ids: frozenset[int]
    """Every token that would end the request."""


def sample_row(logits: NDArray[np.float32], request: SampleRequest) -> int:
    """Return the token at one position.

    Args:
        logits: [vocab_size] float32.
        request: What the row belongs to.

    Raises:
        ValueError: The row allows no token at all or holds NaN.
    """
    row = process_logits(logits, request.params, request.history, request.stop_ids)
    best = int(row.argmax())
    token_id = best if np.isfinite(row[best]) else None
    if token_id is not None and not request.params.is_greedy:
        token_id = draw(candidates(row, request.params), request.params.seed, len(request.history.token_ids))
    if token_id is None:
        raise ValueError("no token is allowed at this position")
    return token_id


def draw(target: Candidates, seed: int, position: int) -> int | None:
    """Return the candidate with the largest noisy log-weight, of equal ones the smallest id; None: there is none."""
    ids, weights = target.token_ids, target.log_weights.astype(np.float64)
    if not len(ids):
        return None
    if len(ids) > _NOISE_FIRST_LOOK:
        # Noise is bounded, so tokens far below the best noisy one among the likely tokens cannot win.
        likely = np.argpartition(weights, len(weights) - _NOISE_FIRST_LOOK)[len(weights) - _NOISE_FIRST_LOOK :]
        lead = (weights[likely] + gumbel_noise(seed, position, ids[likely])).max()
        keep = np.flatnonzero(weights + MAX_GUMBEL >= lead)
        ids, weights = ids[keep], weights[keep]
    noisy = weights + gumbel_noise(seed, position, ids)
    return int(ids[noisy == noisy.max()].min())


def position_logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> PositionLogprobs:
    """Return the logprobs of the sampled token and of the `num_top` best ones under the model's own distribution.

    Args:
        logits: [vocab_size] float32, as the model gave them.
        token_id: The sampled token.
        num_top: How many of the best tokens to report.
    """
    row = logits.astype(np.float64)
    largest = row.max()
    normaliser = largest + np.log(np.exp(row - largest).sum())
    count = min(num_top, len(row))
    top: list[TokenLogprob] = []
    if count:
        threshold = np.partition(logits, len(logits) - count)[len(logits) - count]
        pool = np.flatnonzero(logits >= threshold)
        order = pool[np.argsort(-logits[pool], kind="stable")][:count]
        top = [TokenLogprob(int(token), float(row[token] - normaliser), rank + 1) for rank, token in enumerate(order)]
    rank = int((logits > logits[token_id]).sum()) + 1
    return PositionLogprobs(TokenLogprob(token_id, float(row[token_id] - normaliser), rank), tuple(top))
