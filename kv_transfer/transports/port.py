"""The contract of a byte path between one prefill and one decode worker.

Protocols only. Implementations: `inproc.py`, `kv_transfer/transports/shm/transport.py`,
`kv_transfer/transports/ucx/transport.py`, `kv_transfer/transports/grpc/transport.py`; every one of them passes
`tests/contract/test_transport_contract.py`. A transport moves frames and keeps their order; it does not look into them
beyond the header's bounds, and knows no leases.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol

from kv_transfer.frame import Frame, PayloadBuffer
from kvrelay.errors import PeerUnavailable

DEFAULT_CONNECT_TIMEOUT_S = 5.0


class ConnectionClosed(PeerUnavailable):
    """The connection has ended: closed here, closed by the peer, or lost."""


class Connection(Protocol):
    """One ordered, reliable channel of frames in both directions.

    Belongs to the event loop that made it. Any number of tasks may `reserve` and `send`; at most one may be in `recv`.
    All awaits may be cancelled: a cancelled `send` has sent the frame whole or not at all.
    """

    @property
    def scheme(self) -> str:
        """Scheme of the transport, e.g. `shm`."""
        ...

    @property
    def preferred_payload_bytes(self) -> int:
        """Payload size at which this transport is efficient; `send` takes any size up to `MAX_PAYLOAD_BYTES`."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether `send` would raise."""
        ...

    def reserve_now(self, num_bytes: int) -> PayloadBuffer | None:
        """Like `reserve`, but without waiting: None = no room now, or somebody waits already."""
        ...

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        """Lend writable memory for one payload, waiting in order until there is room.

        Where the transport was given device memory and so was the peer's, it may lend some of that: then the payload
        goes to `PayloadBuffer.device` instead of `view`. The caller owns the memory until the frame that carries it is
        sent, or must `release` it.

        Raises:
            ConnectionClosed: The connection ended before or while waiting.
        """
        ...

    async def send(self, frame: Frame) -> None:
        """Queue one frame, waiting while the peer does not keep up (at most a fixed number of bytes is in flight).

        When it returns, the payload's memory may be reused; a reserved buffer belongs to the transport.

        Raises:
            ConnectionClosed: The connection ended; whether earlier frames arrived is not known.
        """
        ...

    def trust_peer(self) -> None:
        """Take payloads of every size from now on: the peer has said who it is, and it fits.

        Until then a connection that a listener accepted takes frames of up to `MAX_GREETING_BYTES` and no KV, so that
        an unknown peer cannot make it set up memory. One made by `connect` trusts its peer from the start.
        """
        ...

    async def recv(self) -> Frame:
        """Return the next frame. The caller must `release` it.

        Raises:
            ConnectionClosed: The connection ended; frames that arrived before a clean close are returned first.
            FrameError: The peer sent something that is not a frame. The connection is aborted.
        """
        ...

    async def close(self) -> None:
        """Send what is queued (for a bounded time), tell the peer, and end. Safe to call twice."""
        ...

    def abort(self) -> None:
        """End at once; queued frames are dropped and waiting calls raise `ConnectionClosed`. Safe to call twice."""
        ...


ConnectionHandler = Callable[[Connection], Awaitable[None]]
"""Serves one accepted connection; when it returns or raises, the connection is closed."""


class Listener(Protocol):
    """Accepts connections and runs the handler for each in its own task."""

    @property
    def address(self) -> str:
        """The address that peers connect to."""
        ...

    async def close(self) -> None:
        """Stop accepting, abort what is connected and wait until every handler has ended. Safe to call twice."""
        ...


class Transport(Protocol):
    """A way of moving frames."""

    @property
    def scheme(self) -> str:
        """The part of an address before `://`."""
        ...

    def can_reach(self, address: str) -> bool:
        """Whether an address of this scheme is worth trying from here (same process, same host). Sends nothing."""
        ...

    async def listen(self, handler: ConnectionHandler) -> Listener:
        """Start accepting connections.

        Raises:
            PeerUnavailable: The address cannot be bound.
        """
        ...

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        """Open a connection.

        Raises:
            PeerUnavailable: Nobody answers within `timeout_s`, or the peer refuses.
        """
        ...
