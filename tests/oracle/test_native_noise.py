"""The native race of weights and noise against the noise that every sampler computes, over whole vocabularies."""

from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.cpu.build import Isa, build_library, choose_isa
from engine.kernels.cpu.library import open_library
from engine.kernels.cpu.single import SingleKernels
from engine.sampling.noise import gumbel_noise

VOCAB_SIZE = 5000
ISAS = tuple(dict.fromkeys((choose_isa(), Isa.PORTABLE)))
each_isa = pytest.mark.parametrize("isa", ISAS, ids=str)


@cache
def kernels(isa: Isa) -> SingleKernels:
    return SingleKernels(open_library(build_library(isa)))


def draws(spread: float, count: int) -> list[tuple[npt.NDArray[np.float32], int, int]]:
    """Weights, seed and position of each draw."""
    rng = np.random.default_rng(3)
    return [
        (
            (rng.standard_normal(VOCAB_SIZE) * spread).astype(np.float32),
            int(rng.integers(0, 2**64, dtype=np.uint64)),
            int(rng.integers(0, 100_000)),
        )
        for _ in range(count)
    ]


@each_isa
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0, 40.0])
def test_the_winner_is_a_candidate_and_few_others_are(isa: Isa, spread: float) -> None:
    for weights, seed, position in draws(spread, 60):
        noisy = weights.astype(np.float64) + gumbel_noise(seed, position, np.arange(VOCAB_SIZE))
        found = kernels(isa).noise_candidates(weights, seed, position)
        assert int(noisy.argmax()) in found
        assert len(found) <= 2
        assert np.all(noisy[found] >= noisy.max() - 1e-5)


@each_isa
def test_noise_is_keyed_by_token_not_by_place(isa: Isa) -> None:
    for weights, seed, position in draws(2.0, 20):
        token_ids = np.random.default_rng(seed % 1000).permutation(200_000)[:777].astype(np.int64)
        noisy = weights[:777].astype(np.float64) + gumbel_noise(seed, position, token_ids)
        assert int(noisy.argmax()) in kernels(isa).noise_candidates(weights[:777], seed, position, token_ids)


@each_isa
def test_forbidden_tokens_never_win(isa: Isa) -> None:
    for weights, seed, position in draws(1.0, 20):
        weights[np.arange(VOCAB_SIZE) % 97 != 5] = -np.inf
        noisy = weights.astype(np.float64) + gumbel_noise(seed, position, np.arange(VOCAB_SIZE))
        assert kernels(isa).noise_candidates(weights, seed, position).tolist() == [int(noisy.argmax())]
    assert kernels(isa).noise_candidates(np.full(40, -np.inf, np.float32), 1, 2).size == 0


@each_isa
def test_equal_best_tokens_are_all_candidates(isa: Isa) -> None:
    """The same token id twice has the same noise; the caller's rule for ties must see both."""
    weights = np.zeros(33, np.float32)
    weights[[4, 31]] = 50.0
    token_ids = np.arange(33, dtype=np.int64)
    token_ids[31] = token_ids[4]
    assert kernels(isa).noise_candidates(weights, 9, 1, token_ids).tolist() == [4, 31]


def test_ids_and_weights_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="3 token ids for 4 weights"):
        kernels(choose_isa()).noise_candidates(np.zeros(4, np.float32), 1, 1, np.arange(3))
