"""Small device functions that several kernels call: rounding, quantization, softmax parts, sums over splits.

All arithmetic is fp32. Formulas are written with operations that both the compiler and the interpreter have.
"""

import triton.language as tl

from engine.kernels.triton.launch import jit

LOG2_E = tl.constexpr(1.4426950408889634)  # softmax uses powers of two, which the hardware has: e**x = 2**(x * LOG2_E)
VALUE_SCALE_SHIFT = tl.constexpr(256.0)
INT8_MAX = tl.constexpr(127.0)
FP8_MAX = tl.constexpr(448.0)  # of e4m3
_FP8_ROUNDING_SHIFT = tl.constexpr(24576.0)  # 1.5 * 2 ** 14: fp32 numbers of this size are multiples of 2 ** -9
_ROUNDING_SHIFT = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: fp32 numbers of this size have no fractional bits


@jit
def round_half_even(x: tl.tensor) -> tl.tensor:
    """`torch.round` for |x| < 2 ** 22. A cast to int truncates, and rint is in a library the interpreter lacks."""
    return (x + _ROUNDING_SHIFT) - _ROUNDING_SHIFT


@jit
def round_to_fp8(x: tl.tensor) -> tl.tensor:
    """The nearest number that fp8 e4m3 has, ties to the even one, as fp32; |x| <= 464, which rounds to 448.

    The cast alone does the same on the GPU. The interpreter's loses the carry into the exponent; of a number that fp8
    has it makes the right bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    # Three bits of the mantissa stay: add just under half a step, or half a step to an odd number, and cut.
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    # Below 2 ** -6 steps are 2 ** -9, whatever the exponent.
    small = (x + _FP8_ROUNDING_SHIFT) - _FP8_ROUNDING_SHIFT
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@jit
def absmax_scale(largest: tl.tensor, is_int8: tl.constexpr) -> tl.tensor:
    """The scale that takes the largest magnitude of a row to the type's largest value. 0 for a row of zeros.

    With `div_rn`, because `/` is an approximate division on the GPU, and scales travel between workers.
    """
    if is_int8:
        return tl.div_rn(largest, INT8_MAX)
    return tl.div_rn(largest, FP8_MAX)


@jit
def quantize(x: tl.tensor, scale: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`x / scale` in int8 or fp8, fp32 in; `scale` broadcasts. A row of scale 0 is all zeros and stays so."""
    scaled = tl.div_rn(x, tl.where(scale > 0, scale, 1.0))
    rounded = round_half_even(scaled) if dtype == tl.int8 else round_to_fp8(scaled)
    return rounded.to(dtype)


@jit
def to_operand(elements: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Cache elements in the type of a product.

    int8 becomes fp16 exactly, as the lowest bits of the mantissa of 1024: a conversion from integers runs at a quarter
    of the rate of these bit operations.
    """
    if elements.dtype == tl.int8 and dtype == tl.float16:
        biased = ((elements.to(tl.int16) & 0xFF) ^ 0x80) | 0x6400  # 1024 + (x + 128)
        operand = biased.to(tl.float16, bitcast=True) - 1152.0
    else:
        operand = elements.to(dtype)
    return operand


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Within 1e-7 of tanh; the library function is not in the interpreter."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@jit
def attend_tile(
    scores: tl.tensor,
    is_visible: tl.tensor,
    values: tl.tensor,
    value_scales: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    has_scales: tl.constexpr,
    precision: tl.constexpr,
    is_masked: tl.constexpr,
) -> tl.tensor:
    """Add one tile of keys to a running softmax (online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135).

        peak' = max(peak, scores)    p = 2 ** (scores - peak')    total' = total * 2 ** (peak - peak') + sum(p)

    Args:
        scores: [M, N] fp32, times log2(e).
        is_visible: [M, N] bool. A row that sees nothing leaves its state exactly as it was.
        values: [N, head_dim] in the type of the product; 0 where there is no token.
        value_scales: [N] fp32; read if `has_scales`, and then part of p rather than of the values, which costs M * N
            multiplications instead of N * head_dim. `weighted` is then `VALUE_SCALE_SHIFT` times as large.
        peak: [M] fp32 running maximum, -inf before the first key.
        total: [M] fp32 running sum.
        weighted: [M, head_dim] fp32 running product.
        has_scales: Whether values come with scales.
        precision: `input_precision` of the product.
        is_masked: Whether `is_visible` is read; otherwise every row sees every key.

    Returns:
        The new peak, total and weighted.
    """
    if is_masked:
        scores = tl.where(is_visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # Of a row that has seen no key yet, -inf - -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(p, 1)
    if has_scales:
        # Shifted, because such products are small and fp16 has few small numbers. Scales up to 255 do not overflow.
        p = p * (value_scales * VALUE_SCALE_SHIFT)[None, :]
    # The tensor cores take p in the type of the values; its error is that type's rounding of weights below 1.
    weighted = weighted * decay[:, None] + tl.dot(p.to(values.dtype), values, input_precision=precision)
    return new_peak, total, weighted
