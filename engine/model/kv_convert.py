"""KV blocks between element types: raw payload bytes to tensors and back, int8 with per-token scales included.

Owns no cache. `KvCache.write_converted` uses it to import blocks of a peer whose dtype or block size differs.
"""

import numpy as np
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.errors import InvalidRequest, LayoutMismatch

_TORCH_DTYPES = {KvDtype.FP32: torch.float32, KvDtype.BF16: torch.bfloat16, KvDtype.FP16: torch.float16}


def cache_dtype(dtype: KvDtype) -> torch.dtype:
    """Torch element type of a cache of `dtype`.

    Raises:
        InvalidRequest: There is no cache of this dtype; names `kv_dtype`. An int8 cache needs kernels that write and
            read scales, which the plain path has not.
    """
    try:
        return _TORCH_DTYPES[dtype]
    except KeyError:
        supported = ", ".join(sorted(_TORCH_DTYPES))
        raise InvalidRequest(
            "kv_dtype", f"{dtype} is not supported by this model's kernels, only {supported}"
        ) from None


def decode_blocks(payload: memoryview, layout: KvLayout) -> Tensor:
    """Read whole blocks of one layer from their bytes.

    Args:
        payload: `n` blocks of `layout`, back to back.
        layout: The layout in which they were written.

    Returns:
        [n, 2, num_kv_heads, block_size, head_dim]: in the payload's dtype, or fp32 where it is int8.

    Raises:
        LayoutMismatch: The payload is no whole number of blocks.
    """
    raw = np.frombuffer(payload, np.uint8)
    if raw.size % layout.block_bytes:
        raise LayoutMismatch(f"{raw.size} bytes are no whole number of blocks of {layout.block_bytes}")
    if not raw.flags.writeable:  # torch has no read-only tensors and warns about a view of one
        raw = raw.copy()
    data = torch.from_numpy(raw)
    num_blocks = raw.size // layout.block_bytes
    shape = (num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    if layout.dtype is not KvDtype.INT8:
        return data.view(cache_dtype(layout.dtype)).view(shape)
    rows = data.view(num_blocks, layout.block_bytes)
    elements = rows[:, : layout.block_elements].view(torch.int8).view(shape)
    scales = rows[:, layout.block_elements :].contiguous().view(torch.float32).view(*shape[:-1], 1)
    return elements * scales


def encode_int8_blocks(blocks: Tensor) -> Tensor:
    """Quantize blocks to int8 with one scale per (K or V, head, token): symmetric, largest magnitude = 127.

    Args:
        blocks: [n, 2, num_kv_heads, block_size, head_dim] of any floating dtype.

    Returns:
        [n, block_bytes] uint8: each block's elements, then its fp32 scales.
    """
    values = blocks.float()
    scales = values.abs().amax(-1, keepdim=True) / 127.0
    # A row of zeros has scale 0; dividing by 1 instead keeps its elements 0.
    elements = (values / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    num_blocks = blocks.shape[0]
    return torch.cat(
        [
            elements.reshape(num_blocks, -1).view(torch.uint8),
            scales.reshape(num_blocks, -1).contiguous().view(torch.uint8),
        ],
        dim=1,
    )
