"""The KV tensors of one worker, and moving whole blocks of a layer in and out of them as bytes.

Decides nothing about who owns a block (`engine/cache/block_pool.py` does) and knows nothing of transports, which see it
as a source and a sink of blocks. Conversions between element types are in `kv_convert.py`.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.errors import InvalidRequest, LayoutMismatch
from engine.model.kv_convert import cache_dtype, decode_blocks

_Bytes = npt.NDArray[np.uint8]


class KvCache:
    """Paged K and V of all layers.

    Blocks of one layer are read or written by one thread while the engine thread computes on others; callers see to it
    that nobody reads a block that is being written.
    """

    layout: KvLayout
    num_blocks: int
    tensor: Tensor
    """[num_layers, num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim] in the layout's dtype."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """Allocate a cache of zeros.

        Raises:
            InvalidRequest: The dtype has no cache yet (`kv_dtype`), or there is no memory for it (`num_blocks`).
        """
        self.layout = layout
        self.num_blocks = num_blocks
        shape = (layout.num_layers, num_blocks, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
        dtype = cache_dtype(layout.dtype)
        try:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size_gib = layout.num_layers * num_blocks * layout.block_bytes / 2**30
            raise InvalidRequest("num_blocks", f"{size_gib:.1f} GiB of KV cache cannot be allocated") from error
        byte_rows = self.tensor.view(torch.uint8).view(layout.num_layers, num_blocks, layout.block_bytes)
        self._byte_rows = byte_rows  # [num_layers, num_blocks, block_bytes] uint8, sharing the cache's memory
        # On the CPU numpy copies between the cache and a buffer directly, without the GIL.
        self._host_rows: _Bytes | None = byte_rows.numpy() if device.type == "cpu" else None

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
                target[start : start + count] = self._byte_rows[layer, first_block : first_block + count].cpu().numpy()

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
                self._byte_rows[layer, first_block : first_block + count].copy_(staged)

    def write_converted(
        self,
        layer: int,
        token_start: int,
        num_tokens: int,
        block_ids: Sequence[int],
        payload: memoryview,
        source: KvLayout,
    ) -> None:
        """Write tokens of a layer that come in another block size or element type.

            payload   | source block 0 | source block 1 | ... |     only its first `num_tokens` tokens are used
            tokens    token_start ...... token_start + num_tokens

        Args:
            layer: Layer index.
            token_start: Position in the sequence of the payload's first token, a multiple of `source.block_size`.
            num_tokens: Tokens to write; those behind them in the last source block are ignored.
            block_ids: The sequence's whole block table in this cache.
            payload: Whole source blocks `[n, 2, num_kv_heads, source.block_size, head_dim]`; int8 ones with scales.
            source: Layout of the payload.

        Raises:
            LayoutMismatch: The layouts cannot be converted, or payload, token range and block table do not fit.
            IndexError: A layer or block id is outside the cache.
        """
        self.layout.check_convertible(source)
        self._check(layer, block_ids)
        if token_start < 0 or token_start % source.block_size:
            raise LayoutMismatch(f"token {token_start} does not begin a block of {source.block_size} tokens")
        if num_tokens < 0 or token_start + num_tokens > len(block_ids) * self.layout.block_size:
            raise LayoutMismatch(f"{len(block_ids)} blocks have no room for {num_tokens} tokens from {token_start} on")
        if len(payload.cast("B")) != source.num_blocks(num_tokens) * source.block_bytes:
            raise LayoutMismatch(f"{payload.nbytes} bytes are not the blocks of {num_tokens} tokens")
        blocks = decode_blocks(payload, source)
        # [n, 2, heads, source block, dim] -> one row per token: [tokens, 2, heads, dim]
        tokens = blocks.permute(0, 3, 1, 2, 4).flatten(0, 1)[:num_tokens]
        positions = torch.arange(token_start, token_start + num_tokens)
        table = torch.tensor(list(block_ids), dtype=torch.int64)
        slots = table[positions // self.layout.block_size], positions % self.layout.block_size
        block_index, offset = (index.to(self.tensor.device) for index in slots)
        self.tensor[layer][block_index, :, :, offset] = tokens.to(self.tensor.device, self.tensor.dtype)

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


def _runs(block_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index of the first, block id of the first, count) for each run of consecutive ids."""
    start = 0
    for index in range(1, len(block_ids) + 1):
        if index == len(block_ids) or block_ids[index] != block_ids[index - 1] + 1:
            yield start, block_ids[start], index - start
            start = index
