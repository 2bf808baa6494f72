"""The importer against exporters that break the protocol: each gets a typed refusal and harms nobody else."""

import asyncio
import random
from dataclasses import replace

import pytest

from engine.types import Epoch, Incarnation, LeaseId, WorkerId
from kv_transfer.frame import Frame, FrameError, FrameKind, seal
from kv_transfer.handoff import import_table as import_table_module
from kv_transfer.handoff import importer as importer_module
from kv_transfer.handoff.messages import Credit, Hello, Open, Rejection
from kv_transfer.transports.inproc import connection_pair
from kv_transfer.transports.port import ConnectionClosed
from kvrelay.errors import (
    ChecksumMismatch,
    CoverageIncomplete,
    EngineError,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    PeerUnavailable,
    StaleEpoch,
    TransferError,
)
from tests.fakes_exporter import HELLO, INCARNATION, LAYOUT, Decode, make_decode, reserve
from tests.fakes_handoff import blocks
from tests.fakes_transport import Fault, damage, tiny_layout

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def decode() -> Decode:
    return make_decode()


async def test_a_handoff_by_hand_works(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.opened(handle)
        frame = peer.kv(handle)
        await peer.connection.send(frame)
        await peer.commit(handle, frame)
        assert (await peer.recv()).header.kind is FrameKind.COMMITTED
        await peer.commit(handle, frame)  # the acknowledgement may have been lost: it is repeated
        assert (await peer.recv()).header.kind is FrameKind.COMMITTED
    assert decode.commits == [b"record"]


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.COMMIT, FrameKind.REJECTED])
async def test_a_connection_that_does_not_begin_with_hello_is_closed(decode: Decode, kind: FrameKind) -> None:
    async with decode.peer(hello=False) as peer:
        await peer.send(kind)
        assert isinstance(await peer.rejection(), FrameError)
        with pytest.raises(ConnectionClosed):
            await peer.recv()


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (damage(seal(FrameKind.HELLO, payload=HELLO), Fault.BIT_FLIP), ChecksumMismatch),
        (seal(FrameKind.HELLO, payload=HELLO[:-1]), FrameError),
        (seal(FrameKind.HELLO, incarnation=Incarnation(76), payload=HELLO), PeerUnavailable),
        (
            seal(FrameKind.HELLO, payload=Hello(WorkerId("p"), Incarnation(1), tiny_layout(head_dim=8)).encode()),
            LayoutMismatch,
        ),
    ],
)
async def test_a_bad_hello_is_answered_with_the_reason(decode: Decode, frame: Frame, error: type[EngineError]) -> None:
    async with decode.peer(hello=False) as peer:
        await peer.connection.send(frame)
        assert type(await peer.rejection()) is error


async def test_a_silent_peer_is_dropped(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer_module, "HANDSHAKE_TIMEOUT_S", 0.01)
    _, theirs = connection_pair()
    with pytest.raises(PeerUnavailable, match="no HELLO"):
        await decode.importer.serve(theirs)


async def test_frames_for_an_earlier_process_are_refused(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        claim = Open(handle.ticket, 0, 10).encode()
        await peer.connection.send(seal(FrameKind.OPEN, handle.lease_id, handle.epoch, Incarnation(76), claim))
        assert type(await peer.rejection()) is PeerUnavailable
        await peer.opened(handle)


@pytest.mark.parametrize("kind", [FrameKind.HELLO, FrameKind.ACCEPTED, FrameKind.CREDIT, FrameKind.COMMITTED])
async def test_what_a_sender_does_not_send_is_refused(decode: Decode, kind: FrameKind) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.send(kind, handle, Credit(5).encode())
        assert type(await peer.rejection()) is FrameError
        await peer.opened(handle)  # the connection and the reservation still stand


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.COMMIT, FrameKind.ABORT])
async def test_a_payload_that_is_none_is_refused(decode: Decode, kind: FrameKind) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.send(kind, handle, b"\xff" * 7)
        assert type(await peer.rejection()) is FrameError
        await peer.send(kind, handle, b"")
        assert type(await peer.rejection()) is FrameError


@pytest.mark.parametrize("kind", [FrameKind.OPEN, FrameKind.COMMIT, FrameKind.ABORT])
async def test_a_damaged_control_frame_is_refused(decode: Decode, kind: FrameKind) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.connection.send(damage(peer.frame(kind, handle, b"payload"), Fault.BIT_FLIP))
        assert type(await peer.rejection()) is ChecksumMismatch
    assert decode.failures == []  # nobody had opened it


async def test_a_damaged_commit_fails_the_attempt(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.opened(handle)
        await peer.connection.send(damage(peer.frame(FrameKind.COMMIT, handle, b"payload"), Fault.BIT_FLIP))
        assert type(await peer.rejection()) is ChecksumMismatch
    assert [type(error) for error in decode.failures] == [ChecksumMismatch]


async def test_a_second_connection_cannot_write_under_anothers_ticket(decode: Decode) -> None:
    async with decode.peer() as first, decode.peer() as second:
        handle = reserve(decode)
        await first.opened(handle)
        await second.open(handle)
        assert type(await second.rejection()) is StaleEpoch
        frame = first.kv(handle, bytes(range(256)) * (2 * LAYOUT.block_bytes // 256))
        await second.connection.send(frame)
        assert type(await second.rejection()) is StaleEpoch
        await second.connection.send(damage(frame, Fault.BIT_FLIP))
        assert type(await second.rejection()) is StaleEpoch
        await second.send(FrameKind.ABORT, handle, Rejection("X", "x").encode())
        await second.commit(handle, frame)
        assert type(await second.rejection()) is StaleEpoch
        assert decode.sink.num_writes == 0
        await first.connection.send(frame)
        await first.commit(handle, frame)
        assert (await first.recv()).header.kind is FrameKind.COMMITTED
        await second.commit(handle, frame)  # not its commit to be told about
        await second.send(FrameKind.CREDIT, handle)
        assert type(await second.rejection()) is FrameError
    assert decode.failures == []


async def test_an_unknown_lease_and_a_wrong_epoch_are_refused(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.open(replace(handle, lease_id=LeaseId(handle.lease_id ^ 1)))
        assert type(await peer.rejection()) is LeaseUnknown
        await peer.open(replace(handle, epoch=Epoch(2)))
        assert type(await peer.rejection()) is LeaseUnknown
        await peer.open(replace(handle, epoch=Epoch(0)))
        assert type(await peer.rejection()) is StaleEpoch


async def test_one_writers_failure_leaves_the_others_alone(decode: Decode) -> None:
    async with decode.peer() as peer:
        bad, good = reserve(decode, 1), reserve(decode, 2)
        await peer.opened(bad)
        await peer.opened(good)
        await peer.connection.send(damage(peer.kv(bad), Fault.BIT_FLIP))
        assert type(await peer.rejection()) is ChecksumMismatch
        frame = peer.kv(good)
        await peer.connection.send(frame)
        await peer.commit(good, frame)
        assert (await peer.recv()).header.kind is FrameKind.COMMITTED
    assert [type(error) for error in decode.failures] == [ChecksumMismatch]


async def test_credit_is_returned_as_frames_are_written(decode: Decode) -> None:
    decode.importer._table._window_bytes = 2 * LAYOUT.block_bytes
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.open(handle)
        accepted = await peer.recv()
        assert Credit.decode(accepted.payload).num_bytes == 2 * LAYOUT.block_bytes
        await peer.connection.send(peer.kv(handle, num_layers=1))
        credit = await peer.recv()
        assert (credit.header.kind, Credit.decode(credit.payload).num_bytes) == (FrameKind.CREDIT, LAYOUT.block_bytes)


async def test_a_sender_that_ignores_its_credit_fails(decode: Decode) -> None:
    decode.importer._table._window_bytes = LAYOUT.block_bytes
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.opened(handle)
        await peer.connection.send(peer.kv(handle))
        assert type(await peer.rejection()) is TransferError
    assert decode.sink.num_writes == 0


async def test_a_peer_that_reads_no_replies_is_cut_off(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importer_module, "MAX_QUEUED_REPLIES", 50)
    mine, theirs = connection_pair()
    theirs._budget.limit = 1000  # a peer that takes in nothing
    serving = asyncio.ensure_future(decode.importer.serve(theirs))
    await mine.send(seal(FrameKind.HELLO, payload=HELLO))

    async def flood() -> None:
        async with asyncio.timeout(5):
            while True:
                await mine.send(seal(FrameKind.CREDIT, incarnation=INCARNATION))
                await asyncio.sleep(0)

    with pytest.raises(ConnectionClosed):
        await flood()
    await asyncio.gather(serving, return_exceptions=True)


async def test_a_commit_of_other_frames_than_arrived_is_refused(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.opened(handle)
        await peer.connection.send(peer.kv(handle))
        await peer.commit(handle, peer.kv(handle, b"\1" * 2 * LAYOUT.block_bytes))
        assert type(await peer.rejection()) is ChecksumMismatch
        missing = reserve(decode, 2)
        await peer.opened(missing)
        await peer.connection.send(peer.kv(missing, num_layers=1))
        await peer.commit(missing, peer.kv(missing, num_layers=1))
        assert type(await peer.rejection()) is CoverageIncomplete
    assert decode.commits == []


async def test_the_memory_of_commits_is_bounded(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_table_module, "MAX_REMEMBERED_COMMITS", 2)
    async with decode.peer() as peer:
        for _ in range(4):
            handle = reserve(decode)
            await peer.opened(handle)
            frame = peer.kv(handle)
            await peer.connection.send(frame)
            await peer.commit(handle, frame)
            assert (await peer.recv()).header.kind is FrameKind.COMMITTED
    assert len(decode.importer._table._commits) == 2


async def test_a_service_that_crashes_in_a_callback_does_not_take_the_connection_along(decode: Decode) -> None:
    def crash(*_: object) -> None:
        raise KeyError("a bug in the service")

    decode.importer._table._on_commit = crash
    decode.importer._table._on_failed = crash
    async with decode.peer() as peer:
        failing, committing = reserve(decode, 1), reserve(decode, 2)
        await peer.opened(failing)
        await peer.connection.send(damage(peer.kv(failing), Fault.BIT_FLIP))
        assert type(await peer.rejection()) is ChecksumMismatch
        await peer.opened(committing)
        frame = peer.kv(committing)
        await peer.connection.send(frame)
        await peer.commit(committing, frame)
        assert type(await peer.rejection()) is TransferError


async def test_random_frames_never_crash_the_importer_or_reach_a_block(decode: Decode) -> None:
    """Well-sealed frames with random kinds, ids, ranges and payloads: what a hostile exporter could send at worst."""
    generator = random.Random(11)
    handles = [reserve(decode, block) for block in range(1, 5)]
    async with decode.peer() as peer:
        for _ in range(2000):
            kind = generator.choice(list(FrameKind))
            handle = generator.choice(handles)
            is_kv = kind is FrameKind.KV
            frame = seal(
                kind,
                generator.choice([handle.lease_id, LeaseId(generator.getrandbits(64))]),
                generator.choice([handle.epoch, Epoch(generator.getrandbits(64))]),
                generator.choice([INCARNATION, Incarnation(generator.getrandbits(64))]),
                generator.randbytes(generator.choice([0, 8, 24, 32, 100, LAYOUT.block_bytes])),
                layer_start=generator.randrange(4) * is_kv,
                num_layers=generator.randrange(1, 4) * is_kv,
                first_block=generator.randrange(3) * is_kv,
                num_blocks=generator.randrange(1, 3) * is_kv,
            )
            await peer.connection.send(frame)
            while len(peer.connection._received):
                (await peer.recv()).release()
            await asyncio.sleep(0)
        await peer.open(handles[0])
        while (await peer.recv()).header.kind is not FrameKind.ACCEPTED:
            continue
    assert decode.sink.num_writes == 0
    assert decode.commits == []
    decode.importer.check_invariants()


async def test_books_that_contradict_each_other_are_noticed(decode: Decode) -> None:
    table = decode.importer._table
    handle = reserve(decode)
    table._held.clear()
    with pytest.raises(RuntimeError, match="belongs to two reservations, or to none"):
        decode.importer.check_invariants()
    table._held.update(blocks(1))
    entry = table._imports.pop(handle.lease_id)
    with pytest.raises(RuntimeError, match="leases and reservations disagree"):
        decode.importer.check_invariants()
    table._imports[LeaseId(1)] = entry
    with pytest.raises(RuntimeError, match="outlived its lease"):
        decode.importer.check_invariants()


async def test_the_service_can_keep_a_lease_alive(decode: Decode) -> None:
    handle = reserve(decode)
    decode.clock.advance(20.0)
    decode.importer.keep_alive(handle.lease_id)
    decode.clock.advance(20.0)
    assert decode.importer.tick() == []
    decode.clock.advance(10.0)
    with pytest.raises(LeaseExpired):
        decode.importer.keep_alive(handle.lease_id)
    assert decode.importer.tick() == [handle.lease_id]


async def test_superseding_tells_the_earlier_writer_at_once(decode: Decode) -> None:
    async with decode.peer() as peer:
        handle = reserve(decode)
        await peer.opened(handle)
        decode.importer.supersede(handle.lease_id)
        assert type(await peer.rejection()) is StaleEpoch
