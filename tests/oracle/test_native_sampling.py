"""Native rows against the definition: the same tokens for every field, the same logprobs, the same refusals."""

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.kernels.cpu.build import Isa, build_library, choose_isa
from engine.kernels.cpu.library import open_library
from engine.kernels.cpu.sampling import NativeSampler, RowDraw
from engine.sampling.rows import Draw, LogprobQuery, NativeRows, NumpyRows
from engine.types import SamplingParams

VOCAB_SIZE = 4099
ISAS = tuple(dict.fromkeys((choose_isa(), Isa.AVX2 if choose_isa() != Isa.PORTABLE else Isa.PORTABLE, Isa.PORTABLE)))
each_isa = pytest.mark.parametrize("isa", ISAS, ids=str)
FIELDS: dict[str, dict[str, float]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 30.0},
    "top_k": {"top_k": 7},
    "top_k_of_more_than_there_are": {"top_k": 4090},
    "top_p": {"top_p": 0.9},
    "top_p_tiny": {"top_p": 1e-6},
    "top_p_nearly_all": {"top_p": 0.9999},
    "min_p": {"min_p": 0.05},
    "min_p_one": {"min_p": 1.0},
    "all": {"temperature": 1.3, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    "top_p_and_min_p": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05},
}


@cache
def sampler(isa: Isa, num_threads: int = 2) -> NativeSampler:
    return NativeSampler(open_library(build_library(isa)), num_threads)


def rows_of(spread: float, count: int, seed: int = 4) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((count, VOCAB_SIZE)) * spread).astype(np.float32)
    rows[1::3, rng.integers(0, VOCAB_SIZE, 40)] = -np.inf
    return rows


def draws_of(rows: NDArray[np.float32], fields: dict[str, float]) -> list[Draw]:
    params = {"temperature": 1.0, **fields}
    return [
        Draw(row, SamplingParams(**params, seed=(index * 0x9E3779B97F4A7C15) % 2**64), index * 31)  # type: ignore[arg-type]  # floats that are whole where the field is an int
        for index, row in enumerate(rows)
    ]


@each_isa
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 9.0])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_tokens_are_those_of_the_definition(isa: Isa, spread: float, fields: dict[str, float]) -> None:
    draws = draws_of(rows_of(spread, 24), fields)
    assert NativeRows(sampler(isa)).draw(draws) == NumpyRows().draw(draws)


@each_isa
def test_rows_that_rounding_could_decide_are_left_to_the_definition(isa: Isa) -> None:
    """Four equal tokens and top_p = 0.5: the border of the nucleus lies exactly on a sum."""
    row = np.full(64, -np.inf, np.float32)
    row[[3, 17, 40, 60]] = 1.25
    (answer,) = sampler(isa).draw([RowDraw(row, 1.0, 0, 0.5, 0.0, 5, 9)])
    assert not answer.is_decided
    draws = [Draw(row, SamplingParams(top_p=0.5, temperature=1.0, seed=seed), 9) for seed in range(64)]
    tokens = NativeRows(sampler(isa)).draw(draws)
    assert tokens == NumpyRows().draw(draws)
    assert set(tokens) == {3, 17}


@each_isa
def test_most_rows_are_decided(isa: Isa) -> None:
    draws = [RowDraw(row, 0.8, 0, 0.95, 0.05, index, index) for index, row in enumerate(rows_of(4.0, 64, seed=8))]
    assert sum(answer.is_decided for answer in sampler(isa).draw(draws)) == 64


@each_isa
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_allow_no_token_have_none(isa: Isa, bad: float) -> None:
    rows = rows_of(2.0, 3)
    rows[0] = -np.inf
    rows[2, 77] = bad
    draws = draws_of(rows, {})
    tokens = NativeRows(sampler(isa)).draw(draws)
    assert tokens == NumpyRows().draw(draws)
    assert [token is None for token in tokens] == [True, False, True]


@each_isa
def test_thread_count_and_neighbours_change_nothing(isa: Isa) -> None:
    draws = draws_of(rows_of(3.0, 33), FIELDS["top_p_and_min_p"])
    alone = [NativeRows(sampler(isa, 1)).draw([one])[0] for one in draws]
    assert NativeRows(sampler(isa, 3)).draw(draws) == alone


@each_isa
@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE])
def test_logprobs_are_those_of_the_definition(isa: Isa, num_top: int) -> None:
    rows = rows_of(3.0, 4)
    rows[:, 5] = rows[:, 6] = 8.0  # equal ones
    queries = [LogprobQuery(row, token_id, num_top) for row, token_id in zip(rows, (5, 9, 100, 4098), strict=True)]
    for found, expected in zip(NativeRows(sampler(isa)).logprobs(queries), NumpyRows().logprobs(queries), strict=True):
        assert found.sampled.rank == expected.sampled.rank
        assert found.sampled.logprob == pytest.approx(expected.sampled.logprob, abs=1e-12)
        banned = sum(entry.logprob == -np.inf for entry in expected.top)
        count = len(expected.top) - banned
        assert [entry.token_id for entry in found.top[:count]] == [entry.token_id for entry in expected.top[:count]]
        assert [entry.logprob for entry in found.top] == pytest.approx([e.logprob for e in expected.top], abs=1e-12)


@each_isa
def test_the_best_token_is_the_first_of_equals(isa: Isa) -> None:
    rows = rows_of(3.0, 40)
    rows[3, [4098, 17, 1600]] = rows[7, [4096, 4097]] = 50.0
    rows[5, 9] = np.nan
    rows[6, 9] = np.inf
    rows[8] = -np.inf
    found = NativeRows(sampler(isa)).best(rows)
    assert found == NumpyRows().best(rows)
    assert (found[3], found[7], found[5], found[6], found[8]) == (17, 4096, None, None, None)
