"""Draws: greedy, seeded, independent of their neighbours, and distributed as the target says."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sampling.distribution import Candidates, TokenHistory
from engine.sampling.noise import gumbel_noise
from engine.sampling.sampler import SampleRequest, draw, position_logprobs, sample_row
from engine.spec.verify import VerifyItem, verify
from engine.types import SamplingParams


def _sample(logits: NDArray[np.float32], requests: Sequence[SampleRequest]) -> list[int]:
    """One token per row, as a step without drafts samples."""
    found = verify(logits, [VerifyItem(row, (), request) for row, request in enumerate(requests)])
    return [token_id for (token_id,) in found]


def _request(params: SamplingParams, tokens: Any = (1, 2, 3), num_prompt: Any = 2) -> SampleRequest:
    return SampleRequest(params, TokenHistory(tokens, num_prompt), frozenset({0}))


def _rows(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32)


def test_greedy_takes_the_best_token_and_the_first_of_equals() -> None:
    row = np.array([[0.0, 3.0, 3.0, 1.0]], dtype=np.float32)
    assert _sample(row, [_request(SamplingParams(temperature=0))]) == [1]


def test_row_gives_the_same_token_in_any_batch() -> None:
    rows = _rows(8, 5000)
    requests = [_request(SamplingParams(seed=i, temperature=1.3, top_p=0.95 if i % 2 else 1.0)) for i in range(8)]
    together = _sample(rows, requests)
    alone = [_sample(rows[i : i + 1], [requests[i]])[0] for i in range(8)]
    assert together == alone


def test_draw_over_many_candidates_equals_noise_on_all_of_them() -> None:
    for seed in range(20):
        weights = np.random.default_rng(seed).normal(0, 4, 30_000).astype(np.float32)
        ids = np.arange(30_000)
        full = int(np.argmax(weights.astype(np.float64) + gumbel_noise(seed, 9, ids)))
        assert draw(Candidates(ids, weights), seed, 9) == full


def test_row_without_any_allowed_token_is_an_error() -> None:
    params = SamplingParams(allowed_token_ids=frozenset({0}), min_tokens=5)
    with pytest.raises(ValueError, match="no token is allowed"):
        sample_row(_rows(1, 10)[0], _request(params))


def test_logprobs_are_the_models_own() -> None:
    logits = _rows(1, 100)[0]
    result = position_logprobs(logits, 42, 5)
    reference = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-logits)
    assert [entry.token_id for entry in result.top] == order[:5].tolist()
    assert [entry.logprob for entry in result.top] == pytest.approx(reference[order[:5]].tolist())
    assert result.sampled.logprob == pytest.approx(reference[42])
    assert result.sampled.rank == int(np.flatnonzero(order == 42)[0]) + 1
