"""One shared-memory connection: the socket's messages, the two rings, and flow control.

    socket message = envelope (24 bytes: operation u8, 7 zero, length u64, offset u64) + what the operation says
      INLINE   frame header + `length` payload bytes      small payloads
      RING     frame header; payload at `offset` of the sender's ring, `length` bytes
      RELEASE  the receiver is done with the payload at `offset` of its peer's ring
      CLOSE    nothing more comes

A peer that breaks this is cut off. The peer's ring is mapped read-only and every offset is checked against it.
"""

import asyncio
import mmap
import struct
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from kv_transfer.frame import HEADER_BYTES, Frame, FrameError, PayloadBuffer, check_greeting, decode_header
from kv_transfer.frame import encode_header as encode_frame_header
from kv_transfer.transports.flow import FrameQueue, fresh
from kv_transfer.transports.port import ConnectionClosed
from kv_transfer.transports.shm.ring import RingAllocator
from kvrelay.errors import TransferError

DEFAULT_RING_BYTES = 64 << 20
WARM_RING_BYTES = 8 << 20
"""Part of the ring that is used while the receiver keeps up."""
PREFERRED_PAYLOAD_BYTES = 4 << 20
"""Large enough to make a frame's fixed cost small, small enough that the receiver need not wait long for the first."""
INLINE_BYTES = 4096
"""Payloads up to this size travel in the socket: cheaper than a ring region and its release."""
MAX_QUEUED_FRAMES = 4096
"""Received frames that may wait for `recv` before the socket is read no further."""
CLOSE_TIMEOUT_S = 2.0

_ENVELOPE = struct.Struct("<B7xQQ")
_EMPTY = memoryview(b"")


class Operation(IntEnum):
    """What a socket message is."""

    INLINE = 1
    RING = 2
    RELEASE = 3
    CLOSE = 4


class _Protocol(asyncio.Protocol):
    """Takes the socket's byte stream apart."""

    def __init__(
        self, on_message: Callable[[Operation, int, int, bytes], None], on_end: Callable[[TransferError], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._data = bytearray()
        self._drained = asyncio.Event()
        self._drained.set()
        self.transport: asyncio.Transport | None = None
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            used = self._parse()
        except TransferError as error:
            self._on_end(error)
            return
        del self._data[:used]

    def _parse(self) -> int:
        position = 0
        while len(self._data) - position >= _ENVELOPE.size:
            number, length, offset = _ENVELOPE.unpack_from(self._data, position)
            try:
                operation = Operation(number)
            except ValueError as error:
                raise FrameError(f"unknown operation {number}") from error
            body_bytes = 0
            if operation in (Operation.INLINE, Operation.RING):
                body_bytes = HEADER_BYTES
            if operation is Operation.INLINE:
                if length > INLINE_BYTES:
                    raise FrameError(f"an inline payload of {length} bytes is over {INLINE_BYTES}")
                body_bytes += length
            end = position + _ENVELOPE.size + body_bytes
            if len(self._data) < end:
                break
            body = bytes(memoryview(self._data)[position + _ENVELOPE.size : end])
            position = end
            self._on_message(operation, length, offset, body)
        return position

    def pause_writing(self) -> None:
        self._drained.clear()

    def resume_writing(self) -> None:
        self._drained.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._drained.set()
        on_end = self._on_end
        # Nothing comes any more. Kept, the callbacks would keep the connection, which keeps this, until they are found
        # by a full collection.
        self._on_message, self._on_end = _ignore_message, _ignore_end
        on_end(ConnectionClosed("the peer is gone" if exc is None else f"the socket failed: {exc}"))

    async def drained(self) -> None:
        """Wait until the socket takes more."""
        await self._drained.wait()


def _ignore_message(operation: Operation, length: int, offset: int, body: bytes) -> None:
    return None


def _ignore_end(error: TransferError) -> None:
    return None


class ShmConnection:
    """One end of a shared-memory connection.

    Invariants: a ring region is allocated from `reserve` until the peer's RELEASE (or the buffer's release, unsent);
    waiters get room in the order in which they asked.
    """

    scheme = "shm"
    preferred_payload_bytes = PREFERRED_PAYLOAD_BYTES

    def __init__(self, own: mmap.mmap, peer: mmap.mmap, *, is_peer_known: bool) -> None:
        self._own = own
        self._peer = peer
        self._own_view = memoryview(own)
        self._peer_view = memoryview(peer)
        self._is_peer_known = is_peer_known
        self._ring = RingAllocator(len(own), WARM_RING_BYTES)
        self._sent: set[int] = set()
        """Regions the peer reads."""
        self._waiters: deque[tuple[int, asyncio.Future[int]]] = deque()
        self._released: list[int] = []
        """Payloads done with, for the next `RELEASE`s."""
        self._received = FrameQueue()
        self._end: ConnectionClosed | None = None
        self._is_paused = False
        self.protocol = _Protocol(self._on_message, self._on_end)

    @property
    def is_closed(self) -> bool:
        """Whether `send` would raise."""
        return self._end is not None

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        """See `Connection.reserve`."""
        buffer = self.reserve_now(num_bytes)
        if buffer is None:
            buffer = self._buffer(num_bytes, await self._wait_for_room(num_bytes))
        return buffer

    def reserve_now(self, num_bytes: int) -> PayloadBuffer | None:
        """See `Connection.reserve_now`."""
        if self._end is not None:
            raise fresh(self._end)
        if num_bytes <= INLINE_BYTES:
            return PayloadBuffer(memoryview(bytearray(num_bytes)))
        if num_bytes > len(self._own):
            raise FrameError(f"a payload of {num_bytes} bytes does not fit the ring of {len(self._own)}")
        offset = None if self._waiters else self._ring.allocate(num_bytes)
        return None if offset is None else self._buffer(num_bytes, offset)

    def _buffer(self, num_bytes: int, offset: int) -> PayloadBuffer:
        return PayloadBuffer(self._own_view[offset : offset + num_bytes], self, offset, lambda: self._free(offset))

    async def _wait_for_room(self, num_bytes: int) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = (num_bytes, waiter)
        self._waiters.append(entry)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free(waiter.result())  # granted and cancelled in the same loop turn
            elif entry in self._waiters:
                self._waiters.remove(entry)
                self._grant()
            raise

    def _free(self, offset: int) -> None:
        if self._end is None:
            self._ring.free(offset)
            self._grant()

    def _grant(self) -> None:
        while self._waiters:
            num_bytes, waiter = self._waiters[0]
            if not waiter.done():
                offset = self._ring.allocate(num_bytes)
                if offset is None:
                    return
                waiter.set_result(offset)
            self._waiters.popleft()

    async def send(self, frame: Frame) -> None:
        """See `Connection.send`."""
        await self.protocol.drained()
        buffer = frame.buffer
        if (buffer is None or buffer.owner is not self) and len(frame.payload) > INLINE_BYTES:
            buffer = await self.reserve(len(frame.payload))
            buffer.view[:] = frame.payload
        transport = self.protocol.transport
        if self._end is not None or transport is None:
            raise fresh(self._end or ConnectionClosed("the connection is not open yet"))
        header = encode_frame_header(frame.header)
        if buffer is not None and buffer.owner is self:
            buffer.detach()
            self._sent.add(buffer.location)
            transport.write(_ENVELOPE.pack(Operation.RING, len(buffer.view), buffer.location) + header)
            buffer.view = _EMPTY
        else:
            payload = bytes(frame.payload)
            transport.write(_ENVELOPE.pack(Operation.INLINE, len(payload), 0) + header + payload)

    def trust_peer(self) -> None:
        """See `Connection.trust_peer`."""
        self._is_peer_known = True

    async def recv(self) -> Frame:
        """See `Connection.recv`."""
        frame = await self._received.get()
        transport = self.protocol.transport
        if self._is_paused and len(self._received) < MAX_QUEUED_FRAMES // 2 and transport is not None:
            self._is_paused = False
            if not transport.is_closing():
                transport.resume_reading()
        return frame

    async def close(self) -> None:
        """See `Connection.close`."""
        transport = self.protocol.transport
        if self._end is None and transport is not None:
            transport.write(_ENVELOPE.pack(Operation.CLOSE, 0, 0))
            transport.close()
        self._finish(ConnectionClosed("closed here"), drop=True)
        if transport is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.protocol.closed.wait()
            except TimeoutError:
                transport.abort()
                await self.protocol.closed.wait()
        self._unmap()

    def abort(self) -> None:
        """See `Connection.abort`."""
        self._finish(ConnectionClosed("aborted here"), drop=True)
        if self.protocol.transport is not None:
            self.protocol.transport.abort()
        self._unmap()

    def _finish(self, error: TransferError, *, drop: bool) -> None:
        if self._end is None:
            self._end = ConnectionClosed(str(error))
        self._received.close(error, drop=drop)
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(fresh(self._end))

    def _unmap(self) -> None:
        for view in (self._own_view, self._peer_view):
            view.release()
        for ring in (self._own, self._peer):
            try:
                ring.close()
            except BufferError:
                # Somebody still looks at a payload: the mapping goes when the last view does.
                continue

    def _on_end(self, error: TransferError) -> None:
        self._finish(error, drop=False)
        if self.protocol.transport is not None:
            self.protocol.transport.abort()

    def _on_message(self, operation: Operation, length: int, offset: int, body: bytes) -> None:
        match operation:
            case Operation.RELEASE:
                if offset not in self._sent:
                    raise FrameError(f"no payload was sent at offset {offset}")
                self._sent.discard(offset)
                self._free(offset)
            case Operation.CLOSE:
                self._on_end(ConnectionClosed("closed by the peer"))
            case Operation.INLINE | Operation.RING:
                header = decode_header(body[:HEADER_BYTES])
                if not self._is_peer_known:
                    check_greeting(header)
                if header.payload_bytes != length:
                    raise FrameError(f"a header names {header.payload_bytes} payload bytes, the envelope {length}")
                if operation is Operation.RING:
                    if length <= INLINE_BYTES or offset > len(self._peer) or length > len(self._peer) - offset:
                        raise FrameError("a payload lies outside the ring")
                    payload = self._peer_view[offset : offset + length]
                    frame = Frame(header, payload, on_release=lambda: self._send_release(offset))
                else:
                    frame = Frame(header, memoryview(body)[HEADER_BYTES:])
                self._received.put(frame)
                transport = self.protocol.transport
                if len(self._received) >= MAX_QUEUED_FRAMES and not self._is_paused and transport is not None:
                    self._is_paused = True
                    transport.pause_reading()

    def _send_release(self, offset: int) -> None:
        # One write for all payloads released in a turn of the loop: each write may wake the peer.
        if not self._released:
            asyncio.get_running_loop().call_soon(self._flush_releases)
        self._released.append(offset)

    def _flush_releases(self) -> None:
        released, self._released = self._released, []
        transport = self.protocol.transport
        if self._end is None and transport is not None and not transport.is_closing():
            transport.write(b"".join(_ENVELOPE.pack(Operation.RELEASE, 0, offset) for offset in released))
