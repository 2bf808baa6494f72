"""RMS norm over rows, alone or after adding a layer's output to the residual stream, with or without quantization.

    residual' = residual + x        out = residual' / sqrt(mean(residual'^2) + eps) * weight        (arXiv 1910.07467)

One program a row, the whole row in registers: one read and one write of device memory. Sums are fp32 over a fixed
shape, so a row's bits do not depend on its neighbours. The oracles are `reference.rms_norm` and
`reference_quant.add_rms_norm`, `reference_quant.quantize_rows`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import absmax_scale, quantize
from engine.kernels.triton.launch import FLOAT_DTYPES, check, check_tensor, jit, next_power_of_2

_MAX_ROW = 32768
"""Longest row that is kept in registers: 16 warps hold 64 elements a thread."""
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: [num_rows, n] of any activation type.
        weight: [n] of any activation type.
        eps: Added to the mean square.
        out_dtype: Type of the result; None = that of `x`.

    Returns:
        [num_rows, n].
    """
    out = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out_dtype: torch.dtype) -> Tensor:
    """Add `x` to the residual stream and norm the sum.

    Args:
        x: [num_rows, n] of any activation type.
        residual: [num_rows, n] of any activation type, changed in place. fp32 keeps the small additions of late layers.
        weight: [n].
        eps: Added to the mean square.
        out_dtype: Type of the result.

    Returns:
        [num_rows, n], the normed sum.
    """
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _launch(x, residual, weight, eps, out, None)
    return out


def add_rms_norm_quantize(
    x: Tensor | None, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`, its rows quantized as `reference_quant.quantize_rows` does.

    Args:
        x: [num_rows, n], or None = nothing is added.
        residual: [num_rows, n], changed in place if there is an `x`.
        weight: [n].
        eps: Added to the mean square.
        dtype: int8 or float8_e4m3fn.

    Returns:
        Elements [num_rows, n] of `dtype` and scales [num_rows] fp32.
    """
    check(dtype in QUANTIZED_DTYPES, f"{dtype} is not one of {QUANTIZED_DTYPES}")
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    scales = torch.empty(residual.shape[:1], dtype=torch.float32, device=residual.device)
    if x is None:
        _launch(residual, None, weight, eps, out, scales)
    else:
        _launch(x, residual, weight, eps, out, scales)
    return out, scales


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None) -> None:
    num_rows, n = x.shape
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check_tensor("weight", weight, (n,), FLOAT_DTYPES)
    if residual is not None:
        check_tensor("residual", residual, (num_rows, n), FLOAT_DTYPES)
    check(0 < n <= _MAX_ROW, f"rows of {n} elements do not fit in registers")
    if num_rows == 0:
        return
    block = next_power_of_2(n)
    _rms_norm[(num_rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x if scales is None else scales,
        n,
        eps,
        BLOCK=block,
        ADDS=residual is not None,
        QUANTIZES=scales is not None,
        num_warps=min(16, max(1, block // 512)),
    )


@jit
def _rms_norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    n: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    QUANTIZES: tl.constexpr,
) -> None:
    """Row program_id(0) of x, residual and out, all [num_rows, n]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < n
    x = tl.load(x_ptr + row * n + columns, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        kept = residual_ptr.dtype.element_ty
        x += tl.load(residual_ptr + row * n + columns, mask=is_column, other=0.0).to(tl.float32)
        rounded = x.to(kept)
        tl.store(residual_ptr + row * n + columns, rounded, mask=is_column)
        # The norm sees the sum as it is kept, or the same row would differ when it is normed again.
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * weight
    if QUANTIZES:
        scale = absmax_scale(tl.max(tl.abs(normed), 0), out_ptr.dtype.element_ty == tl.int8)
        tl.store(scales_ptr + row, scale)
        tl.store(out_ptr + row * n + columns, quantize(normed, scale, out_ptr.dtype.element_ty), mask=is_column)
    else:
        tl.store(out_ptr + row * n + columns, normed.to(out_ptr.dtype.element_ty), mask=is_column)
