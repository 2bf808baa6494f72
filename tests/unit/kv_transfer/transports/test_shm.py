"""What only the shared-memory transport does: rings, their seals, the peer's identity, and a peer that lies."""

import asyncio
import fcntl
import mmap
import os
import socket
import stat
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer.frame import HEADER_BYTES, FrameError, FrameKind, encode_header, seal
from kv_transfer.transports.address import host_token, parse_address
from kv_transfer.transports.port import Connection, ConnectionClosed
from kv_transfer.transports.shm import transport as shm_module
from kv_transfer.transports.shm.connection import INLINE_BYTES, Operation
from kv_transfer.transports.shm.handshake import exchange_rings
from kv_transfer.transports.shm.transport import ShmTransport
from kvrelay.errors import PeerUnavailable

pytestmark = pytest.mark.usefixtures("no_leaks")

ENVELOPE = struct.Struct("<B7xQQ")
GREETING = struct.Struct("<8sQ")
MAGIC = b"KVSHM\0\0\1"
RING_BYTES = 1 << 20


def sealed_ring(
    size: int = RING_BYTES, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
) -> int:
    descriptor = os.memfd_create("test-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class RawPeer:
    """The other end of a connection, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def greet(self, descriptors: list[int], size: int = RING_BYTES, magic: bytes = MAGIC) -> None:
        socket.send_fds(self.sock, [GREETING.pack(magic, size)], descriptors)

    def send(self, operation: int, length: int = 0, offset: int = 0, body: bytes = b"") -> None:
        self.sock.sendall(ENVELOPE.pack(operation, length, offset) + body)

    def take_ring(self) -> mmap.mmap:
        data, descriptors, _, _ = socket.recv_fds(self.sock, GREETING.size, 1)
        ring = mmap.mmap(descriptors[0], GREETING.unpack(data)[1])
        os.close(descriptors[0])
        return ring


@asynccontextmanager
async def raw_pair() -> AsyncIterator[tuple[RawPeer, socket.socket]]:
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    mine.setblocking(False)
    theirs.setblocking(False)
    try:
        yield RawPeer(mine), theirs
    finally:
        mine.close()
        theirs.close()


@asynccontextmanager
async def raw_connection() -> AsyncIterator[tuple[RawPeer, Connection]]:
    """A real connection whose peer is played by the test."""
    async with raw_pair() as (peer, theirs):
        ring = sealed_ring()
        peer.greet([ring])
        os.close(ring)
        connection = await exchange_rings(theirs, RING_BYTES, is_peer_known=True)
        try:
            yield peer, connection
        finally:
            await connection.close()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
async def test_a_ring_that_its_owner_could_truncate_is_refused(seals: int) -> None:
    async with raw_pair() as (peer, theirs):
        ring = sealed_ring(seals=seals)
        peer.greet([ring])
        os.close(ring)
        with pytest.raises(PeerUnavailable, match="sealed"):
            await exchange_rings(theirs, RING_BYTES, is_peer_known=True)


@pytest.mark.parametrize(
    ("size", "magic"), [(RING_BYTES * 2, MAGIC), (0, MAGIC), (1 << 60, MAGIC), (RING_BYTES, b"KVSHM\0\0\2")]
)
async def test_a_greeting_that_does_not_fit_the_ring_is_refused(size: int, magic: bytes) -> None:
    async with raw_pair() as (peer, theirs):
        ring = sealed_ring()
        peer.greet([ring], size, magic)
        os.close(ring)
        with pytest.raises(PeerUnavailable):
            await exchange_rings(theirs, RING_BYTES, is_peer_known=True)


@pytest.mark.parametrize("num_descriptors", [0, 2, 7])
async def test_a_greeting_carries_exactly_one_descriptor_and_none_leaks(num_descriptors: int) -> None:
    async with raw_pair() as (peer, theirs):
        rings = [sealed_ring() for _ in range(num_descriptors)]
        peer.greet(rings)
        for ring in rings:
            os.close(ring)
        with pytest.raises(PeerUnavailable, match="carries no ring"):
            await exchange_rings(theirs, RING_BYTES, is_peer_known=True)


async def test_a_descriptor_that_is_no_memory_file_is_refused() -> None:
    async with raw_pair() as (peer, theirs):
        left, right = os.pipe()
        peer.greet([left])
        os.close(left)
        os.close(right)
        with pytest.raises(PeerUnavailable, match="cannot be mapped"):
            await exchange_rings(theirs, RING_BYTES, is_peer_known=True)


def header(payload_bytes: int) -> bytes:
    frame = seal(FrameKind.KV, num_layers=1, num_blocks=1, payload=bytes(payload_bytes))
    return encode_header(frame.header)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (RING_BYTES - 4999, 5000),
        (RING_BYTES, 5000),
        (RING_BYTES + 1, 5000),
        (2**64 - 1, 5000),
        (2**64 - 2500, 5000),
        (0, RING_BYTES + 64),
    ],
)
async def test_a_payload_outside_the_ring_is_refused(offset: int, length: int) -> None:
    async with raw_connection() as (peer, connection):
        peer.send(Operation.RING, length, offset, header(length))
        with pytest.raises(FrameError, match="outside the ring"):
            await connection.recv()
        with pytest.raises(ConnectionClosed):
            await connection.send(seal(FrameKind.OPEN))


@pytest.mark.parametrize(
    ("operation", "length", "offset", "body"),
    [
        (9, 0, 0, b""),
        (0, 0, 0, b""),
        (Operation.RELEASE, 0, 0, b""),  # nothing was sent
        (Operation.RELEASE, 0, 2**64 - 1, b""),
        (Operation.INLINE, 2**63, 0, b""),
        (Operation.INLINE, 10, 0, header(11) + bytes(10)),
        (Operation.INLINE, 0, 0, bytes(HEADER_BYTES)),
        (Operation.RING, INLINE_BYTES, 0, header(INLINE_BYTES)),
        (Operation.RING, 5000, 0, header(5001)),
    ],
)
async def test_a_peer_that_breaks_the_protocol_is_cut_off(
    operation: int, length: int, offset: int, body: bytes
) -> None:
    async with raw_connection() as (peer, connection):
        peer.send(operation, length, offset, body)
        with pytest.raises(FrameError):
            async with asyncio.timeout(5):
                await connection.recv()
        assert connection.is_closed


async def test_a_payload_is_released_once_and_its_room_is_used_again() -> None:
    async with raw_connection() as (peer, connection):
        ring = peer.take_ring()
        frame = seal(FrameKind.KV, num_layers=1, num_blocks=1, payload=b"z" * (RING_BYTES - 100))
        await connection.send(frame)
        sending = asyncio.ensure_future(connection.send(frame))
        await asyncio.sleep(0.02)
        assert not sending.done()
        operation, length, offset = ENVELOPE.unpack_from(peer.sock.recv(1 << 16))
        assert (operation, length) == (Operation.RING, RING_BYTES - 100)
        assert ring[offset : offset + length] == b"z" * length
        peer.send(Operation.RELEASE, 0, offset)
        await sending
        peer.send(Operation.RELEASE, 0, 0)
        peer.send(Operation.RELEASE, 0, 0)
        with pytest.raises(FrameError, match="no payload was sent"):
            await connection.recv()
        ring.close()


async def test_releasing_an_unsent_buffer_gives_its_room_back() -> None:
    async with raw_connection() as (_, connection):
        for _ in range(5):
            buffer = await connection.reserve(RING_BYTES)
            buffer.view[:3] = b"abc"
            buffer.release()
            buffer.release()
        with pytest.raises(FrameError, match="does not fit"):
            await connection.reserve(RING_BYTES + 1)


async def test_a_cancelled_wait_for_room_lets_the_next_one_in() -> None:
    async with raw_connection() as (_, connection):
        first = await connection.reserve(RING_BYTES - 64)
        large = asyncio.ensure_future(connection.reserve(RING_BYTES))
        small = asyncio.ensure_future(connection.reserve(INLINE_BYTES + 1))
        await asyncio.sleep(0)
        large.cancel()
        await asyncio.sleep(0)
        assert not small.done()  # 64 bytes are free
        first.release()
        assert len((await small).view) == INLINE_BYTES + 1
        granted = asyncio.ensure_future(connection.reserve(RING_BYTES))
        await asyncio.sleep(0)
        (await small).release()
        granted.cancel()  # granted and cancelled in the same turn of the loop
        await asyncio.gather(granted, return_exceptions=True)
        (await connection.reserve(RING_BYTES)).release()


async def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(connection: Connection) -> None:
        await connection.recv()

    listener = await ShmTransport().listen(serve)
    token, uid = host_token(), os.getuid()
    monkeypatch.setattr("kv_transfer.transports.shm.transport.os.getuid", lambda: uid + 1)
    assert host_token() == token  # still what the address says
    with pytest.raises(PeerUnavailable, match="another user"):
        await ShmTransport().connect(listener.address, 2.0)
    monkeypatch.undo()
    await listener.close()


async def test_a_client_that_never_greets_costs_nothing_but_its_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_module, "HANDSHAKE_TIMEOUT_S", 0.05)

    async def serve(connection: Connection) -> None:
        frame = await connection.recv()
        await connection.send(seal(frame.header.kind))
        frame.release()

    listener = await ShmTransport().listen(serve)
    path = parse_address(listener.address).host_and_path[1]
    silent = socket.socket(socket.AF_UNIX)
    silent.connect("\0" + path[1:])
    connection = await ShmTransport().connect(listener.address, 2.0)
    await connection.send(seal(FrameKind.OPEN))
    (await connection.recv()).release()
    await asyncio.sleep(0.1)
    assert silent.recv(GREETING.size)[:5] == MAGIC[:5]
    assert silent.recv(1) == b""  # cut off
    silent.close()
    await connection.close()
    await listener.close()


async def test_a_run_directory_holds_a_private_socket_and_is_left_clean(tmp_path: Path) -> None:
    async def serve(connection: Connection) -> None:
        await connection.recv()

    transport = ShmTransport(run_dir=tmp_path)
    listener = await transport.listen(serve)
    (name,) = os.listdir(tmp_path)
    assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == 0o700
    assert transport.can_reach(listener.address)
    connection = await transport.connect(listener.address, 2.0)
    await connection.close()
    await listener.close()
    assert os.listdir(tmp_path) == []
    with pytest.raises(PeerUnavailable):
        await transport.connect(listener.address, 1.0)


async def test_a_run_directory_that_is_missing_or_too_deep_is_an_error(tmp_path: Path) -> None:
    async def serve(connection: Connection) -> None:
        await connection.recv()

    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(PeerUnavailable, match="shorter run_dir"):
        await ShmTransport(run_dir=deep).listen(serve)
    assert os.listdir(deep) == []
    with pytest.raises(PeerUnavailable, match="cannot listen"):
        await ShmTransport(run_dir=tmp_path / "missing").listen(serve)
