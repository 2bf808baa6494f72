"""The sampler's law: joint frequencies of consecutive tokens against exact probabilities, for every sampling field."""

from typing import Any

import numpy as np
import pytest

from engine.sampling.distribution import Candidates, TokenHistory, candidates, process_logits
from engine.sampling.sampler import SampleRequest, draw, sample_row
from engine.types import SamplingParams

CHI_SQUARE_999 = 37.7
"""0.999 quantile of the chi-square distribution with 15 degrees of freedom, the most that 4 x 4 pairs can have."""


def _rows(count: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, vocab)).astype(np.float32)


FIELDS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(presence_penalty=0.8, frequency_penalty=0.5),
    SamplingParams(logit_bias={1: 1.5}),
    SamplingParams(allowed_token_ids=frozenset({1, 2, 3})),
    SamplingParams(bad_words=((1, 2), (3,))),
    SamplingParams(min_tokens=2),
]


def _probabilities(logits: np.ndarray[Any, np.dtype[np.float32]], params: SamplingParams, tokens: Any) -> Any:
    row = process_logits(logits, params, TokenHistory(tokens, 1), frozenset({0}))
    target = candidates(row, params)
    weights = np.exp(target.log_weights.astype(np.float64) - target.log_weights.max())
    return dict(zip(target.token_ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


def _draw_pair(table: Any, params: SamplingParams, seed: int) -> Any:
    tokens = [1]
    for _ in range(2):
        logits = table[tokens[-1]]
        request = SampleRequest(
            SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"seed": seed}),
            TokenHistory(tokens, 1),
            frozenset({0}),
        )
        tokens.append(sample_row(logits, request))
    return tuple(tokens[1:])


@pytest.mark.parametrize("params", FIELDS)
def test_two_consecutive_tokens_follow_the_exact_joint_distribution(params: SamplingParams) -> None:
    vocab, num_draws = 4, 20_000
    table = _rows(vocab, vocab, seed=4) * 0.5
    expected = {}
    for first, p_first in _probabilities(table[1], params, [1]).items():
        for second, p_second in _probabilities(table[first], params, [1, first]).items():
            expected[first, second] = p_first * p_second
    counts = dict.fromkeys(expected, 0)
    for seed in range(num_draws):
        counts[_draw_pair(table, params, seed)] += 1  # a pair outside the support is a KeyError
    statistic = sum((counts[pair] - num_draws * p) ** 2 / (num_draws * p) for pair, p in expected.items())
    assert statistic < CHI_SQUARE_999


def test_chi_square_catches_noise_that_is_reused_between_positions() -> None:
    vocab, num_draws = 4, 4000
    weights = np.zeros(vocab, dtype=np.float32)
    ids = np.arange(vocab)
    counts = np.zeros((vocab, vocab))
    for seed in range(num_draws):
        counts[draw(Candidates(ids, weights), seed, 5), draw(Candidates(ids, weights), seed, 5)] += 1
    expected = num_draws / vocab**2
    assert ((counts - expected) ** 2 / expected).sum() > CHI_SQUARE_999
