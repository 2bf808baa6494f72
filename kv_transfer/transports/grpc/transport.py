"""The gRPC transport: frames over one bidirectional `KvTransferService.Transfer` stream. Works wherever gRPC does.

Decode workers add `GrpcTransferServicer` to their server; prefill workers connect with a channel per peer. HTTP/2 flow
control carries the backpressure; what waits on either side is bounded. A connection: `connection.py`.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio

from kv_transfer.transports.address import Address, parse_address
from kv_transfer.transports.grpc.connection import CLOSE_TIMEOUT_S, GrpcConnection, describe
from kv_transfer.transports.handlers import HandlerTasks
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionHandler
from kvrelay.errors import EngineError, PeerUnavailable

SERVICE: Final = "kvrelay.v1.KvTransferService"
METHOD: Final = f"/{SERVICE}/Transfer"

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

        connection = GrpcConnection(read, context.write, shut_down, is_peer_known=False)
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
                raise PeerUnavailable(f"cannot connect to {address}: {describe(error)}") from error
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

        return GrpcConnection(read, call.write, shut_down, is_peer_known=True)
