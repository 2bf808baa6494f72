"""What every transport promises, as one suite; between processes in test_transport_processes.py."""

import asyncio
import contextlib
import os

import pytest

from engine.types import Epoch, LeaseId
from kv_transfer.frame import Frame, FrameKind, seal, verify
from kv_transfer.transports.port import Connection, ConnectionClosed, Transport
from kvrelay.errors import ChecksumMismatch, PeerUnavailable
from tests.fakes_handoff import until
from tests.transports import TRANSPORTS, Accepted, connect, connected, echo, kv_frame, welcoming, within

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    name = request.param
    assert isinstance(name, str)
    return TRANSPORTS[name]()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65536, 1 << 20, (1 << 20) + 1, 4 << 20, (5 << 20) + 3])
async def test_payload_of_any_size_comes_back_whole(transport: Transport, size: int) -> None:
    payload = os.urandom(size)
    async with connected(transport, echo) as connection:
        sent = kv_frame(payload)
        await connection.send(sent)
        frame = await connection.recv()
        verify(frame)
        assert frame.header == sent.header
        assert bytes(frame.payload) == payload
        frame.release()


async def test_frames_keep_their_order(transport: Transport) -> None:
    sizes = [0, 100_000, 10, 3_000_000, 4097, 0, 64]
    async with connected(transport, echo) as connection:
        for number, size in enumerate(sizes * 3):
            await connection.send(kv_frame(bytes(size), number))
        for number, size in enumerate(sizes * 3):
            frame = await connection.recv()
            assert (frame.header.first_block, len(frame.payload)) == (number, size)
            frame.release()


async def test_reserved_memory_is_sent_as_it_was_filled(transport: Transport) -> None:
    async with connected(transport, echo) as connection:
        for size in (0, 10, 4096, 200_000, 2 << 20):
            buffer = await connection.reserve(size)
            payload = os.urandom(size)
            buffer.view[:] = payload
            frame = seal(
                FrameKind.KV, LeaseId(1), Epoch(1), payload=buffer.view, num_layers=1, num_blocks=1, buffer=buffer
            )
            await connection.send(frame)
            buffer.release()  # must not take back what was sent
            if size:
                other = await connection.reserve(size)
                other.view[:] = bytes(size)  # nor may its memory be lent again before the peer is done with it
                other.release()
            answer = await connection.recv()
            verify(answer)
            assert bytes(answer.payload) == payload
            answer.release()


async def test_memory_may_be_reused_once_send_has_returned(transport: Transport) -> None:
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        payload = bytearray(b"a" * 300_000)
        await connection.send(kv_frame(memoryview(payload)))
        payload[:] = b"b" * len(payload)
        frame = await (await accepted.connection).recv()
        assert bytes(frame.payload) == b"a" * len(payload)
        frame.release()
        accepted.done.set()


async def test_many_tasks_share_a_connection(transport: Transport) -> None:
    """Frames of concurrent hand-offs are interleaved and none is torn."""
    num_tasks, num_frames = 16, 12
    received: dict[int, list[int]] = {}

    async def collect(connection: Connection) -> None:
        for _ in range(num_tasks * num_frames):
            frame = await connection.recv()
            verify(frame)
            received.setdefault(frame.header.lease_id, []).append(frame.header.first_block)
            frame.release()
        await connection.send(seal(FrameKind.COMMITTED))
        with contextlib.suppress(ConnectionClosed):
            await connection.recv()

    async def stream(connection: Connection, lease_id: int) -> None:
        for number in range(num_frames):
            size = 1000 * lease_id + 50_000 * number
            buffer = await connection.reserve(size)
            buffer.view[:] = bytes([lease_id]) * size
            await connection.send(
                seal(
                    FrameKind.KV,
                    LeaseId(lease_id),
                    Epoch(1),
                    payload=buffer.view,
                    num_layers=1,
                    first_block=number,
                    num_blocks=1,
                    buffer=buffer,
                )
            )

    async with connected(transport, collect) as connection:
        await asyncio.gather(*(stream(connection, lease_id) for lease_id in range(1, num_tasks + 1)))
        assert (await connection.recv()).header.kind is FrameKind.COMMITTED
    assert received == {lease_id: list(range(num_frames)) for lease_id in range(1, num_tasks + 1)}


async def test_one_listener_serves_many_connections(transport: Transport) -> None:
    listener = await transport.listen(welcoming(echo))
    connections = await asyncio.gather(*(connect(transport, listener.address) for _ in range(5)))
    for number, connection in enumerate(connections):
        await connection.send(kv_frame(bytes([number]) * 9000))
    for number, connection in enumerate(connections):
        frame = await connection.recv()
        assert bytes(frame.payload) == bytes([number]) * 9000
        frame.release()
    await asyncio.gather(*(connection.close() for connection in connections))
    await listener.close()


async def test_close_lets_the_peer_read_what_was_sent_and_then_wakes_it(transport: Transport) -> None:
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        server = await accepted.connection
        for number in range(5):
            await connection.send(kv_frame(bytes(1000), number))
        await connection.close()
        for number in range(5):
            frame = await server.recv()
            assert frame.header.first_block == number
            frame.release()
        with pytest.raises(ConnectionClosed):
            await within(5, server.recv())
        with pytest.raises(ConnectionClosed):
            await server.send(kv_frame(b"late"))
        accepted.done.set()


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_ending_a_connection_wakes_its_own_reader(transport: Transport, end: str) -> None:
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        reader = asyncio.ensure_future(connection.recv())
        await accepted.connection
        await asyncio.sleep(0.01)
        if end == "close":
            accepted.done.set()
            await connection.close()
        else:
            connection.abort()
        with pytest.raises(ConnectionClosed):
            await within(5, reader)
        assert connection.is_closed
        with pytest.raises(ConnectionClosed):
            await connection.send(kv_frame(b"late"))
        with pytest.raises(ConnectionClosed):
            await connection.reserve(1 << 20)
        accepted.done.set()


async def test_a_handler_that_returns_closes_its_connection(transport: Transport) -> None:
    async def greet(connection: Connection) -> None:
        await connection.send(kv_frame(b"goodbye"))

    async with connected(transport, greet) as connection:
        frame = await within(5, connection.recv())
        assert bytes(frame.payload) == b"goodbye"
        frame.release()
        with pytest.raises(ConnectionClosed):
            await within(5, connection.recv())


async def test_closing_the_listener_ends_its_connections(transport: Transport) -> None:
    listener = await transport.listen(echo)
    connection = await transport.connect(listener.address, 5.0)
    await within(5, listener.close())
    with pytest.raises(ConnectionClosed):
        await within(5, connection.recv())
    await connection.close()
    with pytest.raises(PeerUnavailable):
        await transport.connect(listener.address, 1.0)


async def test_connecting_to_nobody_is_an_error_in_time(transport: Transport) -> None:
    listener = await transport.listen(echo)
    await listener.close()
    with pytest.raises(PeerUnavailable):
        await within(3, transport.connect(listener.address, 1.0))


async def test_only_own_addresses_of_the_right_form_are_reachable(transport: Transport) -> None:
    listener = await transport.listen(echo)
    assert transport.can_reach(listener.address)
    assert not transport.can_reach(f"{transport.scheme}://elsewhere")
    await listener.close()


async def test_a_receiver_that_does_not_read_stops_the_sender(transport: Transport) -> None:
    """Bytes in flight are bounded, whatever the sender would like to send."""
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        server = await accepted.connection
        num_sent = 0

        async def flood() -> None:
            nonlocal num_sent
            while True:
                buffer = await connection.reserve(1 << 20)
                frame = seal(
                    FrameKind.KV, LeaseId(1), Epoch(1), payload=buffer.view, num_layers=1, num_blocks=1, buffer=buffer
                )
                await connection.send(frame)
                num_sent += 1

        flooding = asyncio.ensure_future(flood())
        previous = -1
        while previous != num_sent:
            previous = num_sent
            await asyncio.sleep(0.2)
        assert 4 <= num_sent <= 128
        for _ in range(num_sent):  # reading makes room again
            (await within(5, server.recv())).release()
        await until(lambda: num_sent > previous, 5.0)
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        connection.abort()
        accepted.done.set()


async def test_unreleased_payloads_stay_valid_and_keep_their_room(transport: Transport) -> None:
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        server = await accepted.connection
        for number in range(6):
            await connection.send(kv_frame(bytes([number]) * (1 << 20), number))
        frames = [await server.recv() for _ in range(6)]
        for number in (3, 0, 5, 1, 4, 2):  # in any order
            assert bytes(frames[number].payload) == bytes([number]) * (1 << 20)
            frames[number].release()
            frames[number].release()  # twice is harmless
        accepted.done.set()


async def test_a_cancelled_send_leaves_the_connection_usable(transport: Transport) -> None:
    accepted = Accepted.new()
    async with connected(transport, accepted) as connection:
        server = await accepted.connection
        senders = [asyncio.ensure_future(connection.send(kv_frame(bytes(2 << 20), n))) for n in range(100)]
        await asyncio.sleep(0.1)
        for sender in senders:
            sender.cancel()
        results = await asyncio.gather(*senders, return_exceptions=True)
        sent = [n for n, result in enumerate(results) if result is None]
        assert 0 < len(sent) < 100
        await asyncio.sleep(0)
        last = asyncio.ensure_future(connection.send(kv_frame(b"last", 999)))
        for number in [*sent, 999]:
            frame = await server.recv()
            verify(frame)
            assert frame.header.first_block == number
            frame.release()
        await last
        accepted.done.set()


async def test_a_cancelled_recv_loses_no_frame(transport: Transport) -> None:
    async with connected(transport, echo) as connection:
        reader = asyncio.ensure_future(connection.recv())
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await connection.send(kv_frame(b"still here"))
        frame = await within(5, connection.recv())
        assert bytes(frame.payload) == b"still here"
        frame.release()


async def test_a_corrupted_byte_is_caught_by_the_digest(transport: Transport) -> None:
    payload = bytearray(os.urandom(100_000))
    frame = kv_frame(memoryview(bytes(payload)))
    payload[54_321] ^= 0x10
    async with connected(transport, echo) as connection:
        await connection.send(Frame(frame.header, memoryview(payload)))
        damaged = await connection.recv()
        with pytest.raises(ChecksumMismatch):
            verify(damaged)
        damaged.release()
