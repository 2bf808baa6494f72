"""A KV cache on a CUDA device whose blocks leave and arrive beside the computation, on a stream of their own.

    compute stream    layer 0 written │ event 0 │ layer 1 written │ event 1 │ ...
    copy stream                         wait event 0, gather, copy to pinned memory │ wait event 1, ...

A reader of blocks waits for the event of its layer, never for the device. Blocks that are not neighbours are gathered
by one kernel and cross the bus as one copy. Also here: how many blocks fit into the memory that is free.
"""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.errors import InvalidRequest
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache
from engine.model.kv_cache import KvCache

DEFAULT_MARGIN = 0.08
"""Share of the device's memory that is left free: activations of the largest step, graphs, libraries."""


def num_blocks_that_fit(layout: KvLayout, device: torch.device, *, margin: float = DEFAULT_MARGIN) -> int:
    """Blocks for which the device has room, after the weights are loaded.

    Args:
        layout: The cache's layout.
        device: A CUDA device.
        margin: Share of the device's whole memory to leave free, 0 to 1.

    Raises:
        InvalidRequest: Not even one block fits; names `num_blocks`.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    num_blocks = blocks_within(layout, free_bytes - int(total_bytes * margin))
    if num_blocks < 1:
        raise InvalidRequest("num_blocks", f"{free_bytes >> 20} MiB are free on {device}, too few for KV cache")
    return num_blocks


def blocks_within(layout: KvLayout, num_bytes: int) -> int:
    """Blocks of all layers that `num_bytes` hold; 0 for less than one."""
    return max(0, num_bytes // (layout.num_layers * layout.block_bytes))


class DeviceKvCache(KvCache):
    """`KvCache` in device memory. One thread computes, others read and write blocks."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """See `KvCache.__init__`."""
        super().__init__(layout, num_blocks, device)
        self._lock = threading.Lock()
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._written = [torch.cuda.Event() for _ in range(layout.num_layers)] if self._is_cuda else []
        self._staged = torch.empty(0, layout.block_bytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(0, layout.block_bytes, dtype=torch.uint8)

    def mark_written(self, layer: int) -> None:
        """Note on the current stream that this step's KV of a layer is written once the launches so far have run."""
        if self._written:
            self._written[layer].record()

    def wait_written(self, layer: int) -> None:
        """Block the calling thread until the layer's last marked write has run; for readers of the memory itself."""
        if self._written:
            self._written[layer].synchronize()

    def read_blocks(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """See `KvCache.read_blocks`. Waits for the layer's last marked write and for its own copy, no more."""
        self._check(layer, block_ids)
        target = self._buffer_rows(out, len(block_ids))
        if not block_ids:
            return
        # Staging memory is shared, so transfers take turns; they share the bus anyway.
        with self._lock, torch.cuda.stream(self._stream):
            if self._stream is not None:
                self._stream.wait_event(self._written[layer])
            staged, pinned = self._staging(len(block_ids))
            self._move(layer, block_ids, staged, is_export=True)
            pinned.copy_(staged, non_blocking=True)
            self._finish()
            np.copyto(target, pinned.numpy())

    def write_blocks(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """See `KvCache.write_blocks`. The blocks are in the cache for every stream when it returns."""
        self._check(layer, block_ids)
        source = self._buffer_rows(payload, len(block_ids))
        if not block_ids:
            return
        with self._lock, torch.cuda.stream(self._stream):
            staged, pinned = self._staging(len(block_ids))
            np.copyto(pinned.numpy(), source)
            staged.copy_(pinned, non_blocking=True)
            self._move(layer, block_ids, staged, is_export=False)
            self._finish()

    def write_converted(
        self,
        layer: int,
        token_start: int,
        num_tokens: int,
        block_ids: Sequence[int],
        payload: memoryview,
        source: KvLayout,
    ) -> None:
        """See `KvCache.write_converted`. The tokens are in the cache for every stream when it returns."""
        with self._lock, torch.cuda.stream(self._stream):
            super().write_converted(layer, token_start, num_tokens, block_ids, payload, source)
            self._finish()

    def layer_cache(self, layer: int) -> LayerCache:
        """One layer as the kernels see it."""
        return LayerCache(self.elements[layer], None if self.scales is None else self.scales[layer])

    def _move(self, layer: int, block_ids: Sequence[int], staged: Tensor, *, is_export: bool) -> None:
        """Gather blocks into staging memory, or scatter them from it."""
        layout = self.layout
        rows = LayerCache.from_bytes(
            staged, layout.num_kv_heads, layout.block_size, layout.head_dim, self.elements.dtype
        )
        offsets = torch.arange(layout.block_size)
        slots = torch.tensor(list(block_ids))[:, None] * layout.block_size + offsets
        cache_slots = slots.flatten().to(self.bytes.device)
        staged_slots = torch.arange(len(block_ids) * layout.block_size, device=self.bytes.device)
        if is_export:
            copy_kv(self.layer_cache(layer), cache_slots, rows, staged_slots)
        else:
            copy_kv(rows, staged_slots, self.layer_cache(layer), cache_slots)

    def _staging(self, num_blocks: int) -> tuple[Tensor, Tensor]:
        """Device and pinned memory for some blocks; grows, and is used by one transfer at a time."""
        if self._staged.shape[0] < num_blocks:
            shape = (num_blocks, self.layout.block_bytes)
            self._staged = torch.empty(shape, dtype=torch.uint8, device=self.bytes.device)
            self._pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._staged[:num_blocks], self._pinned[:num_blocks]

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()
