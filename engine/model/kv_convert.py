"""KV between element types: raw payload bytes to tokens, and tokens to what a cache of another dtype stores.

Owns no cache. `KvCache.write_converted` uses it to import blocks of a peer whose dtype or block size differs. int8 has
one fp32 scale per (K or V, head, token): symmetric, the largest magnitude is 127.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.errors import LayoutMismatch

_TORCH_DTYPES = {
    KvDtype.FP32: torch.float32,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.FP16: torch.float16,
    KvDtype.INT8: torch.int8,
}


def element_dtype(dtype: KvDtype) -> torch.dtype:
    """Torch type of the elements of a cache of `dtype`."""
    return _TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class TokenKv:
    """K and V of some tokens of a layer, as stored."""

    elements: Tensor
    """[num_tokens, 2, num_kv_heads, head_dim] in the cache's element type."""
    scales: Tensor | None
    """[num_tokens, 2, num_kv_heads] fp32 of int8 elements; None = the elements are the values."""

    def as_dtype(self, dtype: KvDtype) -> "TokenKv":
        """The same tokens rounded to another dtype. int8 to int8 changes no bit."""
        if dtype is KvDtype.INT8:
            return self if self.scales is not None else quantize_int8(self.elements)
        values = self.elements if self.scales is None else self.elements * self.scales[..., None]
        return TokenKv(values.to(element_dtype(dtype)), None)


def quantize_int8(values: Tensor) -> TokenKv:
    """Round [num_tokens, 2, num_kv_heads, head_dim] of any floating dtype to int8."""
    exact = values.float()
    scales = exact.abs().amax(-1) / 127.0
    # A row of zeros has scale 0; dividing by 1 instead keeps its elements 0.
    steps = torch.where(scales > 0, scales, 1.0)[..., None]
    return TokenKv((exact / steps).round().clamp(-127, 127).to(torch.int8), scales)


def split_blocks(rows: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor | None]:
    """View the bytes of blocks as their elements and scales.

    Args:
        rows: [..., block_bytes] uint8, whole blocks of one layer.
        layout: Their layout.

    Returns:
        [..., 2, num_kv_heads, block_size, head_dim] in the element type and, for int8, [..., 2, num_kv_heads,
        block_size] fp32. Both share the memory of `rows`.
    """
    shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    num_element_bytes = layout.block_elements * layout.dtype.itemsize
    elements = rows[..., :num_element_bytes].view(element_dtype(layout.dtype)).unflatten(-1, shape)
    if layout.dtype is not KvDtype.INT8:
        return elements, None
    return elements, rows[..., num_element_bytes:].view(torch.float32).unflatten(-1, shape[:-1])


def read_tokens(payload: memoryview, layout: KvLayout, first: int, num_tokens: int) -> TokenKv:
    """Read tokens from the bytes of consecutive blocks of one layer.

    Args:
        payload: Blocks of `layout`, back to back.
        layout: The layout in which they were written.
        first: Index of the first token, counted from the payload's first slot.
        num_tokens: How many.

    Raises:
        LayoutMismatch: The payload is not exactly the blocks that hold tokens up to the last.
    """
    raw = np.frombuffer(payload, np.uint8)
    if raw.size != layout.num_blocks(first + num_tokens) * layout.block_bytes:
        raise LayoutMismatch(f"{raw.size} bytes are not the blocks of tokens {first}..{first + num_tokens}")
    # torch knows no read-only memory and warns about a view of it; unaligned payloads have no fp32 view either.
    if not raw.flags.writeable or raw.ctypes.data % 8:
        raw = raw.copy()
    elements, scales = split_blocks(torch.from_numpy(raw).view(-1, layout.block_bytes), layout)
    tokens = slice(first, first + num_tokens)
    # [blocks, 2, heads, block_size, ...] -> one row per token
    by_token = elements.permute(0, 3, 1, 2, 4).flatten(0, 1)[tokens]
    if scales is None:
        return TokenKv(by_token, None)
    return TokenKv(by_token, scales.permute(0, 3, 1, 2).flatten(0, 1)[tokens])
