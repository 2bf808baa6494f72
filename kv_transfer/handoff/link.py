"""The exporter's connection to one decode worker, shared by all of its hand-offs.

Connects once, says HELLO, and routes replies to the export they belong to. When the connection ends, every export on it
learns why. It makes no decision about a hand-off.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from engine.types import Epoch, LeaseId
from engine.worker_types import TransferPeer
from kv_transfer.frame import Frame, FrameError, FrameKind, seal, verify
from kv_transfer.handoff.messages import Hello, Rejection
from kv_transfer.transports.port import Connection
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError, LayoutMismatch, PeerUnavailable

ReplyHandler = Callable[[Frame], None]
LossHandler = Callable[[EngineError], None]

_log = structlog.get_logger(__name__)


async def open_connection(
    registry: TransportRegistry, peer: TransferPeer, hello: Hello, scheme: str | None, timeout_s: float
) -> Connection:
    """Connect to a decode worker and exchange HELLO.

    Raises:
        PeerUnavailable: It cannot be reached, does not answer, or is another incarnation than announced.
        LayoutMismatch: It refuses this worker's KV layout, or has another one than announced.
    """
    connection = await registry.connect(peer.addresses, scheme, timeout_s)
    try:
        async with asyncio.timeout(timeout_s):
            greeting = seal(FrameKind.HELLO, incarnation=peer.incarnation, payload=hello.encode())
            await connection.send(greeting)
            frame = await connection.recv()
        try:
            _check_answer(frame, peer)
        finally:
            frame.release()
    except BaseException as error:
        connection.abort()
        await connection.close()
        if isinstance(error, TimeoutError):
            raise PeerUnavailable(f"worker {peer.worker_id} did not answer within {timeout_s:g} s") from error
        raise
    return connection


def _check_answer(frame: Frame, peer: TransferPeer) -> None:
    verify(frame)
    if frame.header.kind is FrameKind.REJECTED:
        raise Rejection.decode(frame.payload).to_error()
    if frame.header.kind is not FrameKind.HELLO:
        raise FrameError(f"HELLO was answered with {frame.header.kind.name}")
    answer = Hello.decode(frame.payload)
    if (answer.worker_id, answer.incarnation) != (peer.worker_id, peer.incarnation):
        raise PeerUnavailable(f"the address of worker {peer.worker_id} leads to another process")
    if answer.layout != peer.layout:
        raise LayoutMismatch(f"worker {peer.worker_id} has another KV layout than it announced")


class PeerLink:
    """One live connection and the exports on it.

    Invariant: a handler is listed from `attach` until `detach`, and told at most once that the link is lost.
    """

    def __init__(self, peer: TransferPeer, connection: Connection) -> None:
        self.peer = peer
        self.connection = connection
        self._handlers: dict[tuple[LeaseId, Epoch], tuple[ReplyHandler, LossHandler]] = {}
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_closed(self) -> bool:
        """Whether new exports need another link."""
        return self._reader.done() or self.connection.is_closed

    def attach(self, lease_id: LeaseId, epoch: Epoch, on_reply: ReplyHandler, on_lost: LossHandler) -> None:
        """Route the replies of one hand-off.

        Raises:
            PeerUnavailable: The link is closed, or this hand-off already runs on it.
        """
        if self.is_closed:
            raise PeerUnavailable(f"the connection to worker {self.peer.worker_id} is closed")
        if (lease_id, epoch) in self._handlers:
            raise PeerUnavailable(f"lease {lease_id:x} epoch {epoch} is already being sent")
        self._handlers[lease_id, epoch] = (on_reply, on_lost)

    def detach(self, lease_id: LeaseId, epoch: Epoch) -> None:
        """Stop routing; later replies are dropped."""
        self._handlers.pop((lease_id, epoch), None)

    async def close(self, reason: EngineError) -> None:
        """Tell the exports that still run, and close the connection."""
        self._lose(reason)
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self.connection.close()

    async def _read(self) -> None:
        reason: EngineError = PeerUnavailable("the link was closed")
        try:
            while True:
                frame = await self.connection.recv()
                try:
                    self._route(frame)
                finally:
                    frame.release()
        except EngineError as error:
            reason = PeerUnavailable(f"the connection to worker {self.peer.worker_id} was lost: {error}")
            _log.info("kv_transfer.link_lost", peer=self.peer.worker_id, error=str(error))
        finally:
            self.connection.abort()
            self._lose(reason)

    def _route(self, frame: Frame) -> None:
        verify(frame)
        header = frame.header
        if header.kind is FrameKind.REJECTED and header.lease_id == 0:
            raise Rejection.decode(frame.payload).to_error()
        handlers = self._handlers.get((header.lease_id, header.epoch))
        if handlers is not None:
            handlers[0](frame)

    def _lose(self, reason: EngineError) -> None:
        handlers, self._handlers = self._handlers, {}
        for _, on_lost in handlers.values():
            on_lost(reason)


def links_to_drop(links: Sequence[PeerLink], peers: Sequence[TransferPeer]) -> list[PeerLink]:
    """Return the links whose worker is gone, restarted, or announces another layout."""
    announced = {(peer.worker_id, peer.incarnation): peer for peer in peers}
    dropped = []
    for link in links:
        peer = announced.get((link.peer.worker_id, link.peer.incarnation))
        if peer is None or peer.layout != link.peer.layout:
            dropped.append(link)
    return dropped
