"""Linear layers on whole numbers of bytes a weight: fp32, fp16, bf16 as they are, int8 and fp8 with row scales.

    linear:                 out = x @ weight.T + bias
    int8 / fp8_linear:      out[m, n] = x_scales[m] * weight_scales[n] * sum_k x[m, k] * weight[n, k] + bias[n]

One kernel: tiles of [BLOCK_M, BLOCK_N], K in steps and, for few rows, split over programs (`split_k.py`). Sums are
int32 for int8 (exact) and fp32 otherwise. Weights are [out_features, in_features], as checkpoints have them.

Batch invariance: with the same tiles a row's result does not depend on the number of rows. `linear` always takes the
tiles that `invariant_tiles` gives for a weight; for speed alone PyTorch's product is the better choice where there is
one. The oracles are `reference.linear`, `reference_quant.int8_linear` and `reference_quant.fp8_linear`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import absmax_scale, quantize
from engine.kernels.triton.launch import (
    FLOAT_DTYPES,
    cdiv,
    check,
    check_tensor,
    dot_precision,
    jit,
    jit_for_sizes,
    next_power_of_2,
)
from engine.kernels.triton.norms import QUANTIZED_DTYPES
from engine.kernels.triton.split_k import GemmTiles, SplitScratch, store_product, tile_of

_FEW_ROWS = 64


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    tiles: GemmTiles | None = None,
    scratch: SplitScratch | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, the same bits for a row whatever the number of rows.

    Args:
        x: [num_rows, in_features] of an activation type.
        weight: [out_features, in_features] of the same type.
        bias: [out_features] of an activation type, or None.
        tiles: How to cut; None = `invariant_tiles`.
        scratch: For split sums; None = new memory.
        out_dtype: Type of the result; None = that of `x`.

    Returns:
        [num_rows, out_features].
    """
    check_tensor("x", x, (None, weight.shape[1]), FLOAT_DTYPES)
    check_tensor("weight", weight, (None, None), (x.dtype,))
    tiles = tiles or invariant_tiles(weight.shape[0], weight.shape[1], x.dtype.itemsize)
    return _multiply(x, weight, bias, None, None, tiles, scratch, out_dtype or x.dtype)


def int8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    tiles: GemmTiles | None = None,
    scratch: SplitScratch | None = None,
) -> Tensor:
    """Product of int8 rows and int8 weights with exact int32 sums.

    Args:
        x: [num_rows, in_features] int8, from `quantize_rows` or a fused kernel.
        x_scales: [num_rows] fp32.
        weight: [out_features, in_features] int8.
        weight_scales: [out_features] fp32.
        bias: [out_features] or None.
        out_dtype: Type of the result.
        tiles: How to cut; None = by the sizes.
        scratch: For split sums; None = new memory.

    Returns:
        [num_rows, out_features].
    """
    return _scaled(x, x_scales, weight, weight_scales, bias, torch.int8, out_dtype, tiles, scratch)


def fp8_linear(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    tiles: GemmTiles | None = None,
    scratch: SplitScratch | None = None,
) -> Tensor:
    """Product of fp8 (e4m3) rows and fp8 weights with fp32 sums; arguments as in `int8_linear`."""
    return _scaled(x, x_scales, weight, weight_scales, bias, torch.float8_e4m3fn, out_dtype, tiles, scratch)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row by its largest magnitude; see `reference_quant.quantize_rows`.

    Args:
        x: [num_rows, n] of an activation type.
        dtype: int8 or float8_e4m3fn.

    Returns:
        Elements [num_rows, n] of `dtype` and scales [num_rows] fp32.
    """
    check_tensor("x", x, (None, None), FLOAT_DTYPES)
    check(dtype in QUANTIZED_DTYPES, f"{dtype} is not one of {QUANTIZED_DTYPES}")
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.numel():
        block = next_power_of_2(x.shape[1])
        _quantize_rows[(x.shape[0],)](x, out, scales, x.shape[1], BLOCK=block, num_warps=min(16, max(1, block // 512)))
    return out, scales


def invariant_tiles(out_features: int, in_features: int, itemsize: int) -> GemmTiles:
    """Tiles that depend on the weight alone: good for few rows, fair for many."""
    block_k = 128 // itemsize
    tiles = GemmTiles(64, 64, block_k, num_warps=4, num_stages=4)
    return tiles.spread(1, out_features, cdiv(in_features, block_k))


def fast_tiles(num_rows: int, out_features: int, in_features: int, itemsize: int) -> GemmTiles:
    """Tiles for a product's sizes: split along K where there are few rows, large where there are many."""
    if num_rows <= _FEW_ROWS:
        block_k = 256 // itemsize
        tiles = GemmTiles(max(16, next_power_of_2(num_rows)), 64, block_k, num_warps=4, num_stages=4)
        return tiles.spread(num_rows, out_features, cdiv(in_features, block_k))
    return GemmTiles(128, 128, 128 // itemsize, num_warps=8, num_stages=4)


def _scaled(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    tiles: GemmTiles | None,
    scratch: SplitScratch | None,
) -> Tensor:
    check_tensor("x", x, (None, weight.shape[1]), (dtype,))
    check_tensor("x_scales", x_scales, (x.shape[0],), (torch.float32,))
    check_tensor("weight", weight, (None, None), (dtype,))
    check_tensor("weight_scales", weight_scales, (weight.shape[0],), (torch.float32,))
    tiles = tiles or fast_tiles(x.shape[0], weight.shape[0], weight.shape[1], 1)
    return _multiply(x, weight, bias, x_scales, weight_scales, tiles, scratch, out_dtype)


def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scales: Tensor | None,
    weight_scales: Tensor | None,
    tiles: GemmTiles,
    scratch: SplitScratch | None,
    out_dtype: torch.dtype,
) -> Tensor:
    num_rows, num_columns = x.shape[0], weight.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (num_columns,), FLOAT_DTYPES)
    out = torch.empty(num_rows, num_columns, dtype=out_dtype, device=x.device)
    if not out.numel():
        return out
    memory = SplitScratch.fitting(scratch, tiles, num_rows, num_columns, x.device)
    _linear[tiles.grid(num_rows, num_columns)](
        x,
        weight,
        x if x_scales is None else x_scales,
        weight if weight_scales is None else weight_scales,
        x if bias is None else bias,
        out,
        memory.partials,
        memory.arrivals,
        num_rows,
        num_columns,
        x.shape[1],
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        SPLIT_K=tiles.split_k,
        IS_EVEN_K=x.shape[1] % tiles.block_k == 0,
        HAS_SCALES=x_scales is not None,
        HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


@jit_for_sizes("num_rows")
def _linear(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_k: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Tile program_id(0), steps of K of split program_id(1)."""
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    # Rows and columns past the end read the last one again: no mask in the loop, and what they give is not stored.
    rows = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), num_rows - 1)
    columns = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), num_columns - 1)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * num_k + k[None, :]
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * num_k + k[:, None]
    steps = tl.cdiv(tl.cdiv(num_k, BLOCK_K), SPLIT_K)
    start = tl.program_id(1) * steps * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], SUM)
    for first_k in range(start, tl.minimum(start + steps * BLOCK_K, num_k), BLOCK_K):
        if IS_EVEN_K:
            x = tl.load(x_ptrs + first_k)
            weight = tl.load(weight_ptrs + first_k)
        else:
            is_k = k < num_k - first_k
            x = tl.load(x_ptrs + first_k, mask=is_k[None, :], other=0.0)
            weight = tl.load(weight_ptrs + first_k, mask=is_k[:, None], other=0.0)
        # fp8 tensor cores sum in few bits; after every step the sum goes on in fp32.
        total = tl.dot(x, weight, total, input_precision=PRECISION, max_num_imprecise_acc=BLOCK_K, out_dtype=SUM)
    product = total.to(tl.float32)
    if HAS_SCALES:
        x_scales = tl.load(x_scales_ptr + rows)
        weight_scales = tl.load(weight_scales_ptr + columns)
        product *= x_scales[:, None] * weight_scales[None, :]
    store_product(
        product,
        tl.program_id(0),
        tile_m * BLOCK_M,
        tile_n * BLOCK_N,
        num_rows,
        num_columns,
        bias_ptr,
        out_ptr,
        partials_ptr,
        arrivals_ptr,
        BLOCK_M,
        BLOCK_N,
        SPLIT_K,
        HAS_BIAS,
    )


@jit
def _quantize_rows(
    x_ptr: tl.tensor, out_ptr: tl.tensor, scales_ptr: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """Row program_id(0)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * n + columns, mask=columns < n, other=0.0).to(tl.float32)
    scale = absmax_scale(tl.max(tl.abs(x), 0), out_ptr.dtype.element_ty == tl.int8)
    tl.store(scales_ptr + row, scale)
    tl.store(out_ptr + row * n + columns, quantize(x, scale, out_ptr.dtype.element_ty), mask=columns < n)
