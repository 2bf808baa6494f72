"""KV between element types: raw payload bytes to tokens, and tokens to what a cache of another dtype stores.

Owns no cache. `KvCache.write_converted` uses it to import blocks of a peer whose dtype or block size differs. int8 and
fp8 (e4m3) have one fp32 scale per (K or V, head, token): symmetric, the largest magnitude is 127 or 448.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from kvrelay.errors import LayoutMismatch

_TORCH_DTYPES = {
    KvDtype.FP32: torch.float32,
    KvDtype.BF16: torch.bfloat16,
    KvDtype.FP16: torch.float16,
    KvDtype.INT8: torch.int8,
    KvDtype.FP8: torch.float8_e4m3fn,
}
_LARGEST = {KvDtype.INT8: 127.0, KvDtype.FP8: 448.0}
"""Magnitude that the largest value of a (K or V, head, token) is scaled to."""


def element_dtype(dtype: KvDtype) -> torch.dtype:
    """Torch type of the elements of a cache of `dtype`."""
    return _TORCH_DTYPES[dtype]


@dataclass(frozen=True, slots=True)
class TokenKv:
    """K and V of some tokens of a layer, as stored."""

    elements: Tensor
    """[num_tokens, 2, num_kv_heads, head_dim] in the cache's element type."""
    scales: Tensor | None
    """[num_tokens, 2, num_kv_heads] fp32 of 8-bit elements; None = the elements are the values."""

    def as_dtype(self, dtype: KvDtype) -> "TokenKv":
        """The same tokens rounded to another dtype. A type to itself changes no bit."""
        if self.elements.dtype is element_dtype(dtype):
            return self
        values = self.elements if self.scales is None else self.elements.float() * self.scales[..., None]
        if dtype.has_scales:
            return quantize(values, dtype)
        return TokenKv(values.to(element_dtype(dtype)), None)


def quantize(values: Tensor, dtype: KvDtype) -> TokenKv:
    """Round [num_tokens, 2, num_kv_heads, head_dim] of any floating dtype to int8 or fp8."""
    exact, largest = values.float(), _LARGEST[dtype]
    scales = exact.abs().amax(-1) / largest
    # A row of zeros has scale 0; dividing by 1 instead keeps its elements 0.
    steps = torch.where(scales > 0, scales, 1.0)[..., None]
    elements = (exact / steps).clamp(-largest, largest)
    if dtype is KvDtype.INT8:
        elements = elements.round()
    return TokenKv(elements.to(element_dtype(dtype)), scales)


def split_blocks(rows: Tensor, layout: KvLayout) -> tuple[Tensor, Tensor | None]:
    """View the bytes of blocks as their elements and scales.

    Args:
        rows: [..., block_bytes] uint8, whole blocks of one layer.
        layout: Their layout.

    Returns:
        [..., 2, num_kv_heads, block_size, head_dim] in the element type and, for 8-bit types, [..., 2, num_kv_heads,
        block_size] fp32. Both share the memory of `rows`.
    """
    shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    num_element_bytes = layout.block_elements * layout.dtype.itemsize
    elements = rows[..., :num_element_bytes].view(element_dtype(layout.dtype)).unflatten(-1, shape)
    if not layout.dtype.has_scales:
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
