"""The noise: published Philox vectors, the Gumbel law, and that its key is all it depends on."""

from typing import Any

import numpy as np
import pytest

from engine.sampling.noise import MAX_GUMBEL, gumbel_noise, philox4x32

KNOWN_ANSWERS = [
    # Counter, key and result as published with the Random123 library (Salmon et al., SC 2011).
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: Any, key: Any, expected: Any) -> None:
    a, b, c, d = (np.array([word], dtype=np.uint32) for word in counter)
    assert tuple(int(word[0]) for word in philox4x32((a, b, c, d), key)) == expected


def test_noise_of_a_token_does_not_depend_on_the_tokens_beside_it() -> None:
    together = gumbel_noise(7, 11, np.arange(1000))
    alone = np.array([gumbel_noise(7, 11, np.array([token]))[0] for token in (0, 1, 17, 999)])
    assert np.array_equal(together[[0, 1, 17, 999]], alone)


@pytest.mark.parametrize("other", [{"seed": 8}, {"seed": 7 + 2**32}, {"position": 12}])
def test_noise_changes_with_each_part_of_its_key(other: Any) -> None:
    key = {"seed": 7, "position": 11} | other
    base = gumbel_noise(7, 11, np.arange(1000))
    changed = gumbel_noise(key["seed"], key["position"], np.arange(1000))
    assert abs(np.corrcoef(base, changed)[0, 1]) < 0.1
    assert not np.any(base == changed)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(3, 5, np.arange(200_000))
    euler_gamma = 0.5772156649
    assert noise.mean() == pytest.approx(euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.01)
    assert noise.max() <= MAX_GUMBEL
