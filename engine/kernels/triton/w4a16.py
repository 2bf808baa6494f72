"""Linear layers on 4-bit group-quantized weights with 16-bit (or fp32) activations.

    out[m, n] = sum over groups g of   scale[g, n] * sum_k x[m, k] * (q[n, k] - zero[g, n])        AWQ, GPTQ, GGUF Q4_0
                + min'[g, n] * sum_k x[m, k]        min' = min + 8 * scale, zero = 8               GGUF Q4_1

q - zero is exact in every activation type, so the tensor cores multiply small whole numbers, and the scale is applied
to their fp32 sum: [rows, columns] multiplications a group instead of one for every weight.

Few rows are bound by reading the weights, which this kernel does once, at 4 bits, and by the instructions that unpack
them, of which there are three a weight: see `_plane`. For many rows the weights are dequantized once into scratch, and
PyTorch's product does the rest. The oracle is `reference_quant.w4a16_linear`.
"""

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from engine.kernels.triton.int4_weight import CHUNK, PLANE, Int4Weight
from engine.kernels.triton.launch import (
    FLOAT_DTYPES,
    cdiv,
    check,
    check_tensor,
    dot_precision,
    is_interpreted,
    jit,
    jit_for_sizes,
    next_power_of_2,
)
from engine.kernels.triton.split_k import GemmTiles, SplitScratch, store_product, tile_of

DEQUANTIZED_ROWS = 128
"""From so many rows on, dequantizing costs less than the kernel's multiplications of scales."""
_DEQUANTIZED_TILE = 64
_PLANE = tl.constexpr(PLANE)
_CHUNK = tl.constexpr(CHUNK)


def w4a16_linear(
    x: Tensor,
    weight: Int4Weight,
    bias: Tensor | None = None,
    *,
    tiles: GemmTiles | None = None,
    scratch: SplitScratch | None = None,
    is_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [num_rows, in_features] fp16, bf16 or fp32.
        weight: The weight, on the device of `x`.
        bias: [out_features] of an activation type, or None.
        tiles: How to cut; None = by the sizes. `block_k` is not used: a step is one chunk.
        scratch: For split sums; None = new memory.
        is_invariant: Whether a row's bits must not depend on the number of rows: always this kernel, always the same
            tiles.
        out_dtype: Type of the result; None = that of `x`.

    Returns:
        [num_rows, out_features].
    """
    check_tensor("x", x, (None, weight.in_features), FLOAT_DTYPES)
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    num_rows, out_features = x.shape[0], weight.out_features
    if num_rows >= DEQUANTIZED_ROWS and not is_invariant and tiles is None:
        return functional.linear(x, dequantize_int4(weight, x.dtype), None if bias is None else bias.to(x.dtype)).to(
            out_dtype or x.dtype
        )
    if tiles is None:
        num_chunks = weight.packed.shape[0]
        tiles = fast_tiles(1 if is_invariant else num_rows, out_features, num_chunks)
    if bias is not None:
        check_tensor("bias", bias, (out_features,), FLOAT_DTYPES)
    out = torch.empty(num_rows, out_features, dtype=out_dtype or x.dtype, device=x.device)
    if not out.numel():
        return out
    memory = SplitScratch.fitting(scratch, tiles, num_rows, out_features, x.device)
    _w4a16_linear[tiles.grid(num_rows, out_features)](
        x,
        weight.packed,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.packed,
        weight.mins if weight.mins is not None else weight.scales,
        x if bias is None else bias,
        out,
        memory.partials,
        memory.arrivals,
        num_rows,
        out_features,
        weight.in_features,
        weight.packed.shape[0],
        GROUP=weight.group,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        SPLIT_K=tiles.split_k,
        IS_EVEN_K=weight.in_features % CHUNK == 0,
        USES_ASSEMBLY=x.dtype is not torch.float32 and not is_interpreted(),
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINS=weight.mins is not None,
        HAS_BIAS=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> Tensor:
    """The weight as [out_features, in_features] of an activation type; columns in the weight's own order."""
    check(dtype in FLOAT_DTYPES, f"{dtype} is not one of {FLOAT_DTYPES}")
    num_chunks, out_features, _ = weight.packed.shape
    out = torch.empty(out_features, weight.in_features, dtype=dtype, device=weight.packed.device)
    _dequantize_int4[(num_chunks, cdiv(out_features, _DEQUANTIZED_TILE))](
        weight.packed,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.packed,
        weight.mins if weight.mins is not None else weight.scales,
        out,
        out_features,
        weight.in_features,
        GROUP=weight.group,
        BLOCK_N=_DEQUANTIZED_TILE,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINS=weight.mins is not None,
        num_warps=4,
    )
    return out


def fast_tiles(num_rows: int, out_features: int, num_chunks: int) -> GemmTiles:
    """Tiles for a product's sizes. Those for one row depend on the weight alone."""
    block_m = min(64, max(16, next_power_of_2(num_rows)))
    tiles = GemmTiles(block_m, 128 if block_m == 16 else 64, 16, num_warps=4, num_stages=4)
    return tiles.spread(num_rows, out_features, num_chunks)


@jit_for_sizes("num_rows")
def _w4a16_linear(
    x_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    mins_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_k: tl.tensor,
    num_chunks: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IS_EVEN_K: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    USES_ASSEMBLY: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Tile program_id(0), chunks of split program_id(1)."""
    PLANES: tl.constexpr = _CHUNK // _PLANE
    PLANES_OF_GROUP: tl.constexpr = GROUP // _PLANE if GROUP < _CHUNK else PLANES
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    tile_m, tile_n = tile_of(tl.program_id(0), num_rows, num_columns, BLOCK_M, BLOCK_N)
    # Rows and columns past the end read the last one again, as in `gemm.py`.
    rows = tl.minimum(tile_m * BLOCK_M + tl.arange(0, BLOCK_M), num_rows - 1)
    columns = tl.minimum(tile_n * BLOCK_N + tl.arange(0, BLOCK_N), num_columns - 1)
    j = tl.arange(0, _PLANE)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * num_k + j[None, :]
    packed_ptrs = packed_ptr + columns.to(tl.int64)[None, :] * _PLANE + j[:, None]
    chunk_words = tl.cast(num_columns, tl.int64) * _PLANE
    steps = tl.cdiv(num_chunks, SPLIT_K)
    start = tl.program_id(1) * steps
    end = tl.minimum(start + steps, num_chunks)
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Factors of the next chunk are fetched one chunk ahead, since the compiler only does so for operands of products.
    next_scale, next_zero, next_min = _factors(
        scales_ptr, zeros_ptr, mins_ptr, start * _CHUNK // GROUP, columns, num_columns, start < end, HAS_ZEROS, HAS_MINS
    )
    for chunk in range(start, end):
        packed = tl.load(packed_ptrs + chunk * chunk_words)
        for group in tl.static_range(PLANES // PLANES_OF_GROUP):
            scale, zero, least = next_scale, next_zero, next_min
            next_k = chunk * _CHUNK + (group + 1) * PLANES_OF_GROUP * _PLANE
            next_scale, next_zero, next_min = _factors(
                scales_ptr,
                zeros_ptr,
                mins_ptr,
                next_k // GROUP,
                columns,
                num_columns,
                next_k < num_k,
                HAS_ZEROS,
                HAS_MINS,
            )
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            inputs = tl.zeros([BLOCK_M], tl.float32)
            for plane in tl.static_range(group * PLANES_OF_GROUP, (group + 1) * PLANES_OF_GROUP):
                k = chunk * _CHUNK + plane * _PLANE
                is_k = tl.full([1, _PLANE], 1, tl.int1) if IS_EVEN_K else (k + j < num_k)[None, :]
                x = tl.load(x_ptrs + k, mask=is_k, other=0.0)
                weight = _plane(packed, plane, dtype, USES_ASSEMBLY) - _shifted(zero, dtype)[None, :]
                total = tl.dot(x, weight, total, input_precision=PRECISION)
                if HAS_MINS:
                    inputs += tl.sum(x.to(tl.float32), 1)
            product += total * scale[None, :]
            if HAS_MINS:
                product += inputs[:, None] * least[None, :]
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
def _dequantize_int4(
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    mins_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_k: tl.tensor,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
) -> None:
    """Chunk program_id(0) of BLOCK_N rows of the weight."""
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    safe_columns = tl.minimum(columns, num_columns - 1)
    j = tl.arange(0, _PLANE)
    packed = tl.load(packed_ptr + (chunk * num_columns + safe_columns)[:, None] * _PLANE + j[None, :])
    for plane in tl.static_range(_CHUNK // _PLANE):
        k = chunk * _CHUNK + plane * _PLANE
        scale, zero, least = _factors(
            scales_ptr, zeros_ptr, mins_ptr, k // GROUP, safe_columns, num_columns, k < num_k, HAS_ZEROS, HAS_MINS
        )
        values = (((packed >> (4 * plane)) & 15).to(tl.float32) - zero[:, None]) * scale[:, None]
        if HAS_MINS:
            values += least[:, None]
        out_ptrs = out_ptr + columns.to(tl.int64)[:, None] * num_k + k + j[None, :]
        is_stored = (columns < num_columns)[:, None] & (k + j < num_k)[None, :]
        tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=is_stored)


@jit
def _plane(packed: tl.tensor, plane: tl.constexpr, dtype: tl.constexpr, uses_assembly: tl.constexpr) -> tl.tensor:
    """The values q of one plane of words, as 128 + q (bf16), 1024 + q (fp16) or q (fp32).

    The 16-bit types have q in the lowest bits of their mantissa at these offsets, so that it takes a shift and one bit
    operation to make two numbers; conversions from integers run at a quarter of that rate. The compiler does not see
    that two words share a register, hence the assembly, which the interpreter replaces by the same operations.
    """
    if uses_assembly:
        if dtype == tl.bfloat16:
            values = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.u32 t, $1, {4 * plane}; lop3.b32 $0, t, 0x000F000F, 0x43004300, 0xEA; }}",
                "=r,r",
                [packed],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2,
            )
        else:
            values = tl.inline_asm_elementwise(
                f"{{ .reg .b32 t; shr.u32 t, $1, {4 * plane}; lop3.b32 $0, t, 0x000F000F, 0x64006400, 0xEA; }}",
                "=r,r",
                [packed],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
    elif dtype == tl.bfloat16:
        values = (((packed >> (4 * plane)) & 15) | 0x4300).to(dtype, bitcast=True)
    elif dtype == tl.float16:
        values = (((packed >> (4 * plane)) & 15) | 0x6400).to(dtype, bitcast=True)
    else:
        values = ((packed >> (4 * plane)) & 15).to(tl.float32)
    return values


@jit
def _shifted(zero: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """A zero at the offset that `_plane` gives to values; exact."""
    if dtype == tl.bfloat16:
        shifted = (zero + 128.0).to(dtype)
    elif dtype == tl.float16:
        shifted = (zero + 1024.0).to(dtype)
    else:
        shifted = zero
    return shifted


@jit
def _factors(
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    mins_ptr: tl.tensor,
    group: tl.tensor,
    columns: tl.tensor,
    num_columns: tl.tensor,
    is_group: tl.tensor,
    HAS_ZEROS: tl.constexpr,
    HAS_MINS: tl.constexpr,
) -> tl.tensor:
    """Scales, zeros and mins' [columns] fp32 of a group; 0 past the last group."""
    offsets = group * num_columns + columns
    scale = tl.load(scales_ptr + offsets, mask=is_group, other=0.0).to(tl.float32)
    zero = tl.full(scale.shape, 8.0, tl.float32)
    least = tl.zeros_like(scale)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + offsets, mask=is_group, other=0).to(tl.float32)
    if HAS_MINS:
        # Values are taken as q - 8, so that sums stay small; the minimum then belongs to q = 8.
        least = tl.load(mins_ptr + offsets, mask=is_group, other=0.0).to(tl.float32) + 8.0 * scale
    return scale, zero, least
