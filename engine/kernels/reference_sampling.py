"""Oracle for sampling on the device, in plain PyTorch: one row after the other, sorted, nothing clever.

The name is that of the launcher in `engine/kernels/triton/sampling.py`, which takes the same parameters as tensors.
"""

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def gumbel_noise(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """Noise -log(-log(u)), u = (word + 0.5) / 2**32, of the first word of Philox4x32-10 (Salmon et al., SC 2011).

    Args:
        seed: 64-bit key.
        position: Second counter word.
        token_ids: [n], the first counter word; the others are 0.

    Returns:
        [n] fp64.
    """
    c0 = token_ids.long()
    c1, c2, c3 = torch.full_like(c0, position), torch.zeros_like(c0), torch.zeros_like(c0)
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key[0], low1, high0 ^ c3 ^ key[1], low0
        key = [(word + step) & _MASK for word, step in zip(key, _WEYL, strict=True)]
    return -torch.log(-torch.log((c0.double() + 0.5) * 2.0**-32))


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """The argmax over what temperature, top_k, top_p and min_p leave, with Gumbel noise; of greedy rows without.

    Args:
        logits: [num_rows, vocab_size] fp32; banned tokens are -inf. Bias and penalties are applied.
        temperature: [num_rows]; 0 = greedy.
        top_k: [num_rows]; 0 = off.
        top_p: [num_rows] fp64; 1 = off.
        log_min_p: [num_rows] fp32; -inf = off.
        seeds: [num_rows] int64, the bits of the unsigned seed.
        positions: [num_rows].

    Returns:
        [num_rows] int64. Equal weights go to the smaller token id.
    """
    tokens = []
    for row in range(logits.shape[0]):
        if temperature[row] == 0:
            tokens.append(int(logits[row].argmax()))
            continue
        weights, ids = torch.sort(logits[row] / temperature[row], descending=True, stable=True)
        finite = int(torch.isfinite(weights).sum())
        kept = min(finite, int(top_k[row])) if top_k[row] > 0 else finite
        shares = torch.exp((weights[:kept] - weights[0]).double())
        mass_before = torch.cumsum(shares, 0) - shares
        is_left = mass_before < top_p[row] * shares.sum() if top_p[row] < 1 else torch.ones(kept, dtype=torch.bool)
        is_left &= weights[:kept] >= weights[0] + log_min_p[row]
        left = ids[:kept][is_left]
        noisy = weights[:kept][is_left].double() + gumbel_noise(int(seeds[row]), int(positions[row]), left)
        tokens.append(int(left[noisy == noisy.max()].min()))
    return torch.tensor(tokens, dtype=torch.int64)


def _multiply(words: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product of 32-bit words, in int64 whose products would pass its range."""
    low = (words & 0xFFFF) * factor
    high = (words >> 16) * factor + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
