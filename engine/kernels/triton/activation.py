"""SwiGLU's product, with or without quantization of its rows (arXiv 2002.05202).

    out = gate * sigmoid(gate) * up        gate_up = [gate | up] along the last dimension

Plain: one program a tile of a row. Quantized: one program a row, since a scale is known only once all of it is. The
oracles are `reference.silu_mul` and `reference_quant.silu_mul_quantize`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import absmax_scale, quantize
from engine.kernels.triton.launch import FLOAT_DTYPES, cdiv, check, check_tensor, jit, next_power_of_2
from engine.kernels.triton.norms import QUANTIZED_DTYPES

_TILE = 1024
_MAX_ROW = 32768


def silu_mul(gate_up: Tensor) -> Tensor:
    """[num_rows, 2 * n] -> [num_rows, n], `silu(first half) * second half`, computed in fp32."""
    num_rows, n = _check(gate_up)
    out = torch.empty(num_rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _silu_mul[(num_rows, cdiv(n, _TILE))](gate_up, out, out, n, BLOCK=_TILE, QUANTIZES=False, num_warps=4)
    return out


def silu_mul_quantize(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`silu_mul`, its rows quantized as `reference_quant.quantize_rows` does.

    Args:
        gate_up: [num_rows, 2 * n].
        dtype: int8 or float8_e4m3fn.

    Returns:
        Elements [num_rows, n] of `dtype` and scales [num_rows] fp32.
    """
    num_rows, n = _check(gate_up)
    check(dtype in QUANTIZED_DTYPES, f"{dtype} is not one of {QUANTIZED_DTYPES}")
    check(n <= _MAX_ROW, f"rows of {n} elements do not fit in registers")
    out = torch.empty(num_rows, n, dtype=dtype, device=gate_up.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
    if num_rows:
        block = next_power_of_2(n)
        warps = min(16, max(1, block // 512))
        _silu_mul[(num_rows, 1)](gate_up, out, scales, n, BLOCK=block, QUANTIZES=True, num_warps=warps)
    return out, scales


def _check(gate_up: Tensor) -> tuple[int, int]:
    check_tensor("gate_up", gate_up, (None, None), FLOAT_DTYPES)
    check(gate_up.shape[1] % 2 == 0, f"{gate_up.shape[1]} columns are not two halves")
    return gate_up.shape[0], gate_up.shape[1] // 2


@jit
def _silu_mul(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    n: tl.tensor,
    BLOCK: tl.constexpr,
    QUANTIZES: tl.constexpr,
) -> None:
    """Tile program_id(1) of row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < n
    gate = tl.load(gate_up_ptr + row * 2 * n + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * n + columns, mask=is_column, other=0.0).to(tl.float32)
    # fp32, because sigmoid of a 16-bit gate loses more than the result's own rounding.
    product = gate * tl.sigmoid(gate) * up
    if QUANTIZES:
        scale = absmax_scale(tl.max(tl.abs(product), 0), out_ptr.dtype.element_ty == tl.int8)
        tl.store(scales_ptr + row, scale)
        tl.store(out_ptr + row * n + columns, quantize(product, scale, out_ptr.dtype.element_ty), mask=is_column)
    else:
        tl.store(out_ptr + row * n + columns, product.to(out_ptr.dtype.element_ty), mask=is_column)
