"""Rotary embedding of queries and keys and the write of K and V into the cache, in one pass over a step's projections.

    rotated[i]            = x[i] * cos[i] - x[i + h] * sin[i]
    rotated[i + h]        = x[i + h] * cos[i] + x[i] * sin[i]        h = head_dim / 2 (arXiv 2104.09864, halves layout)

With `q_norm` and `k_norm` each query and key head is RMS-normed before its rotation (Qwen3). An 8-bit cache gets one
fp32 scale per (K or V, head, token): the largest magnitude of the head becomes the type's largest value. Everything is
computed in fp32 and rounded once, to the query's and to the cache's type.

The oracles are `reference.rms_norm`, `reference.rope` and `reference_quant.write_kv`, put together in
`reference_quant.rope_and_write_kv`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import absmax_scale, quantize
from engine.kernels.triton.launch import FLOAT_DTYPES, cdiv, check, check_tensor, jit, next_power_of_2
from engine.kernels.triton.layer_cache import LayerCache

_HEADS_PER_PROGRAM = 8


def rope_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slot_mapping: Tensor,
    num_tokens: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate a step's queries and keys, and write its keys and values into their slots.

    Args:
        qkv: [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads of each row.
        cos: [num_rows, head_dim / 2] fp32, cosine of position * inverse frequency.
        sin: [num_rows, head_dim / 2] fp32.
        cache: The layer's cache, changed in place.
        slot_mapping: [num_rows] int64, block_id * block_size + offset; not read for rows that are padding.
        num_tokens: [1] int32 on the device: rows from this one on are padding, which writes no KV and gets queries
            of 0. On the device, because a CUDA graph replays with other counts.
        q_norm: [head_dim] weights of the query heads' norm; None = no norm. With `k_norm` or without both.
        k_norm: [head_dim].
        eps: Of the norms.
        out: Where to write the queries; None = a new tensor.

    Returns:
        [num_rows, num_heads, head_dim], the rotated queries in the dtype of `qkv`.

    Raises:
        ValueError: Shapes, dtypes or strides are not those above.
    """
    num_rows, head_dim, num_kv_heads = qkv.shape[0], cache.head_dim, cache.num_kv_heads
    check_tensor("qkv", qkv, (None, None), FLOAT_DTYPES)
    check(qkv.shape[1] % head_dim == 0, f"{qkv.shape[1]} columns are no whole heads of {head_dim}")
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    check(num_heads > 0 and head_dim % 2 == 0, f"{qkv.shape[1]} columns leave no query head")
    check_tensor("cos", cos, (num_rows, head_dim // 2), (torch.float32,))
    check_tensor("sin", sin, (num_rows, head_dim // 2), (torch.float32,))
    check_tensor("slot_mapping", slot_mapping, (num_rows,), (torch.int64,))
    check_tensor("num_tokens", num_tokens, (1,), (torch.int32,))
    check((q_norm is None) == (k_norm is None), "queries and keys are both normed or neither is")
    if q_norm is not None and k_norm is not None:
        check_tensor("q_norm", q_norm, (head_dim,), FLOAT_DTYPES)
        check_tensor("k_norm", k_norm, (head_dim,), FLOAT_DTYPES)
    shape = (num_rows, num_heads, head_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device) if out is None else out
    check_tensor("out", out, shape, (qkv.dtype,))
    if num_rows:
        _rope_and_write_kv[(num_rows, cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM))](
            qkv,
            cos,
            sin,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            cache.elements,
            cache.scales_or_elements,
            slot_mapping,
            num_tokens,
            out,
            cache.elements.stride(0),
            cache.scale_stride,
            eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_HALF=next_power_of_2(head_dim // 2),
            BLOCK_SIZE=cache.block_size,
            BLOCK_HEADS=_HEADS_PER_PROGRAM,
            HAS_NORMS=q_norm is not None,
            HAS_SCALES=cache.scales is not None,
            num_warps=4,
        )
    return out


@jit
def _rope_and_write_kv(
    qkv_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    elements_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    slot_mapping_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    out_ptr: tl.tensor,
    block_stride: tl.tensor,
    scale_stride: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
) -> None:
    """Heads [program_id(1) * BLOCK_HEADS, ...) of row program_id(0), each as its two halves."""
    HEAD_DIM: tl.constexpr = 2 * HALF
    row = tl.program_id(0).to(tl.int64)
    is_token = row < tl.load(num_tokens_ptr)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    i = tl.arange(0, BLOCK_HALF)
    is_query = heads < NUM_HEADS
    is_rotated = heads < NUM_HEADS + NUM_KV_HEADS
    is_head = heads < NUM_HEADS + 2 * NUM_KV_HEADS
    is_element = is_head[:, None] & (i < HALF)[None, :]
    offsets = (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads)[:, None] * HEAD_DIM + i[None, :]
    first = tl.load(qkv_ptr + offsets, mask=is_element & is_token, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + offsets + HALF, mask=is_element & is_token, other=0.0).to(tl.float32)
    if HAS_NORMS:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM
        inverse = tl.where(is_rotated, tl.rsqrt(mean + eps), 1.0)[:, None]
        first *= inverse * _norm_weights(q_norm_ptr, k_norm_ptr, is_query, is_rotated, i, HALF)
        second *= inverse * _norm_weights(q_norm_ptr + HALF, k_norm_ptr + HALF, is_query, is_rotated, i, HALF)
    # Value heads turn by the angle 0.
    turns = is_rotated[:, None] & (i < HALF)[None, :]
    cos = tl.load(cos_ptr + row * HALF + i[None, :], mask=turns, other=1.0)
    sin = tl.load(sin_ptr + row * HALF + i[None, :], mask=turns, other=0.0)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin

    out_offsets = (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + i[None, :]
    is_stored = is_element & is_query[:, None]
    tl.store(out_ptr + out_offsets, turned_first.to(out_ptr.dtype.element_ty), mask=is_stored)
    tl.store(out_ptr + out_offsets + HALF, turned_second.to(out_ptr.dtype.element_ty), mask=is_stored)

    # K heads follow the query heads and V heads the K heads, which is also their order in a block.
    slot = tl.load(slot_mapping_ptr + row, mask=is_token, other=0)
    is_kv = is_head & (heads >= NUM_HEADS) & is_token
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    places = (heads - NUM_HEADS) * BLOCK_SIZE + offset
    cached = elements_ptr.dtype.element_ty
    if HAS_SCALES:
        largest = tl.maximum(tl.max(tl.abs(turned_first), 1), tl.max(tl.abs(turned_second), 1))
        scale = absmax_scale(largest, cached == tl.int8)
        tl.store(scales_ptr + block * scale_stride + places, scale, mask=is_kv)
        first_stored = quantize(turned_first, scale[:, None], cached)
        second_stored = quantize(turned_second, scale[:, None], cached)
    else:
        first_stored = turned_first.to(cached)
        second_stored = turned_second.to(cached)
    cache_ptrs = elements_ptr + block * block_stride + places[:, None] * HEAD_DIM + i[None, :]
    tl.store(cache_ptrs, first_stored, mask=is_element & is_kv[:, None])
    tl.store(cache_ptrs + HALF, second_stored, mask=is_element & is_kv[:, None])


@jit
def _norm_weights(
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    is_query: tl.tensor,
    is_rotated: tl.tensor,
    i: tl.tensor,
    HALF: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_HEADS, BLOCK_HALF] fp32: the query's weights, the key's, or 1 for value heads."""
    q_weights = tl.load(q_norm_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
    k_weights = tl.load(k_norm_ptr + i, mask=i < HALF, other=0.0).to(tl.float32)
    of_key = tl.where(is_rotated[:, None], k_weights[None, :], 1.0)
    return tl.where(is_query[:, None], q_weights[None, :], of_key)
