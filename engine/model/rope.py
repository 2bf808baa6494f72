"""Rotary frequencies of a model: plain, linearly stretched, or Llama 3's per-frequency factors. Applied in kernels.

Computed in fp32 as the reference implementations do: at long positions the rounding is part of what models saw.
"""

import math

import torch
from torch import Tensor

from engine.config import RopeConfig, RopeScaling


def inverse_frequencies(rope: RopeConfig, head_dim: int, factors: Tensor | None = None) -> Tensor:
    """Radians that each pair of elements turns per position.

    Args:
        rope: Rotary settings.
        head_dim: Elements of a head.
        factors: [head_dim / 2] divisors that come with the weights (GGUF's `rope_freqs.weight`); None = none do, and
            Llama 3's are computed from the settings.

    Returns:
        [head_dim / 2] fp32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.scaling is RopeScaling.LINEAR:
        frequencies = frequencies / rope.factor
    elif rope.scaling is RopeScaling.LLAMA3 and factors is None:
        factors = _llama3_factors(rope, frequencies)
    return frequencies if factors is None else frequencies / factors


def _llama3_factors(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Divisors by wavelength: long waves are stretched by `factor`, short ones not, those between by a blend.

        wavelength   < original / high_freq    between                              > original / low_freq
        divisor      1                         1 / ((1 - blend) / factor + blend)   factor

    In fp32 and in this order of operations, so that they equal the ones that converters store in GGUF files.
    """
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    blend = (original / wavelengths - low) / (high - low)
    blended = 1 / ((1 - blend) / rope.factor + blend)
    stretched = torch.where(wavelengths > original / low, rope.factor, blended)
    return torch.where(wavelengths < original / high, 1.0, stretched)
