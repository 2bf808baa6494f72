"""Sampling noise keyed by (seed, absolute position, token id).

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with key = the 64-bit seed and
counter = (token id, position, 0, 0). The first output word x becomes u = (x + 0.5) / 2**32 and the noise
-log(-log(u)), a standard Gumbel variate. No state: any worker, language or kernel computes the same noise for the
same token, in any order and only for the tokens it needs.
"""

import numpy as np
from numpy.typing import NDArray

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_MASK = 0xFFFFFFFF
_LOW = np.uint64(_MASK)
_SHIFT = np.uint64(32)
_ROUNDS = 10

MAX_GUMBEL = float(-np.log(-np.log1p(-(2.0**-33))))
"""No noise is larger: a token whose logit lies further below the best noisy one cannot win."""


def philox4x32(
    counter: tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]], key: tuple[int, int]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]:
    """Return Philox4x32-10 of equally long counter words, element by element.

    Args:
        counter: Four uint32 arrays.
        key: Two 32-bit words, lower first.
    """
    c0, c1, c2, c3 = (word.astype(np.uint64) for word in counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0 = c0 * _MULTIPLIER_0
        product1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def gumbel_noise(seed: int, position: int, token_ids: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the noise of the named tokens at one position.

    Args:
        seed: The request's 64-bit seed.
        position: Absolute index of the token to be sampled: prompt tokens + tokens generated before it.
        token_ids: [n] token ids.

    Returns:
        [n] float64, at most `MAX_GUMBEL`.
    """
    ids = token_ids.astype(np.uint32)
    zeros = np.zeros_like(ids)
    word = philox4x32((ids, np.full_like(ids, position), zeros, zeros), (seed & _MASK, (seed >> 32) & _MASK))[0]
    uniform = (word.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(uniform)))
