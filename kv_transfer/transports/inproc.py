"""The in-process transport: two workers in one event loop hand each other memory.

For the one-process mode and for tests. A payload is copied at most once (not at all when it was reserved), and the
bytes in flight are bounded until the receiver releases them.
"""

import itertools
import secrets

from kv_transfer.frame import HEADER_BYTES, Frame, PayloadBuffer
from kv_transfer.transports.address import parse_address
from kv_transfer.transports.flow import BufferPool, ByteBudget, FrameQueue
from kv_transfer.transports.handlers import HandlerTasks
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionClosed, ConnectionHandler
from kvrelay.errors import PeerUnavailable

IN_FLIGHT_BYTES = 32 << 20
PREFERRED_PAYLOAD_BYTES = 2 << 20

_PROCESS_TOKEN = secrets.token_hex(8)
_names = itertools.count(1)
_listeners: dict[str, "InprocListener"] = {}


class InprocConnection:
    """One end of an in-process pair."""

    scheme = "inproc"
    preferred_payload_bytes = PREFERRED_PAYLOAD_BYTES

    def __init__(self) -> None:
        self._peer: InprocConnection | None = None
        self._received = FrameQueue()
        self._pool = BufferPool()
        self._budget = ByteBudget(IN_FLIGHT_BYTES)
        """Bytes this end has sent and the peer has not released."""

    @property
    def is_closed(self) -> bool:
        """Whether `send` would raise."""
        return self._peer is None

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        """See `Connection.reserve`."""
        await self._budget.acquire(num_bytes + HEADER_BYTES)
        return self._buffer(num_bytes)

    def reserve_now(self, num_bytes: int) -> PayloadBuffer | None:
        """See `Connection.reserve_now`."""
        return self._buffer(num_bytes) if self._budget.acquire_now(num_bytes + HEADER_BYTES) else None

    def _buffer(self, num_bytes: int) -> PayloadBuffer:
        memory = self._pool.take(num_bytes)

        def give_back() -> None:
            self._pool.give(memory)
            self._budget.release(num_bytes + HEADER_BYTES)

        return PayloadBuffer(memoryview(memory)[:num_bytes], self, on_release=give_back)

    async def send(self, frame: Frame) -> None:
        """See `Connection.send`."""
        buffer = frame.buffer
        if buffer is None or buffer.owner is not self:
            buffer = await self.reserve(len(frame.payload))
            buffer.view[:] = frame.payload
        if self._peer is None:
            buffer.release()
            raise ConnectionClosed("the in-process connection is closed")
        payload = buffer.view.toreadonly()
        # The peer's release is what returns the memory.
        self._peer._received.put(Frame(frame.header, payload, on_release=buffer.detach()))

    def trust_peer(self) -> None:
        """See `Connection.trust_peer`. Nothing to do: memory is the sender's, and it is this process."""

    async def recv(self) -> Frame:
        """See `Connection.recv`."""
        return await self._received.get()

    async def close(self) -> None:
        """See `Connection.close`. Frames already sent stay readable for the peer."""
        self._end(drop=False)

    def abort(self) -> None:
        """See `Connection.abort`."""
        self._end(drop=True)

    def _end(self, *, drop: bool) -> None:
        peer, self._peer = self._peer, None
        self._received.close(ConnectionClosed("closed here"), drop=True)
        self._budget.close(ConnectionClosed("closed here"))
        self._pool.close()
        if peer is not None:
            peer._peer = None
            peer._received.close(ConnectionClosed("closed by the peer"), drop=drop)
            peer._budget.close(ConnectionClosed("closed by the peer"))
            peer._pool.close()


def connection_pair() -> tuple[InprocConnection, InprocConnection]:
    """Return two connected ends."""
    left, right = InprocConnection(), InprocConnection()
    left._peer, right._peer = right, left
    return left, right


class InprocListener:
    """Accepts connections made with its address in this process."""

    def __init__(self, handler: ConnectionHandler) -> None:
        self._name = str(next(_names))
        self._tasks = HandlerTasks(handler)
        _listeners[self._name] = self

    @property
    def address(self) -> str:
        """`inproc://<process token>/<name>`."""
        return f"inproc://{_PROCESS_TOKEN}/{self._name}"

    def accept(self) -> InprocConnection:
        """Return the client's end of a new connection; the handler gets the other."""
        client, server = connection_pair()
        self._tasks.start(server)
        return client

    async def close(self) -> None:
        """See `Listener.close`."""
        _listeners.pop(self._name, None)
        await self._tasks.close()


class InprocTransport:
    """See the module."""

    scheme = "inproc"

    def can_reach(self, address: str) -> bool:
        """Whether the address was made in this process."""
        return parse_address(address).location.startswith(f"{_PROCESS_TOKEN}/")

    async def listen(self, handler: ConnectionHandler) -> InprocListener:
        """See `Transport.listen`."""
        return InprocListener(handler)

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        """See `Transport.connect`. Needs no waiting: the listener is there or it is not."""
        token, name = parse_address(address).host_and_path
        listener = _listeners.get(name) if token == _PROCESS_TOKEN else None
        if listener is None:
            raise PeerUnavailable(f"nobody listens on {address} in this process")
        return listener.accept()
