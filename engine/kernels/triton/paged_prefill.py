"""Paged attention for prefill chunks: many rows a sequence, packed without padding, over cached prefixes.

    row i of a sequence with n rows has position p = context_len - n + i
    and sees the keys at max(0, p - sliding_window + 1) .. p

A program takes a tile of consecutive rows of one sequence with all query heads of one KV head, so that K and V are
loaded once for the group, and runs over the keys that its rows see (FlashAttention-2, arXiv 2307.08691). Keys that all
its rows see need no mask; only the tiles at both ends of the range are masked. The chunk's own tokens are read from the
cache like all others: what a row attends to is what a later step would read.

Its results differ from `paged_decode.py`'s in the last bits: tiles are larger and keys are not split. Where rows must
be bit-equal however they were computed, use that one for prefill too. The oracle is `reference_quant.paged_attention`.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import LOG2_E, VALUE_SCALE_SHIFT, attend_tile, tanh, to_operand
from engine.kernels.triton.launch import check, check_tensor, dot_precision, jit, jit_for_sizes, next_power_of_2
from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.paged_decode import check_attention


@dataclass(frozen=True, slots=True)
class PrefillTiles:
    """How the work is cut."""

    block_m: int = 128
    """Rows times heads of a group in a tile; a power of two, at least 16."""
    block_n: int = 64
    """Keys of a tile; a power of two, at least 16."""
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            value: int = getattr(self, name)
            check(value >= 16 and next_power_of_2(value) == value, f"{name} is {value}, no power of two from 16 up")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Which program takes which rows; made once a step on the host, used for every layer."""

    seqs: Tensor
    """[num_tiles] int32 on the device: the sequence of each tile."""
    first_rows: Tensor
    """[num_tiles] int32 on the device: its first row within the sequence."""
    rows_per_tile: int
    tiles: PrefillTiles


def plan_prefill(
    query_start: Tensor, group: int, device: torch.device, *, first_seq: int = 0, tiles: PrefillTiles = PrefillTiles()
) -> PrefillPlan:
    """Cut the rows of sequences from `first_seq` on into tiles.

    Args:
        query_start: [num_seqs + 1] int32 on the CPU, half-open row ranges.
        group: Query heads that share a KV head.
        device: Where the kernel will run.
        first_seq: Sequences before it are computed elsewhere.
        tiles: How to cut.
    """
    check(not query_start.is_cuda, "query_start is read on the host")
    # A group larger than the tile (no model has one) would leave no row; one row then spans a larger tile.
    rows_per_tile = max(1, tiles.block_m // group)
    starts = query_start.tolist()
    seqs: list[int] = []
    first_rows: list[int] = []
    for seq in range(first_seq, len(starts) - 1):
        rows = range(0, starts[seq + 1] - starts[seq], rows_per_tile)
        seqs += [seq] * len(rows)
        first_rows += rows
    # Tiles at the end of a prompt see the most keys: they start first, so that the last programs to run are short.
    table = torch.tensor([seqs[::-1], first_rows[::-1]], dtype=torch.int32).to(device, non_blocking=True)
    return PrefillPlan(table[0], table[1], rows_per_tile, tiles)


def paged_attention_prefill(
    query: Tensor,
    cache: LayerCache,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    plan: PrefillPlan,
    *,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from each planned row to its sequence's tokens up to itself.

    Args:
        query: [num_rows, num_heads, head_dim] fp16, bf16 or fp32, rotated and not scaled.
        cache: The layer's cache with the step's own tokens in it.
        query_start: [num_seqs + 1] int32 on the device.
        context_lens: [num_seqs] int32.
        block_tables: [num_seqs, max_blocks] int32.
        plan: From `plan_prefill`, for the same `query_start` and this model's group.
        sliding_window: Tokens a position looks back at, itself included; None = all.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`; None = as they are.
        out: Where to write; None = a new tensor.

    Returns:
        [num_rows, num_heads, head_dim] in the query's dtype; only planned rows are written.

    Raises:
        ValueError: Shapes, dtypes or strides are not those above.
    """
    num_rows, num_heads, head_dim = query.shape
    check_attention(query, cache, query_start, context_lens, block_tables)
    group = num_heads // cache.num_kv_heads
    block_m = max(plan.tiles.block_m, next_power_of_2(group))
    check(plan.rows_per_tile == max(1, plan.tiles.block_m // group), "the plan was made for another group")
    out = torch.empty_like(query) if out is None else out
    check_tensor("out", out, (num_rows, num_heads, head_dim), (query.dtype,))
    num_tiles = plan.seqs.shape[0]
    if num_tiles == 0:
        return out
    _attend_rows[(num_tiles, cache.num_kv_heads)](
        query,
        cache.elements,
        cache.scales_or_elements,
        plan.seqs,
        plan.first_rows,
        query_start,
        context_lens,
        block_tables,
        out,
        cache.elements.stride(0),
        cache.scale_stride,
        block_tables.stride(0),
        head_dim**-0.5,
        soft_cap or 1.0,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=cache.num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=next_power_of_2(head_dim),
        BLOCK_SIZE=cache.block_size,
        ROWS=plan.rows_per_tile,
        BLOCK_M=block_m,
        BLOCK_N=plan.tiles.block_n,
        WINDOW=sliding_window or 0,
        HAS_SCALES=cache.scales is not None,
        HAS_SOFT_CAP=soft_cap is not None,
        PRECISION=dot_precision(query.dtype),
        num_warps=plan.tiles.num_warps,
        num_stages=plan.tiles.num_stages,
    )
    return out


@jit_for_sizes("table_stride")
def _attend_rows(
    query_ptr: tl.tensor,
    elements_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    tile_seqs_ptr: tl.tensor,
    tile_rows_ptr: tl.tensor,
    query_start_ptr: tl.tensor,
    context_lens_ptr: tl.tensor,
    block_tables_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    table_stride: tl.tensor,
    score_scale: tl.tensor,
    soft_cap: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Attention of (tile of rows, KV head)."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    seq = tl.load(tile_seqs_ptr + tl.program_id(0))
    first_row = tl.load(tile_rows_ptr + tl.program_id(0))
    kv_head = tl.program_id(1)
    row_start = tl.load(query_start_ptr + seq)
    num_rows = tl.load(query_start_ptr + seq + 1) - row_start
    context_len = tl.load(context_lens_ptr + seq)
    first_position = context_len - num_rows + first_row
    end_key = tl.minimum(context_len, first_position + ROWS)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    is_row = (m < ROWS * GROUP) & (first_row + m // GROUP < num_rows)
    positions = first_position + m // GROUP
    row_heads = (row_start + first_row + m // GROUP).to(tl.int64) * NUM_HEADS + kv_head * GROUP + m % GROUP
    is_element = is_row[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + row_heads[:, None] * HEAD_DIM + d[None, :], mask=is_element, other=0.0)
    if HAS_SCALES and query.dtype == tl.bfloat16:
        # 8-bit elements are exact in fp16, to which the hardware converts them faster than to bf16.
        query = query.to(tl.float16)
    scale = score_scale if HAS_SOFT_CAP else score_scale * LOG2_E

    # Keys of this tile's range:   | masked: window begins | seen by every row | masked: diagonal |
    #                              first_key               open_start          open_end           end_key
    first_key = 0
    open_start = 0
    if WINDOW > 0:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        open_start = tl.cdiv(tl.maximum(end_key - WINDOW, 0), BLOCK_N) * BLOCK_N
    open_end = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, first_key)
    open_start = tl.minimum(tl.maximum(open_start, first_key), open_end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = block_tables_ptr + seq * table_stride
    key_ptr = elements_ptr + kv_head * BLOCK_SIZE * HEAD_DIM
    key_scale_ptr = scales_ptr + kv_head * BLOCK_SIZE
    for part in tl.static_range(3):
        # With no window the first part is empty; it is not even compiled then.
        if part != 0 or WINDOW > 0:
            part_start = first_key if part == 0 else (open_start if part == 1 else open_end)
            part_end = open_start if part == 0 else (open_end if part == 1 else end_key)
            for start in range(part_start, part_end, BLOCK_N):
                peak, total, weighted = _attend_keys(
                    query,
                    positions,
                    start,
                    end_key,
                    table_ptr,
                    key_ptr,
                    key_scale_ptr,
                    block_stride,
                    scale_stride,
                    scale,
                    soft_cap,
                    peak,
                    total,
                    weighted,
                    NUM_KV_HEADS,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_SIZE,
                    BLOCK_N,
                    WINDOW,
                    HAS_SCALES,
                    HAS_SOFT_CAP,
                    PRECISION,
                    part != 1,
                )
    if HAS_SCALES:
        weighted *= 1.0 / VALUE_SCALE_SHIFT
    result = weighted / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + row_heads[:, None] * HEAD_DIM + d[None, :], result.to(out_ptr.dtype.element_ty), mask=is_element)


@jit
def _attend_keys(
    query: tl.tensor,
    positions: tl.tensor,
    start: tl.tensor,
    end_key: tl.tensor,
    table_ptr: tl.tensor,
    key_ptr: tl.tensor,
    key_scale_ptr: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    weighted: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:
    """Add the keys [start, start + BLOCK_N) to the running softmax; those from `end_key` on are not there."""
    d = tl.arange(0, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_N)
    # An unmasked tile ends before `end_key`; a constant mask costs its loads nothing.
    is_key = keys < end_key if IS_MASKED else tl.full([BLOCK_N], 1, tl.int1)
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
    offsets = blocks * block_stride + keys % BLOCK_SIZE * HEAD_DIM
    k = tl.load(key_ptr + offsets[None, :] + d[:, None], mask=is_key[None, :] & (d < HEAD_DIM)[:, None], other=0.0)
    scores = tl.dot(query, to_operand(k, query.dtype), input_precision=PRECISION) * scale
    value_scales = tl.zeros([BLOCK_N], tl.float32)
    if HAS_SCALES:
        scale_offsets = blocks * scale_stride + keys % BLOCK_SIZE
        scores *= tl.load(key_scale_ptr + scale_offsets, mask=is_key, other=0.0)[None, :]
        value_scales = tl.load(key_scale_ptr + NUM_KV_HEADS * BLOCK_SIZE + scale_offsets, mask=is_key, other=0.0)
    if HAS_SOFT_CAP:
        scores = tanh(scores / soft_cap) * (soft_cap * LOG2_E)
    is_visible = keys[None, :] <= positions[:, None]
    if WINDOW > 0:
        is_visible = is_visible & (keys[None, :] > positions[:, None] - WINDOW)
    value_ptr = key_ptr + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    v = tl.load(value_ptr + offsets[:, None] + d[None, :], mask=is_key[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    return attend_tile(
        scores,
        is_visible,
        to_operand(v, query.dtype),
        value_scales,
        peak,
        total,
        weighted,
        HAS_SCALES,
        PRECISION,
        IS_MASKED,
    )
