"""One end of a `KvTransferService.Transfer` stream: frames taken apart into messages and put together again.

Runs on one event loop. Messages: `wire.py`; channels and servers: `transport.py`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import grpc
import grpc.aio

from kv_transfer.frame import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameHeader,
    PayloadBuffer,
    check_greeting,
    decode_header,
    encode_header,
)
from kv_transfer.transports.flow import BufferPool, ByteBudget, FrameQueue, fresh
from kv_transfer.transports.grpc.heap import keep_freed_memory
from kv_transfer.transports.grpc.wire import Part, decode_part, encode_part
from kv_transfer.transports.port import ConnectionClosed
from kvrelay.errors import TransferError

CHUNK_BYTES: Final = 1 << 20
"""Most payload bytes in one message."""
IN_FLIGHT_BYTES: Final = 8 << 20
"""Bytes that may wait on each side, outside gRPC's own buffers."""
CLOSE_TIMEOUT_S: Final = 2.0

_Read = Callable[[], Awaitable[bytes | None]]
_Write = Callable[[bytes], Awaitable[None]]


class GrpcConnection:
    """One end of a Transfer stream.

    A pump task reads and assembles frames, a writer task sends queued messages: cancelling a caller of `send` or `recv`
    therefore never cancels an operation of the stream, which would end it.
    """

    scheme = "grpc"
    preferred_payload_bytes = CHUNK_BYTES

    def __init__(
        self, read: _Read, write: _Write, shut_down: Callable[[bool], Awaitable[None]], *, is_peer_known: bool
    ) -> None:
        """Start the tasks.

        Args:
            read: Returns the next message, None at the end of the stream.
            write: Sends a message.
            shut_down: Ends the stream; the argument says whether the peer gets time to take what was sent.
            is_peer_known: Whether payloads of every size are taken before `trust_peer`.
        """
        self._read = read
        self._write = write
        self._shut_down = shut_down
        self._is_peer_known = is_peer_known
        keep_freed_memory()
        self._pool = BufferPool()
        self._received = FrameQueue()
        self._received_budget = ByteBudget(IN_FLIGHT_BYTES)
        self._outbox: asyncio.Queue[tuple[list[bytes], int] | None] = asyncio.Queue()
        self._outbox_budget = ByteBudget(IN_FLIGHT_BYTES)
        self._end: ConnectionClosed | None = None
        self._ending: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._pump = loop.create_task(self._run_pump())
        self._writer = loop.create_task(self._run_writer())

    @property
    def is_closed(self) -> bool:
        """Whether `send` would raise."""
        return self._end is not None

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        """See `Connection.reserve`. The memory is not the stream's: gRPC takes copies of everything."""
        return self.reserve_now(num_bytes)

    def reserve_now(self, num_bytes: int) -> PayloadBuffer:
        """See `Connection.reserve_now`."""
        if self._end is not None:
            raise fresh(self._end)
        memory = self._pool.take(num_bytes)
        return PayloadBuffer(memoryview(memory)[:num_bytes], self, on_release=lambda: self._pool.give(memory))

    async def send(self, frame: Frame) -> None:
        """See `Connection.send`."""
        size = len(frame.payload) + HEADER_BYTES
        await self._outbox_budget.acquire(size)
        if self._end is not None:
            raise fresh(self._end)
        header, payload = encode_header(frame.header), frame.payload
        messages = []
        for start in range(0, max(len(payload), 1), CHUNK_BYTES):
            part = Part(
                b"" if start else header, payload[start : start + CHUNK_BYTES], start + CHUNK_BYTES < len(payload)
            )
            messages.append(encode_part(part))
        self._outbox.put_nowait((messages, size))
        if frame.buffer is not None and frame.buffer.owner is self:
            frame.buffer.release()  # every message is a copy

    def trust_peer(self) -> None:
        """See `Connection.trust_peer`."""
        self._is_peer_known = True

    async def recv(self) -> Frame:
        """See `Connection.recv`."""
        return await self._received.get()

    async def close(self) -> None:
        """See `Connection.close`."""
        if self._end is None:
            self._finish(ConnectionClosed("closed here"))
            self._outbox.put_nowait(None)
            await asyncio.wait([self._writer], timeout=CLOSE_TIMEOUT_S)
            self._begin_ending(is_graceful=True)
        self._drop_unread()
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def abort(self) -> None:
        """See `Connection.abort`."""
        self._finish(ConnectionClosed("aborted here"))
        self._drop_unread()
        self._begin_ending(is_graceful=False)

    def _finish(self, error: TransferError) -> None:
        if self._end is None:
            self._end = ConnectionClosed(str(error))
        self._received.close(error)
        self._received_budget.close(self._end)
        self._outbox_budget.close(self._end)
        self._pool.close()

    def _drop_unread(self) -> None:
        # They name this connection as theirs, so that neither would go before the next full collection.
        self._received.close(ConnectionClosed("closed here"), drop=True)

    def _begin_ending(self, *, is_graceful: bool) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._stop(is_graceful))

    async def _stop(self, is_graceful: bool) -> None:
        self._writer.cancel()
        try:
            await self._shut_down(is_graceful)
        finally:
            self._pump.cancel()
            await asyncio.wait([self._pump, self._writer])
            # A cancelled task keeps the frames in which it was, and so this connection and what it was reading.
            del self._pump, self._writer

    async def _run_writer(self) -> None:
        while (item := await self._outbox.get()) is not None:
            messages, size = item
            try:
                for message in messages:
                    await self._write(message)
            except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                self.lose(f"writing failed: {describe(error)}")
                return
            self._outbox_budget.release(size)

    async def _run_pump(self) -> None:
        try:
            while (frame := await self._read_frame()) is not None:
                self._received.put(frame)
            self.lose("closed by the peer")
        except FrameError as error:
            self._finish(error)
            self._begin_ending(is_graceful=False)
        except ConnectionClosed as error:
            self.lose(str(error))
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.lose(describe(error))

    def lose(self, reason: str) -> None:
        """Note that the stream has ended; frames that have arrived can still be read."""
        self._finish(ConnectionClosed(reason))
        self._begin_ending(is_graceful=False)

    async def _read_frame(self) -> Frame | None:
        message = await self._read()
        if message is None:
            return None
        part = decode_part(message)
        header = decode_header(part.header)
        if not self._is_peer_known:
            check_greeting(header)
        size = header.payload_bytes + HEADER_BYTES
        await self._received_budget.acquire(size)
        try:
            payload = part.payload if not part.more else await self._assemble(header, part.payload)
            if len(payload) != header.payload_bytes:
                raise FrameError(f"{len(payload)} payload bytes came for {header.payload_bytes}")
        except BaseException:
            self._received_budget.release(size)
            raise
        return Frame(header, payload, on_release=lambda: self._received_budget.release(size))

    async def _assemble(self, header: FrameHeader, first: memoryview) -> memoryview:
        # Grows with what comes: what the header says is no reason to set memory aside.
        payload, chunk, more = bytearray(), first, True
        while True:
            if len(payload) + len(chunk) > header.payload_bytes or (more and not len(chunk)):
                raise FrameError("a payload is longer than its header says, or has an empty part")
            payload += chunk
            if not more:
                return memoryview(payload)
            message = await self._read()
            if message is None:
                raise ConnectionClosed("the stream ended inside a payload")
            part = decode_part(message)
            if part.header:
                raise FrameError("a frame began inside another one's payload")
            chunk, more = part.payload, part.more


def describe(error: Exception) -> str:
    """Say what gRPC raised, in one line."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"
