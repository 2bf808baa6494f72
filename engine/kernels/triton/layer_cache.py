"""One layer of a paged KV cache as kernels see it: elements, and scales behind them where the type needs them.

A block is one run of bytes, `engine/cache/layout.py` says which:

    | K and V elements [2, num_kv_heads, block_size, head_dim] | 8-bit types: fp32 scales [2, num_kv_heads, block_size]

so elements and scales are two strided views of the same bytes. Allocates nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.triton.launch import check

KV_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
"""Element types that the kernels read and write."""
_SCALED_DTYPES = (torch.int8, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Views of one layer's blocks. The inner dimensions are dense; only the stride between blocks is free."""

    elements: Tensor
    """[num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim] of one of `KV_DTYPES`."""
    scales: Tensor | None
    """[num_blocks, 2, num_kv_heads, block_size] fp32: what an element is multiplied by. None = 1."""

    def __post_init__(self) -> None:
        shape, strides = self.elements.shape, self.elements.stride()
        check(len(shape) == 5 and shape[1] == 2, f"cache elements have shape {list(shape)}")
        check(self.elements.dtype in KV_DTYPES, f"cache elements are {self.elements.dtype}")
        check(self.elements[:1].is_contiguous(), f"cache blocks have strides {strides}")
        check(has_scales(self.elements.dtype) == (self.scales is not None), "8-bit caches, and only they, have scales")
        if self.scales is not None:
            check(self.scales.shape == shape[:-1], f"cache scales have shape {list(self.scales.shape)}")
            check(self.scales.dtype is torch.float32, f"cache scales are {self.scales.dtype}")
            check(self.scales[:1].is_contiguous(), "cache scales of a block are not dense")

    @classmethod
    def from_bytes(
        cls, rows: Tensor, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
    ) -> "LayerCache":
        """View blocks that are given as bytes.

        Args:
            rows: [num_blocks, block_bytes] uint8, dense in the last dimension and 4-byte aligned.
            num_kv_heads: KV heads.
            block_size: Tokens of a block.
            head_dim: Elements of a head.
            dtype: One of `KV_DTYPES`.
        """
        shape = (2, num_kv_heads, block_size, head_dim)
        element_bytes = math.prod(shape) * dtype.itemsize
        num_blocks = rows.shape[0]
        check(rows.dtype is torch.uint8 and rows.dim() == 2, "blocks come as [num_blocks, block_bytes] uint8")
        check(rows.shape[1] == block_bytes(*shape[1:], dtype), f"{rows.shape[1]} bytes are not one block of {shape}")
        elements = rows[:, :element_bytes].view(dtype).view(num_blocks, *shape)
        scales = (
            rows[:, element_bytes:].view(torch.float32).view(num_blocks, *shape[:-1]) if has_scales(dtype) else None
        )
        return cls(elements, scales)

    @property
    def num_blocks(self) -> int:
        """Blocks in the cache."""
        return self.elements.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.elements.shape[2]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.elements.shape[3]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.elements.shape[4]

    @property
    def scales_or_elements(self) -> Tensor:
        """The scales; a kernel that reads none still takes a pointer."""
        return self.elements if self.scales is None else self.scales

    @property
    def scale_stride(self) -> int:
        """Scales between two blocks; 0 where there are none."""
        return 0 if self.scales is None else self.scales.stride(0)


def has_scales(dtype: torch.dtype) -> bool:
    """Whether elements of this type come with one scale per (K or V, head, token)."""
    return dtype in _SCALED_DTYPES


def block_bytes(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one layer's block, scales included."""
    num_scales = 2 * num_kv_heads * block_size
    return num_scales * (head_dim * dtype.itemsize + (4 if has_scales(dtype) else 0))
