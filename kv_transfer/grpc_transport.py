"""The gRPC transport: frames over one bidirectional `KvTransferService.Transfer` stream. Works wherever gRPC does.

Decode workers add `GrpcTransferServicer` to their server; prefill workers connect with a channel per peer. HTTP/2 flow
control carries the backpressure; what waits on either side is bounded. Messages: `grpc_wire.py`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import grpc
import grpc.aio

from engine.errors import EngineError, PeerUnavailable
from kv_transfer.address import Address, parse_address
from kv_transfer.flow import BufferPool, ByteBudget, FrameQueue
from kv_transfer.frame import HEADER_BYTES, Frame, FrameError, FrameHeader, PayloadBuffer, decode_header, encode_header
from kv_transfer.grpc_wire import Part, decode_part, encode_part
from kv_transfer.heap import keep_freed_memory
from kv_transfer.serving import HandlerTasks
from kv_transfer.transport import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionClosed, ConnectionHandler

SERVICE: Final = "kvrelay.v1.KvTransferService"
METHOD: Final = f"/{SERVICE}/Transfer"
CHUNK_BYTES: Final = 1 << 20
"""Most payload bytes in one message."""
IN_FLIGHT_BYTES: Final = 8 << 20
"""Bytes that may wait on each side, outside gRPC's own buffers."""
CLOSE_TIMEOUT_S: Final = 2.0

ChannelOptions = Sequence[tuple[str, int | str]]
DEFAULT_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # A connection of its own per peer: KV must not queue behind the control streams of a shared one.
    ("grpc.use_local_subchannel_pool", 1),
)
DEFAULT_SERVER_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    *DEFAULT_OPTIONS[:-1],
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    # A peer that measures bandwidth pings as it reads: while this side has nothing to send, each would be a strike.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
)

_Read = Callable[[], Awaitable[bytes | None]]
_Write = Callable[[bytes], Awaitable[None]]


class GrpcConnection:
    """One end of a Transfer stream.

    A pump task reads and assembles frames, a writer task sends queued messages: cancelling a caller of `send` or `recv`
    therefore never cancels an operation of the stream, which would end it.
    """

    scheme = "grpc"
    preferred_payload_bytes = CHUNK_BYTES

    def __init__(self, read: _Read, write: _Write, shut_down: Callable[[bool], Awaitable[None]]) -> None:
        """Start the tasks.

        Args:
            read: Returns the next message, None at the end of the stream.
            write: Sends a message.
            shut_down: Ends the stream; the argument says whether the peer gets time to take what was sent.
        """
        self._read = read
        self._write = write
        self._shut_down = shut_down
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
            raise self._end
        memory = self._pool.take(num_bytes)
        return PayloadBuffer(memoryview(memory)[:num_bytes], self, on_release=lambda: self._pool.give(memory))

    async def send(self, frame: Frame) -> None:
        """See `Connection.send`."""
        size = len(frame.payload) + HEADER_BYTES
        await self._outbox_budget.acquire(size)
        if self._end is not None:
            raise self._end
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

    async def recv(self) -> Frame:
        """See `Connection.recv`."""
        return await self._received.get()

    async def close(self) -> None:
        """See `Connection.close`."""
        if self._end is None:
            self._finish(ConnectionClosed("closed here"), drop=True)
            self._outbox.put_nowait(None)
            await asyncio.wait([self._writer], timeout=CLOSE_TIMEOUT_S)
            self._begin_ending(is_graceful=True)
        if self._ending is not None:
            await asyncio.shield(self._ending)

    def abort(self) -> None:
        """See `Connection.abort`."""
        self._finish(ConnectionClosed("aborted here"), drop=True)
        self._begin_ending(is_graceful=False)

    def _finish(self, error: EngineError, *, drop: bool) -> None:
        if self._end is None:
            self._end = error if isinstance(error, ConnectionClosed) else ConnectionClosed(str(error))
        self._received.close(error, drop=drop)
        self._received_budget.close(self._end)
        self._outbox_budget.close(self._end)

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

    async def _run_writer(self) -> None:
        while (item := await self._outbox.get()) is not None:
            messages, size = item
            try:
                for message in messages:
                    await self._write(message)
            except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
                self.lose(f"writing failed: {_describe(error)}")
                return
            self._outbox_budget.release(size)

    async def _run_pump(self) -> None:
        try:
            while (frame := await self._read_frame()) is not None:
                self._received.put(frame)
            self.lose("closed by the peer")
        except FrameError as error:
            self._finish(error, drop=False)
            self._begin_ending(is_graceful=False)
        except ConnectionClosed:
            return
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            self.lose(_describe(error))

    def lose(self, reason: str) -> None:
        """Note that the stream has ended; frames that have arrived can still be read."""
        self._finish(ConnectionClosed(reason), drop=False)
        self._begin_ending(is_graceful=False)

    async def _read_frame(self) -> Frame | None:
        message = await self._read()
        if message is None:
            return None
        part = decode_part(message)
        header = decode_header(part.header)
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
        payload = memoryview(bytearray(header.payload_bytes))
        position, chunk, more = 0, first, True
        while True:
            end = position + len(chunk)
            if end > len(payload) or (more and not len(chunk)):
                raise FrameError("a payload is longer than its header says, or has an empty part")
            payload[position:end] = chunk
            position = end
            if not more:
                return payload[:position]
            message = await self._read()
            if message is None:
                raise ConnectionClosed("the stream ended inside a payload")
            part = decode_part(message)
            if part.header:
                raise FrameError("a frame began inside another one's payload")
            chunk, more = part.payload, part.more


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return f"{type(error).__name__}: {error}"


class GrpcTransferServicer:
    """Serves `KvTransferService` on an existing server: each Transfer stream is a connection for the handler."""

    def __init__(self, handler: ConnectionHandler) -> None:
        self._tasks = HandlerTasks(handler)
        self._is_closed = False

    def add_to_server(self, server: grpc.aio.Server) -> None:
        """Register the service; to be called before the server starts."""
        method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self.Transfer, request_deserializer=None, response_serializer=None
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Transfer": method}),))

    async def Transfer(self, request_iterator: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        """Serve one stream until its connection ends."""
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker takes no more KV")
        # The client waits for the headers: they say that the service is there.
        await context.send_initial_metadata(())

        async def read() -> bytes | None:
            message: object = await context.read()  # bytes, or grpc.aio.EOF
            return message if isinstance(message, bytes) else None

        async def shut_down(is_graceful: bool) -> None:
            return None

        connection = GrpcConnection(read, context.write, shut_down)
        task = self._tasks.start(connection)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            # The client is gone or the server stops. The handler may still read what has arrived; waiting for its end
            # keeps its clean-up inside the RPC.
            connection.lose("the stream was cancelled")
            await asyncio.wait([task])
            raise

    async def close(self) -> None:
        """Abort every connection and wait for the handlers; later streams are refused."""
        self._is_closed = True
        await self._tasks.close()


class GrpcListener:
    """A server of its own, for workers without one and for tests."""

    def __init__(self, server: grpc.aio.Server, servicer: GrpcTransferServicer, address: str) -> None:
        self._server = server
        self._servicer = servicer
        self._address = address

    @property
    def address(self) -> str:
        """`grpc://<host>:<port>`."""
        return self._address

    async def close(self) -> None:
        """See `Listener.close`."""
        await self._servicer.close()
        await self._server.stop(0)


class GrpcTransport:
    """See the module."""

    scheme = "grpc"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        channel_options: ChannelOptions = DEFAULT_OPTIONS,
        server_options: ChannelOptions = DEFAULT_SERVER_OPTIONS,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """Make a transport.

        Args:
            host: Interface on which `listen` binds a free port.
            channel_options: Arguments of the channels made by `connect`.
            server_options: Arguments of the server made by `listen`.
            credentials: TLS for `connect`; None = plain text.
        """
        self._host = host
        self._channel_options = list(channel_options)
        self._server_options = list(server_options)
        self._credentials = credentials

    def can_reach(self, address: str) -> bool:
        """Whether the address has the right form: gRPC reaches everything else, or finds out by trying."""
        with contextlib.suppress(EngineError):
            return bool(parse_address(address).host_and_port)
        return False

    async def listen(self, handler: ConnectionHandler) -> GrpcListener:
        """See `Transport.listen`. Decode workers use `GrpcTransferServicer` on their own server instead."""
        server = grpc.aio.server(options=self._server_options)
        servicer = GrpcTransferServicer(handler)
        servicer.add_to_server(server)
        try:
            port = server.add_insecure_port(f"{self._host}:0")
        except RuntimeError as error:
            raise PeerUnavailable(f"cannot listen on {self._host}: {error}") from error
        await server.start()
        return GrpcListener(server, servicer, str(Address("grpc", f"{self._host}:{port}")))

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        """See `Transport.connect`."""
        parsed = parse_address(address)
        _ = parsed.host_and_port  # raises for an address of another form
        target = parsed.location
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(target, options=self._channel_options)
        else:
            channel = grpc.aio.secure_channel(target, self._credentials, options=self._channel_options)
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
            METHOD, request_serializer=None, response_deserializer=None
        )()
        try:
            async with asyncio.timeout(timeout_s):
                await call.wait_for_connection()
        except BaseException as error:
            call.cancel()
            await channel.close()
            if isinstance(error, TimeoutError):
                raise PeerUnavailable(f"nobody answered on {address} within {timeout_s:g} s") from error
            if isinstance(error, grpc.aio.AioRpcError):
                raise PeerUnavailable(f"cannot connect to {address}: {_describe(error)}") from error
            raise

        async def read() -> bytes | None:
            message: object = await call.read()  # bytes, or grpc.aio.EOF
            return message if isinstance(message, bytes) else None

        async def shut_down(is_graceful: bool) -> None:
            if is_graceful:
                with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                    await call.done_writing()
                    async with asyncio.timeout(CLOSE_TIMEOUT_S):
                        await call.code()
            call.cancel()
            await channel.close()

        return GrpcConnection(read, call.write, shut_down)
