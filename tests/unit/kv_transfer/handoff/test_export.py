"""The exporter against importers that stall, lie or cannot be reached, and callers that break its rules."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from engine.types import Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferPeer
from kv_transfer.frame import Frame, FrameError, FrameKind, PayloadBuffer, seal
from kv_transfer.handoff import export as export_module
from kv_transfer.handoff.exporter import Exporter
from kv_transfer.handoff.messages import Credit, Hello, Rejection
from kv_transfer.handoff.sender import SenderState
from kv_transfer.transports.inproc import InprocConnection, InprocTransport
from kv_transfer.transports.port import Connection
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import (
    ChecksumMismatch,
    EngineError,
    LayoutMismatch,
    LeaseExpired,
    PeerUnavailable,
    RequestCancelled,
    TransferError,
)
from tests.fakes_handoff import DECODE, blocks, run_tiers, until
from tests.fakes_transport import ArrayCache, Fault, damage, tiny_layout

pytestmark = pytest.mark.usefixtures("no_leaks")

LAYOUT = tiny_layout()
HANDLE = KvHandle(LeaseId(5), Epoch(1), bytes(16), DECODE, Incarnation(77), 0, 20, LAYOUT.fingerprint)
HELLO = Hello(DECODE, Incarnation(77), LAYOUT)


@dataclass
class Stage:
    """An exporter whose peer is played by the test."""

    exporter: Exporter
    source: ArrayCache
    peer: TransferPeer
    connections: "asyncio.Queue[Connection]"

    async def accept(self, hello: Frame | None = None) -> "Decode":
        """Answer the exporter's HELLO."""
        connection = await asyncio.wait_for(self.connections.get(), 5)
        (await connection.recv()).release()
        await connection.send(hello or seal(FrameKind.HELLO, payload=HELLO.encode()))
        return Decode(connection)


@dataclass
class Decode:
    """The importer's end, by hand."""

    connection: Connection

    async def recv(self, kind: FrameKind) -> Frame:
        frame = await asyncio.wait_for(self.connection.recv(), 5)
        assert frame.header.kind is kind
        return frame

    async def send(self, kind: FrameKind, payload: bytes = b"", *, epoch: int = 1) -> None:
        await self.connection.send(seal(kind, HANDLE.lease_id, Epoch(epoch), Incarnation(77), payload))

    async def accept(self, window_bytes: int = 1 << 20) -> None:
        (await self.recv(FrameKind.OPEN)).release()
        await self.send(FrameKind.ACCEPTED, Credit(window_bytes).encode())


@asynccontextmanager
async def stage(*, accept_timeout_s: float = 5.0, connect_timeout_s: float = 5.0) -> AsyncIterator[Stage]:
    connections: asyncio.Queue[Connection] = asyncio.Queue()
    done = asyncio.Event()

    async def handler(connection: Connection) -> None:
        connections.put_nowait(connection)
        await done.wait()

    transport = InprocTransport()
    listener = await transport.listen(handler)
    source = ArrayCache(LAYOUT, 8)
    exporter = Exporter(
        source,
        WorkerId("prefill-0"),
        Incarnation(5),
        TransportRegistry([transport]),
        accept_timeout_s=accept_timeout_s,
        connect_timeout_s=connect_timeout_s,
        commit_timeout_s=5.0,
    )
    peer = TransferPeer(DECODE, Incarnation(77), (listener.address,), LAYOUT)
    exporter.update_peers([peer])
    try:
        yield Stage(exporter, source, peer, connections)
    finally:
        done.set()
        await exporter.close()
        await listener.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (seal(FrameKind.ACCEPTED), FrameError),
        (seal(FrameKind.HELLO, payload=b"nonsense"), FrameError),
        (damage(seal(FrameKind.HELLO, payload=HELLO.encode()), Fault.BIT_FLIP), ChecksumMismatch),
        (seal(FrameKind.HELLO, payload=replace(HELLO, incarnation=Incarnation(78)).encode()), PeerUnavailable),
        (seal(FrameKind.HELLO, payload=replace(HELLO, worker_id=WorkerId("other")).encode()), PeerUnavailable),
        (seal(FrameKind.HELLO, payload=replace(HELLO, layout=tiny_layout(block_size=32)).encode()), LayoutMismatch),
        (seal(FrameKind.REJECTED, payload=Rejection.of(LayoutMismatch("no")).encode()), LayoutMismatch),
    ],
)
async def test_an_answer_to_hello_that_does_not_fit_is_refused(answer: Frame, error: type[EngineError]) -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        await on.accept(answer)
        await until(lambda: export.error is not None)
        assert type(export.error) is error


async def test_a_peer_that_never_answers_hello_is_an_error_in_time() -> None:
    async with stage(connect_timeout_s=0.05) as on:
        export = on.exporter.begin(HANDLE)
        await until(lambda: export.error is not None)
        assert isinstance(export.error, PeerUnavailable)


async def test_a_peer_that_never_accepts_is_an_error_in_time() -> None:
    async with stage(accept_timeout_s=0.05) as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        (await decode.recv(FrameKind.OPEN)).release()
        (await decode.recv(FrameKind.ABORT)).release()
        await until(lambda: export.error is not None)
        assert isinstance(export.error, PeerUnavailable)
        assert "no answer to OPEN" in str(export.error)


async def test_aborting_while_connecting_ends_at_once() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        await asyncio.sleep(0)
        async with asyncio.timeout(0.5):
            await export.abort("changed my mind")
        assert isinstance(export.error, RequestCancelled)


async def test_a_stalled_peer_does_not_hold_up_an_abort_and_no_room_is_lost() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE, is_layerwise=True)
        decode = await on.accept()
        await decode.accept()
        link = await on.exporter._link(on.peer)
        connection = link.connection
        assert isinstance(connection, InprocConnection)
        await until(lambda: export._machine.state is SenderState.STREAMING)
        room = connection._budget.limit
        blocker = await connection.reserve(room - 1000)
        export.layer_ready(0, 20, blocks(0, 1))
        await until(lambda: export._waiting is not None)
        async with asyncio.timeout(0.5):
            await export.abort("the client left")
        (await decode.recv(FrameKind.ABORT)).release()
        blocker.release()
        assert connection._budget.used == 0
        assert on.source.num_reads == 0


async def test_cancelling_the_driver_gives_back_a_buffer_lent_in_the_same_turn() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE, is_layerwise=True)
        decode = await on.accept()
        await decode.accept()
        connection = (await on.exporter._link(on.peer)).connection
        assert isinstance(connection, InprocConnection)
        await until(lambda: export._machine.state is SenderState.STREAMING)
        blocker = await connection.reserve(connection._budget.limit - 1000)
        export.layer_ready(0, 20, blocks(0, 1))
        await until(lambda: export._waiting is not None)
        blocker.release()
        asyncio.get_running_loop().call_soon(export._driver.cancel)  # after the grant, before the driver wakes up
        await asyncio.gather(export._driver, return_exceptions=True)
        assert isinstance(export.error, PeerUnavailable)
        assert connection._budget.used == 0


async def test_replies_of_another_epoch_are_not_for_this_export() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        await decode.accept()
        await decode.send(FrameKind.REJECTED, Rejection.of(LeaseExpired("old")).encode(), epoch=2)
        await asyncio.sleep(0.01)
        assert export.error is None
        await decode.send(FrameKind.REJECTED, Rejection.of(LeaseExpired("now")).encode())
        await until(lambda: export.error is not None)
        assert isinstance(export.error, LeaseExpired)


async def test_what_a_receiver_does_not_send_ends_the_handoff() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        (await decode.recv(FrameKind.OPEN)).release()
        await decode.send(FrameKind.COMMIT)
        await until(lambda: export.error is not None)
        assert isinstance(export.error, TransferError)


@pytest.mark.parametrize("payload", [b"", b"\xff" * 9])
async def test_a_broken_reply_ends_the_connection(payload: bytes) -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        (await decode.recv(FrameKind.OPEN)).release()
        await decode.send(FrameKind.ACCEPTED, payload)
        await until(lambda: export.error is not None)
        assert isinstance(export.error, PeerUnavailable)
        assert on.exporter.transport_of(DECODE) is None


async def test_a_rejected_connection_ends_with_its_reason() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        (await decode.recv(FrameKind.OPEN)).release()
        await decode.connection.send(seal(FrameKind.REJECTED, payload=Rejection("REASON", "drained").encode()))
        await until(lambda: export.error is not None)
        assert "drained" in str(export.error)


async def test_a_new_export_after_a_lost_link_connects_again() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        decode.connection.abort()
        await until(lambda: export.error is not None)
        again = on.exporter.begin(HANDLE)
        second = await on.accept()
        (await second.recv(FrameKind.OPEN)).release()
        await again.abort("enough")


async def test_the_same_handle_is_not_sent_twice_at_once() -> None:
    async with stage() as on:
        first = on.exporter.begin(HANDLE)
        decode = await on.accept()
        await decode.accept()
        second = on.exporter.begin(HANDLE)
        await until(lambda: second.error is not None)
        assert "already being sent" in str(second.error)
        assert first.error is None


async def test_connections_are_made_ahead_of_use_and_follow_the_registry() -> None:
    async with stage() as on:
        await on.accept()
        await until(lambda: on.exporter.transport_of(DECODE) == "inproc")
        on.exporter.update_peers([on.peer])  # nothing new: the link stays
        assert on.exporter.transport_of(DECODE) == "inproc"
        on.exporter.update_peers([replace(on.peer, layout=tiny_layout(block_size=32))])
        assert on.exporter.transport_of(DECODE) is None


async def test_a_changed_address_interrupts_an_attempt_to_connect() -> None:
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        await on.connections.get()  # never answered
        on.exporter.update_peers([replace(on.peer, addresses=("grpc://127.0.0.1:1", *on.peer.addresses))])
        await until(lambda: export.error is not None)
        assert isinstance(export.error, PeerUnavailable)
        again = on.exporter.begin(HANDLE)
        await (await on.accept()).accept()
        await again.abort("enough")


async def test_a_block_table_that_is_too_short_fails_the_export() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        told: list[EngineError] = []
        async with tiers.exporter.begin(handle, on_failed=told.append) as export:
            export.layer_ready(0, 20, blocks(5))
            with pytest.raises(TransferError, match="does not cover"):
                await export.finish(b"")
        assert len(told) == 1


async def test_an_abort_that_cannot_leave_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "ABORT_GRACE_S", 0.05)
    async with stage() as on:
        export = on.exporter.begin(HANDLE)
        decode = await on.accept()
        await decode.accept()
        connection = (await on.exporter._link(on.peer)).connection
        assert isinstance(connection, InprocConnection)
        connection._budget.limit = 0
        connection._budget.used = 1  # nothing leaves any more, not even ABORT
        async with asyncio.timeout(1):
            await export.abort("the client left")
        assert isinstance(export.error, RequestCancelled)
        connection._budget.used = 0


async def test_room_that_comes_in_the_turn_of_the_failure_is_not_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the blocks may belong to another sequence."""
    room: asyncio.Future[PayloadBuffer] = asyncio.get_running_loop().create_future()
    is_waiting, released = asyncio.Event(), asyncio.Event()
    reserve = InprocConnection.reserve

    async def wait_for_room(connection: InprocConnection, num_bytes: int) -> PayloadBuffer:
        if num_bytes < LAYOUT.block_bytes:
            return await reserve(connection, num_bytes)  # a control frame's
        is_waiting.set()
        return await room

    monkeypatch.setattr(InprocConnection, "reserve_now", lambda connection, num_bytes: None)
    monkeypatch.setattr(InprocConnection, "reserve", wait_for_room)
    async with stage() as on:
        export = on.exporter.begin(HANDLE, is_layerwise=True)
        await (await on.accept()).accept()
        export.layer_ready(0, 20, blocks(0, 1))
        await asyncio.wait_for(is_waiting.wait(), 5)
        room.set_result(PayloadBuffer(memoryview(bytearray(2 * LAYOUT.block_bytes)), on_release=released.set))
        await asyncio.sleep(0)  # the room is there, and the export has not yet seen it
        export.fail(PeerUnavailable("gone"))
        await asyncio.wait_for(released.wait(), 5)
        assert on.source.num_reads == 0
        await until(lambda: export.error is not None)
