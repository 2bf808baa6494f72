"""An exporter played by hand against a real importer, to say what no honest exporter would."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.types import Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle
from kv_transfer.blocks import BlockRange
from kv_transfer.frame import Frame, FrameKind, seal
from kv_transfer.handoff.coverage import Coverage
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.handoff.messages import Commit, Hello, Open, Rejection
from kv_transfer.transports.handlers import HandlerTasks
from kv_transfer.transports.inproc import InprocConnection, connection_pair
from kvrelay.errors import EngineError
from tests.fakes_handoff import blocks
from tests.fakes_transport import ArrayCache, FakeClock, tiny_layout

INCARNATION = Incarnation(77)
LAYOUT = tiny_layout(num_layers=2)
HELLO = Hello(WorkerId("prefill-0"), Incarnation(5), LAYOUT).encode()


@dataclass
class Decode:
    """An importer and what it reported."""

    importer: Importer
    sink: ArrayCache
    clock: FakeClock
    commits: list[bytes]
    failures: list[EngineError]

    @asynccontextmanager
    async def peer(self, *, hello: bool = True) -> AsyncIterator["RawPeer"]:
        mine, theirs = connection_pair()
        serving = HandlerTasks(self.importer.serve).start(theirs)
        peer = RawPeer(mine)
        try:
            if hello:
                await peer.send(FrameKind.HELLO, payload=HELLO)
                assert (await peer.recv()).header.kind is FrameKind.HELLO
            yield peer
        finally:
            await mine.close()
            await asyncio.gather(serving, return_exceptions=True)


class RawPeer:
    """An exporter by hand."""

    def __init__(self, connection: InprocConnection) -> None:
        self.connection = connection

    async def send(self, kind: FrameKind, handle: KvHandle | None = None, payload: bytes = b"") -> None:
        await self.connection.send(self.frame(kind, handle, payload))

    def frame(self, kind: FrameKind, handle: KvHandle | None = None, payload: bytes = b"") -> Frame:
        lease_id, epoch = (handle.lease_id, handle.epoch) if handle else (LeaseId(0), Epoch(0))
        return seal(kind, lease_id, epoch, INCARNATION, payload)

    async def recv(self) -> Frame:
        async with asyncio.timeout(5):
            return await self.connection.recv()

    async def open(self, handle: KvHandle) -> None:
        claim = Open(handle.ticket, handle.start_token, handle.num_tokens)
        await self.send(FrameKind.OPEN, handle, claim.encode())

    async def opened(self, handle: KvHandle) -> None:
        await self.open(handle)
        assert (await self.recv()).header.kind is FrameKind.ACCEPTED

    def kv(self, handle: KvHandle, payload: bytes | None = None, *, layer: int = 0, num_layers: int = 2) -> Frame:
        return seal(
            FrameKind.KV,
            handle.lease_id,
            handle.epoch,
            INCARNATION,
            bytes(num_layers * LAYOUT.block_bytes) if payload is None else payload,
            layer_start=layer,
            num_layers=num_layers,
            num_blocks=1,
        )

    async def commit(self, handle: KvHandle, *frames: Frame, record: bytes = b"record") -> None:
        coverage = Coverage(2, 0, 1)
        for frame in frames:
            header = frame.header
            coverage.add(BlockRange(0, 1, header.layer_start, header.num_layers), header.digest)
        num_bytes = sum(frame.header.payload_bytes for frame in frames)
        commit = Commit(num_bytes, len(frames), coverage.digest(), 0, record)
        await self.send(FrameKind.COMMIT, handle, commit.encode())

    async def rejection(self) -> EngineError:
        frame = await self.recv()
        assert frame.header.kind is FrameKind.REJECTED
        return Rejection.decode(frame.payload).to_error()


def make_decode() -> Decode:
    """An importer over an empty cache."""
    sink, clock = ArrayCache(LAYOUT, 16), FakeClock()
    commits: list[bytes] = []
    failures: list[EngineError] = []
    importer = Importer(
        sink,
        LeaseTable(clock),
        lambda lease_id, epoch, record, stats: commits.append(record),
        lambda lease_id, epoch, error: failures.append(error),
        worker_id=WorkerId("decode-0"),
        incarnation=INCARNATION,
        clock=clock,
    )
    return Decode(importer, sink, clock, commits, failures)


def reserve(decode: Decode, block: int = 1) -> KvHandle:
    return decode.importer.reserve(blocks(block), 0, 10, "session", 30.0)
