"""The KV tensors of one worker, and moving whole blocks of a layer in and out of them as bytes.

Decides nothing about who owns a block (`engine/cache/block_pool.py` does) and knows nothing of transports, which see it
as a source and a sink of blocks. Conversions between element types are in `kv_convert.py`.
"""

import contextlib
import mmap
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.model.device_bytes import TensorMemory
from engine.model.kv_convert import read_tokens, split_blocks
from kvrelay.errors import InvalidRequest, LayoutMismatch

_Bytes = npt.NDArray[np.uint8]
_MADV_POPULATE_WRITE = 23 if sys.platform == "linux" else None
"""From Linux 5.14 on; `mmap` has no name for it yet."""


class KvCache:
    """Paged K and V of all layers.

    Blocks of one layer are read or written by one thread while the engine thread computes on others; callers see to it
    that nobody reads a block that is being written.
    """

    layout: KvLayout
    num_blocks: int
    bytes: Tensor
    """[num_layers, num_blocks, block_bytes] uint8: every block with its scales. The other tensors are views of it."""
    elements: Tensor
    """[num_layers, num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim] in the layout's element type."""
    scales: Tensor | None
    """[num_layers, num_blocks, 2, num_kv_heads, block_size] fp32 of an int8 or fp8 cache, else None."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate a cache of zeros.

        Raises:
            InvalidRequest: There is no memory for it; names `num_blocks`.
        """
        self.layout = layout
        self.num_blocks = num_blocks
        num_bytes = layout.num_layers * num_blocks * layout.block_bytes
        try:
            flat = (
                _host_memory(num_bytes)
                if device.type == "cpu"
                else torch.zeros(num_bytes, dtype=torch.uint8, device=device)
            )
        except (RuntimeError, OSError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                "num_blocks", f"{num_bytes / 2**30:.1f} GiB of KV cache cannot be allocated"
            ) from error
        self.bytes = flat.view(layout.num_layers, num_blocks, layout.block_bytes)
        self.elements, self.scales = split_blocks(self.bytes, layout)
        # On the CPU numpy copies between the cache and a buffer directly, without the GIL.
        self._host_rows: _Bytes | None = self.bytes.numpy() if device.type == "cpu" else None

    def end_step(self) -> None:
        """Note that all of a step has been launched. Called on the engine's thread, before blocks change hands."""

    def close(self) -> None:
        """End what works for the cache beside its caller; nothing does on the CPU."""

    @property
    def tensor(self) -> Tensor:
        """`elements` where they are the values themselves; what kernels without scales read and write.

        Raises:
            InvalidRequest: The cache is int8 or fp8, whose elements mean nothing without scales; names `kv_dtype`.
        """
        if self.scales is not None:
            raise InvalidRequest(
                "kv_dtype", f"{self.layout.dtype} is not supported by this model's kernels, only fp32, bf16 and fp16"
            )
        return self.elements

    @property
    def device_memory(self) -> TensorMemory | None:
        """Lends memory for blocks on their way, on the cache's device; None = the cache is on the host."""
        return None

    def read_blocks(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """Gather whole blocks of a layer, back to back, into `out`. Consecutive ids are one copy.

        Raises:
            LayoutMismatch: `out` has not exactly the blocks' size.
            IndexError: A layer or block id is outside the cache.
        """
        self._check(layer, block_ids)
        target = self._buffer_rows(out, len(block_ids))
        for start, first_block, count in _runs(block_ids):
            if self._host_rows is not None:
                target[start : start + count] = self._host_rows[layer, first_block : first_block + count]
            else:
                target[start : start + count] = self.bytes[layer, first_block : first_block + count].cpu().numpy()

    def write_blocks(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Write whole blocks of a layer that come in this cache's own layout. Consecutive ids are one copy.

        Raises:
            LayoutMismatch: `payload` has not exactly the blocks' size.
            IndexError: A layer or block id is outside the cache.
        """
        self._check(layer, block_ids)
        source = self._buffer_rows(payload, len(block_ids))
        for start, first_block, count in _runs(block_ids):
            if self._host_rows is not None:
                self._host_rows[layer, first_block : first_block + count] = source[start : start + count]
            else:
                staged = torch.from_numpy(source[start : start + count].copy())
                self.bytes[layer, first_block : first_block + count].copy_(staged)

    def write_converted(
        self,
        layer: int,
        token_start: int,
        num_tokens: int,
        block_ids: Sequence[int],
        payload: memoryview,
        source: KvLayout,
    ) -> None:
        """Write tokens of a layer that come in another block size or dtype. Other tokens' slots stay as they are.

            payload     | source block | source block | ...       from the block that holds token_start on
            tokens            token_start ...... token_start + num_tokens
            block_ids   | target block | target block | ...       from block token_start // block_size on

        Args:
            layer: Layer index.
            token_start: Position in the sequence of the first token to write.
            num_tokens: Tokens to write; others in the first and last source block are ignored.
            block_ids: This cache's blocks that hold the tokens.
            payload: The source blocks that hold the tokens, whole: `[n, 2, num_kv_heads, source.block_size, head_dim]`;
                8-bit ones with scales.
            source: Layout of the payload.

        Raises:
            LayoutMismatch: The layouts cannot be converted, or payload, token range and blocks do not fit.
            IndexError: A layer or block id is outside the cache.
        """
        self.layout.check_convertible(source)
        self._check(layer, block_ids)
        if token_start < 0 or num_tokens < 1:
            raise LayoutMismatch(f"{num_tokens} tokens from {token_start} on")
        block_size = self.layout.block_size
        first_slot = token_start % block_size
        if len(block_ids) != self.layout.num_blocks(first_slot + num_tokens):
            raise LayoutMismatch(f"{len(block_ids)} blocks are not those of {num_tokens} tokens from {token_start} on")
        tokens = read_tokens(payload, source, token_start % source.block_size, num_tokens).as_dtype(self.layout.dtype)
        slots = torch.arange(first_slot, first_slot + num_tokens)
        table = torch.tensor(list(block_ids), dtype=torch.int64)
        device = self.bytes.device
        blocks, offsets = table[slots // block_size].to(device), (slots % block_size).to(device)
        self.elements[layer][blocks, :, :, offsets] = tokens.elements.to(device)
        if self.scales is not None and tokens.scales is not None:
            self.scales[layer][blocks, :, :, offsets] = tokens.scales.to(device)

    def _buffer_rows(self, buffer: memoryview, num_blocks: int) -> _Bytes:
        flat = np.frombuffer(buffer, np.uint8)
        if flat.size != num_blocks * self.layout.block_bytes:
            raise LayoutMismatch(f"{flat.size} bytes are not {num_blocks} blocks of {self.layout.block_bytes} bytes")
        return flat.reshape(num_blocks, self.layout.block_bytes)

    def _check(self, layer: int, block_ids: Sequence[int]) -> None:
        if not 0 <= layer < self.layout.num_layers:
            raise IndexError(f"layer {layer} of {self.layout.num_layers}")
        # Negative ids would silently count from the end of the pool.
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            raise IndexError(f"block ids {min(block_ids)}..{max(block_ids)} of a cache of {self.num_blocks}")


def _host_memory(num_bytes: int) -> Tensor:
    """Zeroed memory [num_bytes] uint8, in large pages where the system has them: a step reads the cache all over.

    All of it is there from the start, so that no step waits for pages, and memory that is not there is missed at once.
    """
    # Shared memory, which is the default here, mostly gets no large pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_POPULATE_WRITE):
        if advice is not None:
            with contextlib.suppress(OSError):  # a kernel without it
                memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, block id of the first, count) for each run of consecutive ids."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield start, block_ids[start], index - start
            start = index
