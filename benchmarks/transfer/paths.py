"""Ways for KV to get from here into the other process, each timed from the first byte to the receiver's word.

Besides the transports: `memcpy`, as many bytes copied once within this process, in one piece; `memcpy by layer`, the
same blocks copied from one cache into another, a layer at a time, since that is how a prompt's KV lies in a cache that
holds other prompts too; and `socket`, a bare blocking TCP connection into the other process's memory. These are what
the transports are measured against.
"""

import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import numpy as np
import torch

from benchmarks.transfer.receiver import ACKNOWLEDGED, SIZE, SOCKET_BUFFER_BYTES, every_transport
from benchmarks.transfer.receiver_process import OpenedReceiver
from engine.cache.layout import KvLayout
from engine.clock import SystemClock
from engine.model.kv_cache import KvCache
from engine.types import BlockId, Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferPeer, TransferStats
from kv_transfer.handoff.exporter import Exporter
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.transports.inproc import InprocTransport
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError

MEMCPY = "memcpy"
MEMCPY_BY_LAYER = "memcpy by layer"
SOCKET = "socket"
INPROC = "inproc"
_SENDER = WorkerId("bench-sender")
_INPROC_RECEIVER = WorkerId("bench-inproc")
_SEED = 20260


class KvPath(Protocol):
    """One way."""

    async def send(self, num_tokens: int) -> float:
        """Move the KV of `num_tokens` and return the seconds it took."""
        ...


def filled_cache(layout: KvLayout, num_tokens: int) -> KvCache:
    """Return a cache of noise with room for twice `num_tokens`."""
    cache = KvCache(layout, 2 * layout.num_blocks(num_tokens), torch.device("cpu"))
    noise = np.random.default_rng(_SEED).integers(0, 256, cache.bytes.shape, dtype=np.uint8)
    cache.bytes.copy_(torch.from_numpy(noise))
    return cache


class MemcpyPath:
    """One copy in one piece, on one core."""

    def __init__(self, cache: KvCache) -> None:
        self._source = cache.bytes.numpy().reshape(-1)
        self._target = np.zeros_like(self._source)
        self._layout = cache.layout

    async def send(self, num_tokens: int) -> float:
        """See `KvPath.send`."""
        num_bytes = self._layout.num_blocks(num_tokens) * self._layout.block_bytes * self._layout.num_layers
        started = time.perf_counter()
        np.copyto(self._target[:num_bytes], self._source[:num_bytes])
        return time.perf_counter() - started


class MemcpyByLayerPath:
    """One copy from cache to cache, on one core."""

    def __init__(self, cache: KvCache) -> None:
        self._source = cache.bytes.numpy()
        self._target = np.zeros_like(self._source)
        self._layout = cache.layout

    async def send(self, num_tokens: int) -> float:
        """See `KvPath.send`."""
        num_blocks = self._layout.num_blocks(num_tokens)
        started = time.perf_counter()
        for target, source in zip(self._target, self._source, strict=True):
            np.copyto(target[:num_blocks], source[:num_blocks])
        return time.perf_counter() - started


class SocketPath:
    """`sendall` of everything, a word back."""

    def __init__(self, cache: KvCache, connection: socket.socket) -> None:
        self._memory = cache.bytes.numpy().reshape(-1).data
        self._layout = cache.layout
        self._connection = connection

    async def send(self, num_tokens: int) -> float:
        """See `KvPath.send`. Blocks the loop: nothing else runs here meanwhile, and that is the point."""
        num_bytes = self._layout.num_blocks(num_tokens) * self._layout.block_bytes * self._layout.num_layers
        started = time.perf_counter()
        self._connection.sendall(SIZE.pack(num_bytes))
        self._connection.sendall(self._memory[:num_bytes])
        if self._connection.recv(1) != ACKNOWLEDGED:
            raise EngineError("the bare socket was closed")
        return time.perf_counter() - started


class TransportPath:
    """A whole hand-off: OPEN, frames with digests, COMMIT, COMMITTED."""

    def __init__(self, cache: KvCache, exporter: Exporter, reserve: "Reserve") -> None:
        self._layout = cache.layout
        self._exporter = exporter
        self._reserve = reserve

    async def send(self, num_tokens: int) -> float:
        """See `KvPath.send`. The reservation is not part of it."""
        handle = await self._reserve(num_tokens)
        block_ids = [BlockId(block) for block in range(self._layout.num_blocks(num_tokens))]
        started = time.perf_counter()
        async with self._exporter.begin(handle) as export:
            for layer in range(self._layout.num_layers):
                export.layer_ready(layer, num_tokens, block_ids)
            await export.finish(b"")
        return time.perf_counter() - started


class Reserve(Protocol):
    """Gets blocks for one hand-off from whoever receives."""

    async def __call__(self, num_tokens: int) -> KvHandle:
        """Return the handle."""
        ...


@asynccontextmanager
async def open_paths(cache: KvCache, receiver: OpenedReceiver) -> AsyncIterator[dict[str, KvPath]]:
    """Open every path from `cache`: the two baselines, the transports between the processes, and `inproc`."""
    async with AsyncExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", receiver.socket_port)))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        paths: dict[str, KvPath] = {
            MEMCPY: MemcpyPath(cache),
            MEMCPY_BY_LAYER: MemcpyByLayerPath(cache),
            SOCKET: SocketPath(cache, connection),
        }
        for scheme in receiver.addresses:
            exporter = Exporter(cache, _SENDER, Incarnation(1), every_transport(), scheme=scheme)
            stack.push_async_callback(exporter.close)
            exporter.update_peers([receiver.peer()])
            paths[scheme] = TransportPath(cache, exporter, receiver.reserve)
        paths[INPROC] = await _inproc_path(cache, stack)
        yield paths


async def _inproc_path(cache: KvCache, stack: AsyncExitStack) -> TransportPath:
    sink = KvCache(cache.layout, cache.num_blocks, torch.device("cpu"))
    sink.bytes.zero_()
    incarnation = Incarnation(2)
    importer = Importer(
        sink,
        LeaseTable(SystemClock()),
        _on_commit,
        _on_failed,
        worker_id=_INPROC_RECEIVER,
        incarnation=incarnation,
    )
    transport = InprocTransport()
    listener = await transport.listen(importer.serve)
    stack.push_async_callback(listener.close)
    exporter = Exporter(cache, _SENDER, Incarnation(1), TransportRegistry([transport]))
    stack.push_async_callback(exporter.close)
    exporter.update_peers([TransferPeer(_INPROC_RECEIVER, incarnation, (listener.address,), sink.layout)])
    block_ids = [BlockId(block) for block in range(cache.num_blocks)]

    async def reserve(num_tokens: int) -> KvHandle:
        return importer.reserve(block_ids[: cache.layout.num_blocks(num_tokens)], 0, num_tokens, "bench", 600.0)

    return TransportPath(cache, exporter, reserve)


def _on_commit(lease_id: LeaseId, epoch: Epoch, record: bytes, stats: TransferStats) -> None:
    """Nothing to schedule."""


def _on_failed(lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
    """The exporter learns the reason and fails the benchmark."""
