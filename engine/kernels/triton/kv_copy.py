"""Moving KV between caches: export, import, copies of blocks, and every conversion of type and block size on the way.

    for each token t:   target[target_slots[t]] = source[source_slots[t]]        slot = block_id * block_size + offset

One kernel does all of it, since a slot says where a token lies in a cache of any block size. Gathering blocks for
export is a copy to a staging cache whose blocks follow each other; import is a copy from one. Between equal types bits
are moved as they are, scales included; otherwise values are converted in fp32 and rounded, or quantized per (K or V,
head, token) as a write of fresh KV does. The oracle is `reference_quant.copy_kv`.
"""

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.device_math import absmax_scale, quantize
from engine.kernels.triton.launch import cdiv, check, check_tensor, jit_for_sizes, next_power_of_2
from engine.kernels.triton.layer_cache import LayerCache

_TOKENS_PER_PROGRAM = 16


def copy_kv(source: LayerCache, source_slots: Tensor, target: LayerCache, target_slots: Tensor) -> None:
    """Copy tokens from one cache into another, both on the device.

    Args:
        source: Where to read.
        source_slots: [num_tokens] int64.
        target: Where to write, of the same head geometry. May be the source, if no slot is both read and written.
        target_slots: [num_tokens] int64, no slot twice.

    Raises:
        ValueError: Head geometry, shapes or dtypes do not fit.
    """
    check(source.num_kv_heads == target.num_kv_heads, f"{source.num_kv_heads} heads do not fit {target.num_kv_heads}")
    check(source.head_dim == target.head_dim, f"heads of {source.head_dim} do not fit those of {target.head_dim}")
    num_tokens = source_slots.shape[0]
    check_tensor("source_slots", source_slots, (num_tokens,), (torch.int64,))
    check_tensor("target_slots", target_slots, (num_tokens,), (torch.int64,))
    if num_tokens == 0:
        return
    _copy_kv[(cdiv(num_tokens, _TOKENS_PER_PROGRAM), 2 * source.num_kv_heads)](
        source.elements,
        source.scales_or_elements,
        source_slots,
        target.elements,
        target.scales_or_elements,
        target_slots,
        num_tokens,
        source.elements.stride(0),
        source.scale_stride,
        target.elements.stride(0),
        target.scale_stride,
        HEAD_DIM=source.head_dim,
        BLOCK_D=next_power_of_2(source.head_dim),
        SOURCE_BLOCK=source.block_size,
        TARGET_BLOCK=target.block_size,
        BLOCK_T=_TOKENS_PER_PROGRAM,
        SOURCE_SCALES=source.scales is not None,
        TARGET_SCALES=target.scales is not None,
        num_warps=4,
    )


@jit_for_sizes("num_tokens")
def _copy_kv(
    source_ptr: tl.tensor,
    source_scales_ptr: tl.tensor,
    source_slots_ptr: tl.tensor,
    target_ptr: tl.tensor,
    target_scales_ptr: tl.tensor,
    target_slots_ptr: tl.tensor,
    num_tokens: tl.tensor,
    source_stride: tl.tensor,
    source_scale_stride: tl.tensor,
    target_stride: tl.tensor,
    target_scale_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SOURCE_SCALES: tl.constexpr,
    TARGET_SCALES: tl.constexpr,
) -> None:
    """BLOCK_T tokens of (K or V, head) program_id(1)."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    is_token = tokens < num_tokens
    is_element = is_token[:, None] & (d < HEAD_DIM)[None, :]
    source_slots = tl.load(source_slots_ptr + tokens, mask=is_token, other=0)
    target_slots = tl.load(target_slots_ptr + tokens, mask=is_token, other=0)
    source_blocks, target_blocks = source_slots // SOURCE_BLOCK, target_slots // TARGET_BLOCK
    source_places = tl.program_id(1) * SOURCE_BLOCK + source_slots % SOURCE_BLOCK
    target_places = tl.program_id(1) * TARGET_BLOCK + target_slots % TARGET_BLOCK
    source_ptrs = source_ptr + (source_blocks * source_stride + source_places * HEAD_DIM)[:, None] + d[None, :]
    target_ptrs = target_ptr + (target_blocks * target_stride + target_places * HEAD_DIM)[:, None] + d[None, :]
    source_scale_ptrs = source_scales_ptr + source_blocks * source_scale_stride + source_places
    target_scale_ptrs = target_scales_ptr + target_blocks * target_scale_stride + target_places
    elements = tl.load(source_ptrs, mask=is_element, other=0.0)
    kind = target_ptr.dtype.element_ty
    if source_ptr.dtype.element_ty == kind:
        # Requantizing would not always give the same bits back.
        tl.store(target_ptrs, elements, mask=is_element)
        if TARGET_SCALES:
            tl.store(target_scale_ptrs, tl.load(source_scale_ptrs, mask=is_token, other=0.0), mask=is_token)
    else:
        values = elements.to(tl.float32)
        if SOURCE_SCALES:
            values *= tl.load(source_scale_ptrs, mask=is_token, other=0.0)[:, None]
        if TARGET_SCALES:
            scale = absmax_scale(tl.max(tl.abs(values), 1), kind == tl.int8)
            tl.store(target_scale_ptrs, scale, mask=is_token)
            tl.store(target_ptrs, quantize(values, scale[:, None], kind), mask=is_element)
        else:
            tl.store(target_ptrs, values.to(kind), mask=is_element)
