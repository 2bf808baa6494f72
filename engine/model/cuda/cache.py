"""A KV cache on a CUDA device whose blocks leave and arrive beside the computation, on a stream of their own.

    compute stream    layer 0 written │ event 0 │ layer 1 written │ event 1 │ ...
    report thread                       wait event 0, report │ wait event 1, report │ ...
    copy stream                                       gather, copy to pinned memory │ ...

A layer is reported when its event has passed (`reports.py`), so whoever reads its blocks then waits for its own
copy and for nothing else. A write waits for the end of the newest step that was launched: a step that samples nothing
returns before the device has run it, so a chunk of a sequence that has ended since may still write into blocks that
somebody else has by now. Blocks that are not neighbours are gathered by one kernel and cross the bus as one copy.
Also here: how many blocks fit into the memory that is free.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache
from engine.model.cuda.reports import LayerReports
from engine.model.device_bytes import TensorBytes, TensorMemory
from engine.model.kv_cache import KvCache
from kvrelay.errors import InvalidRequest, LayoutMismatch


@dataclass(frozen=True, slots=True)
class MemoryShare:
    """How much of a device a worker may take."""

    share: float = 1.0
    """Of the device's memory, for weights and KV of this process; less than 1 where several share it."""
    margin: float = 0.08
    """Of that, what KV blocks leave free: activations of the largest step, captured steps, libraries."""

    def bytes_for_blocks(self, free_bytes: int, total_bytes: int, own_bytes: int) -> int:
        """Bytes that KV blocks may take; may be negative.

        Args:
            free_bytes: Free on the device now.
            total_bytes: All that it has.
            own_bytes: What this process holds already.
        """
        usable = self.share * (1.0 - self.margin) * total_bytes
        return int(min(free_bytes - self.share * self.margin * total_bytes, usable - own_bytes))


def num_blocks_that_fit(layout: KvLayout, device: torch.device, memory: MemoryShare) -> int:
    """Blocks for which the device has room, after the weights are loaded.

    Args:
        layout: The cache's layout.
        device: A CUDA device.
        memory: How much of it may be taken.

    Raises:
        InvalidRequest: Not even one block fits; names `gpu_memory_share`.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    num_bytes = memory.bytes_for_blocks(free_bytes, total_bytes, torch.cuda.memory_reserved(device))
    num_blocks = layout.blocks_within(num_bytes)
    if num_blocks < 1:
        raise InvalidRequest(
            "gpu_memory_share",
            f"leaves no room for KV blocks: {free_bytes >> 20} of {total_bytes >> 20} MiB are free on {device}",
        )
    return num_blocks


class DeviceKvCache(KvCache):
    """`KvCache` in device memory. One thread computes, others read and write blocks."""

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        """See `KvCache.__init__`."""
        super().__init__(layout, num_blocks, device)
        self._lock = threading.Lock()
        self._is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._written = [torch.cuda.Event(blocking=True) for _ in range(layout.num_layers)] if self._is_cuda else []
        self._step_end = torch.cuda.Event() if self._is_cuda else None
        self._reports = LayerReports()
        self._memory = TensorMemory(device, self._stream)
        self._staged = torch.empty(0, layout.block_bytes, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(0, layout.block_bytes, dtype=torch.uint8)

    def mark_written(self, layer: int, on_layer: Callable[[int], None] | None) -> None:
        """Note on the current stream that this step's KV of a layer is written once the launches so far have run.

        Args:
            layer: The layer.
            on_layer: Called when that is so, on a thread of the cache's; None = nobody asks.
        """
        if not self._written:
            if on_layer is not None:
                on_layer(layer)
            return
        event = self._written[layer]
        event.record()
        if on_layer is not None:
            self._reports.report(event.synchronize, layer, on_layer)

    def end_step(self) -> None:
        """See `KvCache.end_step`. Notes it on the current stream, the one that computes."""
        if self._step_end is not None:
            self._step_end.record()

    def finish_reports(self) -> None:
        """Return when every layer marked so far has been reported.

        Raises:
            Exception: What the device or a callback raised.
        """
        self._reports.finish()

    def close(self) -> None:
        """End the cache's thread."""
        self._reports.close()

    def read_blocks(self, layer: int, block_ids: Sequence[int], out: memoryview) -> None:
        """See `KvCache.read_blocks`. The blocks' KV was reported by now; waits for its own copy and no more."""
        self._check(layer, block_ids)
        target = self._buffer_rows(out, len(block_ids))
        if not block_ids:
            return
        # Staging memory is shared, so transfers take turns; they share the bus anyway.
        with self._lock, torch.cuda.stream(self._stream):
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
            self._wait_for_step()
            np.copyto(pinned.numpy(), source)
            staged.copy_(pinned, non_blocking=True)
            self._move(layer, block_ids, staged, is_export=False)
            self._finish()

    @property
    def device_memory(self) -> TensorMemory:
        """See `KvCache.device_memory`."""
        return self._memory

    def read_device_blocks(self, layer: int, block_ids: Sequence[int], out: TensorBytes) -> None:
        """Gather whole blocks of a layer, back to back, into device memory. Does not wait: later work on `out` does.

        Raises:
            LayoutMismatch: `out` has not exactly the blocks' size.
            IndexError: A layer or block id is outside the cache.
        """
        self._check(layer, block_ids)
        rows = self._device_rows(out, len(block_ids))
        with self._lock, torch.cuda.stream(self._stream):
            self._move(layer, block_ids, rows, is_export=True)

    def write_device_blocks(self, layer: int, block_ids: Sequence[int], payload: TensorBytes) -> None:
        """Scatter whole blocks that lie back to back in device memory; they are in the cache when it returns.

        Raises:
            LayoutMismatch: `payload` has not exactly the blocks' size.
            IndexError: A layer or block id is outside the cache.
        """
        self._check(layer, block_ids)
        rows = self._device_rows(payload, len(block_ids))
        with self._lock, torch.cuda.stream(self._stream):
            self._wait_for_step()
            self._move(layer, block_ids, rows, is_export=False)
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
            self._wait_for_step()
            super().write_converted(layer, token_start, num_tokens, block_ids, payload, source)
            self._finish()

    def layer_cache(self, layer: int) -> LayerCache:
        """One layer as the kernels see it."""
        return LayerCache(self.elements[layer], None if self.scales is None else self.scales[layer])

    def _device_rows(self, memory: TensorBytes, num_blocks: int) -> Tensor:
        if len(memory) != num_blocks * self.layout.block_bytes:
            raise LayoutMismatch(f"{len(memory)} bytes are not {num_blocks} blocks of {self.layout.block_bytes} bytes")
        return memory.tensor.view(num_blocks, self.layout.block_bytes)

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

    def _wait_for_step(self) -> None:
        """Let what follows on the copy stream start when the device has run every step that ended here."""
        # Blocks change hands between steps, so a step that is being launched now writes into none of the caller's.
        if self._stream is not None and self._step_end is not None:
            self._stream.wait_event(self._step_end)

    def _finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()
