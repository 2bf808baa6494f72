"""Paged attention for decode steps: few rows a sequence, keys split over many programs (flash-decoding).

    row i of a sequence with n rows has position p = context_len - n + i
    and sees the keys at max(0, p - sliding_window + 1) .. p

Keys are cut at multiples of `split_size`, whatever the batch: split j holds [j * split_size, (j + 1) * split_size).
A program computes one split for one KV head and all query heads and rows that read it, so K and V are loaded once
(grouped heads, arXiv 2305.13245; Flash-Decoding, Dao et al. 2023). A second kernel combines the splits of a row in
order. So a row's result depends on its own keys and `split_size` alone: not on the batch, on rows beside it (draft
tokens), or on the number of programs.

`engine/kernels/triton/paged_prefill.py` is for many rows a sequence. The oracle is `reference_quant.paged_attention`.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import LOG2_E, VALUE_SCALE_SHIFT, attend_tile, tanh, to_operand
from engine.kernels.triton.launch import (
    FLOAT_DTYPES,
    cdiv,
    check,
    check_tensor,
    dot_precision,
    jit_for_sizes,
    next_power_of_2,
)
from engine.kernels.triton.layer_cache import LayerCache

_COMBINED_SPLITS = 16
"""Splits that the combining kernel sums at once; part of what fixes the bits of a result."""
_MIN_DOT_ROWS = 16
_MAX_FP32_KEYS = 32
"""Keys of a tile for fp32 queries, whose products are made of many scalars that larger tiles keep in memory."""


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How the work is cut. The defaults suit long contexts; `split_size` and `block_n` decide a result's last bits."""

    split_size: int = 256
    """Keys of a split; a multiple of `block_n`."""
    block_n: int = 64
    """Keys of a tile; a power of two."""
    max_split_programs: int = 64
    """Most programs over the splits of one sequence; each then takes several splits in turn."""
    num_warps: int = 4
    num_stages: int = 5
    """Depth of the loads. The block table comes one load before the keys, so 5 keep two tiles of keys under way."""

    def __post_init__(self) -> None:
        check(self.block_n >= 16 and next_power_of_2(self.block_n) == self.block_n, "block_n must be a power of two")
        check(self.split_size % self.block_n == 0, f"splits of {self.split_size} are no whole tiles of {self.block_n}")


def paged_attention_decode(
    query: Tensor,
    cache: LayerCache,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    *,
    max_rows: int,
    max_context_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tiles: DecodeTiles = DecodeTiles(),
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Attend from each row to its sequence's tokens up to itself.

    Reads no device memory on the host, so it can be captured in a CUDA graph: the grid follows from the sizes alone.
    Rows of padding sequences (`context_len` 0) become 0; rows that no sequence owns are not written.

    Args:
        query: [num_rows, num_heads, head_dim] fp16, bf16 or fp32, rotated and not scaled.
        cache: The layer's cache with the step's own tokens in it.
        query_start: [num_seqs + 1] int32, half-open row ranges.
        context_lens: [num_seqs] int32, tokens in the cache, the step's own included; 0 = padding.
        block_tables: [num_seqs, max_blocks] int32.
        max_rows: No sequence has more rows.
        max_context_len: No context is longer.
        sliding_window: Tokens a position looks back at, itself included; None = all.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; None = as they are.
        tiles: How to cut the work.
        out: Where to write; None = a new tensor.
        scratch: fp32 memory of at least `decode_scratch_size` elements; None = new memory.

    Returns:
        [num_rows, num_heads, head_dim] in the query's dtype.

    Raises:
        ValueError: Shapes, dtypes or strides are not those above.
    """
    num_rows, num_heads, head_dim = query.shape
    num_seqs = context_lens.shape[0]
    check_attention(query, cache, query_start, context_lens, block_tables)
    out = torch.empty_like(query) if out is None else out
    check_tensor("out", out, (num_rows, num_heads, head_dim), (query.dtype,))
    group = num_heads // cache.num_kv_heads
    max_splits = cdiv(max(max_context_len, 1), tiles.split_size)
    size = decode_scratch_size(num_rows, num_heads, head_dim, max_context_len, tiles)
    if scratch is None:
        scratch = torch.empty(size, dtype=torch.float32, device=query.device)
    check(scratch.dtype is torch.float32 and scratch.is_contiguous(), "scratch is contiguous fp32")
    check(scratch.numel() >= size, f"{scratch.numel()} elements of scratch are less than {size}")
    if num_seqs == 0 or num_rows == 0:
        return out
    states, weighted = (
        scratch[: 2 * num_rows * num_heads * max_splits],
        scratch[2 * num_rows * num_heads * max_splits :],
    )
    # Rows of a tile times heads of a group are the M rows of one product; 16 is the least the tensor cores take.
    block_m = max(_MIN_DOT_ROWS, next_power_of_2(group))
    rows_per_tile = block_m // group
    grid = (num_seqs, cache.num_kv_heads * cdiv(max_rows, rows_per_tile), min(max_splits, tiles.max_split_programs))
    block_n = min(tiles.block_n, _MAX_FP32_KEYS) if query.dtype is torch.float32 else tiles.block_n
    common = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": next_power_of_2(head_dim),
        "SPLIT_SIZE": tiles.split_size,
        "WINDOW": sliding_window or 0,
    }
    _attend_splits[grid](
        query,
        cache.elements,
        cache.scales_or_elements,
        query_start,
        context_lens,
        block_tables,
        states,
        weighted,
        cache.elements.stride(0),
        cache.scale_stride,
        block_tables.stride(0),
        max_splits,
        head_dim**-0.5,
        soft_cap or 1.0,
        NUM_KV_HEADS=cache.num_kv_heads,
        BLOCK_SIZE=cache.block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        HAS_SCALES=cache.scales is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **common,
    )
    _combine_splits[(num_seqs, max_rows, num_heads)](
        states, weighted, query_start, context_lens, out, max_splits, COMBINED=_COMBINED_SPLITS, num_warps=2, **common
    )
    return out


def decode_scratch_size(num_rows: int, num_heads: int, head_dim: int, max_context_len: int, tiles: DecodeTiles) -> int:
    """Elements of fp32 scratch that `paged_attention_decode` needs."""
    return num_rows * num_heads * cdiv(max(max_context_len, 1), tiles.split_size) * (head_dim + 2)


def check_attention(
    query: Tensor, cache: LayerCache, query_start: Tensor, context_lens: Tensor, block_tables: Tensor
) -> None:
    """Refuse attention arguments that do not fit together.

    Raises:
        ValueError: Names the argument.
    """
    check_tensor("query", query, (None, None, cache.head_dim), FLOAT_DTYPES)
    num_seqs, num_heads = context_lens.shape[0], query.shape[1]
    check(num_heads % cache.num_kv_heads == 0, f"{num_heads} heads do not share {cache.num_kv_heads} KV heads evenly")
    check_tensor("query_start", query_start, (num_seqs + 1,), (torch.int32,))
    check_tensor("context_lens", context_lens, (num_seqs,), (torch.int32,))
    check_tensor("block_tables", block_tables, (num_seqs, None), (torch.int32,), is_contiguous=False)


@jit_for_sizes("max_splits", "table_stride")
def _attend_splits(
    query_ptr: tl.tensor,
    elements_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    states_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    table_stride: tl.tensor,
    max_splits: tl.tensor,
    score_scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Softmax states of (sequence, KV head and row tile, every num_programs-th split).

    Writes states [num_rows, num_heads, max_splits, 2] (peak, total) and weighted [num_rows, num_heads, max_splits,
    head_dim], not divided by the total, for every row and split in which any row of the tile sees a key.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    ROWS: tl.constexpr = BLOCK_M // GROUP
    seq = tl.program_id(0)
    kv_head = tl.program_id(1) % NUM_KV_HEADS
    first_row = tl.program_id(1) // NUM_KV_HEADS * ROWS
    row_start = tl.load(query_start_ptr + seq)
    num_rows = tl.load(query_start_ptr + seq + 1) - row_start
    context_len = tl.load(context_lens_ptr + seq)
    if (first_row >= num_rows) | (context_len == 0):
        return
    first_position = context_len - num_rows + first_row
    end_key = tl.minimum(context_len, first_position + ROWS)
    first_key = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    is_row = (m < ROWS * GROUP) & (first_row + m // GROUP < num_rows)
    positions = first_position + m // GROUP
    # [row, head] flattened; int64 because the scratch of a long step passes 2 ** 31 elements.
    row_heads = (row_start + first_row + m // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + m % GROUP
    is_element = is_row[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + row_heads[:, None] * HEAD_DIM + d[None, :], mask=is_element, other=0.0)
    # 8-bit elements are exact in fp16, to which the hardware converts them faster than to bf16.
    operand: tl.constexpr = tl.float16 if HAS_SCALES and query.dtype != tl.float32 else query.dtype
    query = query.to(operand)
    # Folded into one factor: scores come out as powers of two, whatever the soft cap does in between.
    scale = score_scale if HAS_SOFT_CAP else score_scale * LOG2_E
    table_ptr = block_tables_ptr + seq * table_stride
    key_ptr = elements_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    value_ptr = key_ptr + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    key_scale_ptr = scales_ptr + kv_head * BLOCK_SIZE
    value_scale_ptr = key_scale_ptr + NUM_KV_HEADS * BLOCK_SIZE

    first_split = first_key // SPLIT_SIZE + tl.program_id(2)
    for split in range(first_split, tl.cdiv(end_key, SPLIT_SIZE), tl.num_programs(2)):
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        tile_start = tl.maximum(split * SPLIT_SIZE, first_key // BLOCK_N * BLOCK_N)
        tile_end = tl.minimum((split + 1) * SPLIT_SIZE, end_key)
        for start in range(tile_start, tile_end, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            is_key = keys < end_key
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            offsets = blocks * block_stride + keys % BLOCK_SIZE * HEAD_DIM
            is_loaded = is_key[None, :] & (d < HEAD_DIM)[:, None]
            k = tl.load(key_ptr + offsets[None, :] + d[:, None], mask=is_loaded, other=0.0)
            scores = tl.dot(query, to_operand(k, operand), input_precision=PRECISION) * scale
            value_scales = tl.zeros([BLOCK_N], tl.float32)
            if HAS_SCALES:
                scale_offsets = blocks * scale_stride + keys % BLOCK_SIZE
                scores *= tl.load(key_scale_ptr + scale_offsets, mask=is_key, other=0.0)[None, :]
                value_scales = tl.load(value_scale_ptr + scale_offsets, mask=is_key, other=0.0)
            if HAS_SOFT_CAP:
                scores = tanh(scores / soft_cap) * (soft_cap * LOG2_E)
            is_visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                is_visible = is_visible & (keys[None, :] > positions[:, None] - WINDOW)
            is_loaded = is_key[:, None] & (d < HEAD_DIM)[None, :]
            v = tl.load(value_ptr + offsets[:, None] + d[None, :], mask=is_loaded, other=0.0)
            peak, total, weighted = attend_tile(
                scores,
                is_visible,
                to_operand(v, operand),
                value_scales,
                peak,
                total,
                weighted,
                HAS_SCALES,
                PRECISION,
                True,
            )
        slots = row_heads * max_splits + split
        tl.store(states_ptr + slots * 2, peak, mask=is_row)
        tl.store(states_ptr + slots * 2 + 1, total, mask=is_row)
        if HAS_SCALES:
            weighted *= 1.0 / VALUE_SCALE_SHIFT
        tl.store(weighted_ptr + slots[:, None] * HEAD_DIM + d[None, :], weighted, mask=is_element)


@jit_for_sizes("max_splits")
def _combine_splits(
    states_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    max_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    COMBINED: tl.constexpr,
) -> None:
    """Sum the splits of (sequence, row, head), first to last, and divide by the total.

        out = sum_j 2 ** (peak_j - peak) * weighted_j / sum_j 2 ** (peak_j - peak) * total_j

    `COMBINED` splits at a time, in groups that begin at multiples of it: the order of the sum is the same for any
    context length and window.
    """
    seq = tl.program_id(0)
    row_start = tl.load(query_start_ptr + seq)
    num_rows = tl.load(query_start_ptr + seq + 1) - row_start
    if tl.program_id(1) >= num_rows:
        return
    context_len = tl.load(context_lens_ptr + seq)
    position = context_len - num_rows + tl.program_id(1)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(position - WINDOW + 1, 0) // SPLIT_SIZE
    end_split = tl.where(context_len > 0, position // SPLIT_SIZE + 1, 0)
    d = tl.arange(0, BLOCK_D)
    row_head = (row_start + tl.program_id(1)).to(tl.int64) * NUM_HEADS + tl.program_id(2)
    peak = float("-inf")
    total = 0.0
    weighted = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first_split // COMBINED * COMBINED, end_split, COMBINED):
        splits = start + tl.arange(0, COMBINED)
        is_split = (splits >= first_split) & (splits < end_split)
        slots = row_head * max_splits + splits
        peaks = tl.load(states_ptr + slots * 2, mask=is_split, other=float("-inf"))
        totals = tl.load(states_ptr + slots * 2 + 1, mask=is_split, other=0.0)
        is_element = is_split[:, None] & (d < HEAD_DIM)[None, :]
        parts = tl.load(weighted_ptr + slots[:, None] * HEAD_DIM + d[None, :], mask=is_element, other=0.0)
        # Every split in the range holds a key that this row sees, so the peak is finite.
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        factors = tl.exp2(peaks - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(totals * factors, 0)
        weighted = weighted * decay + tl.sum(parts * factors[:, None], 0)
        peak = new_peak
    result = weighted / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row_head * HEAD_DIM + d, result.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
