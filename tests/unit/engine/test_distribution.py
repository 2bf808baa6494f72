"""The processed target distribution against a slow, literal restatement of every field."""

import math
from typing import Any

import numpy as np
import pytest

from engine.sampling.distribution import TokenHistory, candidates, process_logits
from engine.types import SamplingParams

VOCAB = 40
STOP_IDS = frozenset({2, 3})


def _logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


def _expected(
    logits: np.ndarray[Any, np.dtype[np.float32]], params: SamplingParams, tokens: Any, num_prompt: Any
) -> Any:
    """Dictionary of token -> logit after every field, computed with plain loops."""
    output = tokens[num_prompt:]
    row = {}
    for token, logit in enumerate(logits.tolist()):
        value = logit + params.logit_bias.get(token, 0.0)
        banned = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for word in params.bad_words:
            matches = len(word) == 1 or tuple(tokens[-(len(word) - 1) :]) == word[:-1]
            banned = banned or (matches and word[-1] == token)
        banned = banned or (len(output) < params.min_tokens and token in STOP_IDS)
        if token in tokens:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        if token in output:
            value -= params.presence_penalty + params.frequency_penalty * output.count(token)
        if not banned:
            row[token] = value
    if params.temperature == 0:
        return row
    row = {token: value / params.temperature for token, value in row.items()}
    ranked = sorted(row, key=lambda token: (-row[token], token))
    if params.top_k:
        ranked = ranked[: params.top_k]
    weights = {token: math.exp(row[token] - row[ranked[0]]) for token in ranked}
    total, mass, kept = sum(weights.values()), 0.0, []
    for token in ranked:
        kept.append(token)
        mass += weights[token]
        if params.top_p < 1 and mass >= params.top_p * total:
            break
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    return {token: row[token] for token in kept}


CASES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.05),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=10, top_p=0.7, min_p=0.1, temperature=1.7),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(repetition_penalty=0.5),
    SamplingParams(presence_penalty=1.2),
    SamplingParams(frequency_penalty=-0.7),
    SamplingParams(logit_bias={5: 4.0, 9: -100.0}),
    SamplingParams(allowed_token_ids=frozenset({1, 5, 30})),
    SamplingParams(bad_words=((8,), (6, 9), (1, 9), (7, 6, 10))),
    SamplingParams(min_tokens=4),
    SamplingParams(min_tokens=3),
    SamplingParams(
        temperature=0.9,
        top_p=0.9,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={4: 2.0},
        bad_words=((6, 4),),
        min_tokens=9,
    ),
]


@pytest.mark.parametrize("params", CASES)
@pytest.mark.parametrize("seed", range(5))
def test_every_field_does_what_it_says(params: SamplingParams, seed: int) -> None:
    tokens, num_prompt = [1, 5, 7, 6, 5, 6], 3
    logits = _logits(seed)
    row = process_logits(logits, params, TokenHistory(tokens, num_prompt), STOP_IDS)
    result = candidates(row, params)
    expected = _expected(logits, params, tokens, num_prompt)
    assert set(result.token_ids.tolist()) == set(expected)
    for token, weight in zip(result.token_ids, result.log_weights, strict=True):
        assert weight == pytest.approx(expected[int(token)], abs=1e-4)


def test_equal_logits_are_cut_by_token_id() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=3 / VOCAB - 1e-6)):
        assert sorted(candidates(logits, params).token_ids.tolist()) == [0, 1, 2]


def test_wide_nucleus_over_a_large_vocabulary_equals_a_full_sort() -> None:
    logits = np.random.default_rng(1).normal(0, 0.5, 20_000).astype(np.float32)
    ids = candidates(logits, SamplingParams(top_p=0.9)).token_ids
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    count = int(np.searchsorted(mass, 0.9 * mass[-1])) + 1
    assert set(ids.tolist()) == set(order[:count].tolist())


def test_input_row_is_left_alone() -> None:
    logits = _logits(0)
    before = logits.copy()
    process_logits(logits, CASES[-1], TokenHistory([1, 5, 7, 6], 2), STOP_IDS)
    assert np.array_equal(logits, before)
