"""Two tiers joined by the KV-transfer layer: an exporter over one numpy cache, an importer over another.

What decode's service would be told is recorded. Used by every test that needs a whole hand-off.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.cache.layout import KvLayout
from engine.types import BlockId, Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferPeer, TransferStats
from kv_transfer.handoff.export import Export
from kv_transfer.handoff.exporter import Exporter
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.transports.inproc import InprocTransport
from kv_transfer.transports.port import Transport
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError
from tests.fakes_transport import ArrayCache, FakeClock, tiny_layout

PREFILL = WorkerId("prefill-0")
DECODE = WorkerId("decode-0")
DECODE_INCARNATION = Incarnation(77)


@dataclass
class Tiers:
    """One prefill and one decode worker, and what decode was told."""

    source: ArrayCache
    sink: ArrayCache
    clock: FakeClock
    leases: LeaseTable
    importer: Importer
    exporter: Exporter
    peer: TransferPeer
    commits: list[tuple[LeaseId, Epoch, bytes, TransferStats]]
    failures: list[tuple[LeaseId, Epoch, EngineError]]

    def compute(
        self, export: Export, block_ids: list[BlockId], num_tokens: int, seed: int, chunk: int = 10_000
    ) -> None:
        """Fill the prefill cache chunk by chunk, layer by layer, reporting each."""
        done = 0
        self.source.fill(block_ids, num_tokens, seed)
        while done < num_tokens:
            done = min(done + chunk, num_tokens)
            for layer in range(self.source.layout.num_layers):
                export.layer_ready(layer, done, block_ids)

    async def hand_off(
        self,
        handle: KvHandle,
        block_ids: list[BlockId],
        num_tokens: int,
        seed: int,
        record: bytes = b"",
        *,
        is_layerwise: bool | None = None,
    ) -> TransferStats:
        """Compute everything at once and hand it over."""
        async with self.exporter.begin(handle, is_layerwise=is_layerwise) as export:
            self.compute(export, block_ids, num_tokens, seed)
            return await export.finish(record)


@asynccontextmanager
async def run_tiers(
    source: KvLayout | None = None,
    target: KvLayout | None = None,
    transport: Transport | None = None,
    *,
    verify_digests: bool = True,
    commit_timeout_s: float = 5.0,
    window_bytes: int = 1 << 20,
    source_cache: ArrayCache | None = None,
    sink: ArrayCache | None = None,
) -> AsyncIterator[Tiers]:
    source_cache = source_cache or ArrayCache(source or tiny_layout(), 64)
    sink = sink or ArrayCache(target or tiny_layout(), 64)
    clock = FakeClock()
    leases = LeaseTable(clock)
    commits: list[tuple[LeaseId, Epoch, bytes, TransferStats]] = []
    failures: list[tuple[LeaseId, Epoch, EngineError]] = []
    importer = Importer(
        sink,
        leases,
        lambda *commit: commits.append(commit),
        lambda *failure: failures.append(failure),
        worker_id=DECODE,
        incarnation=DECODE_INCARNATION,
        clock=clock,
        window_bytes=window_bytes,
        verify_digests=verify_digests,
    )
    transport = transport or InprocTransport()
    listener = await transport.listen(importer.serve)
    exporter = Exporter(
        source_cache,
        PREFILL,
        Incarnation(5),
        TransportRegistry([transport]),
        clock=clock,
        commit_timeout_s=commit_timeout_s,
    )
    peer = TransferPeer(DECODE, DECODE_INCARNATION, (listener.address,), sink.layout)
    exporter.update_peers([peer])
    try:
        yield Tiers(source_cache, sink, clock, leases, importer, exporter, peer, commits, failures)
        importer.check_invariants()
    finally:
        await exporter.close()
        await listener.close()


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


async def until(condition: Callable[[], bool], timeout_s: float = 2.0) -> None:
    """Let the loop run until a zero-argument condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - a test waits for whatever it can see
            await asyncio.sleep(0.001)
