"""Drives the sending side of hand-offs on a prefill worker: finished blocks in, frames out.

Owns the connections to decode workers (one per worker, shared by all hand-offs) and the measured costs that decide
between streaming and one frame set. It reads blocks and never frees one. One export: `export.py`.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine.clock import Clock, SystemClock
from engine.types import Incarnation, WorkerId
from engine.worker_types import KvHandle, TransferPeer
from kv_transfer.blocks import BlockSource
from kv_transfer.handoff.export import Export
from kv_transfer.handoff.link import PeerLink, links_to_drop, open_connection
from kv_transfer.handoff.messages import Hello
from kv_transfer.handoff.pace import FrameCost
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError, LayoutMismatch, PeerUnavailable

DEFAULT_ACCEPT_TIMEOUT_S = 10.0
DEFAULT_COMMIT_TIMEOUT_S = 30.0


class Exporter:
    """The prefill worker's end of every hand-off. All methods belong to one event loop.

    Invariants: at most one live link per worker; an export only ever uses a link to the worker and incarnation that its
    handle names.
    """

    def __init__(
        self,
        source: BlockSource,
        worker_id: WorkerId,
        incarnation: Incarnation,
        transports: TransportRegistry,
        *,
        scheme: str | None = None,
        clock: Clock | None = None,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        accept_timeout_s: float = DEFAULT_ACCEPT_TIMEOUT_S,
        commit_timeout_s: float = DEFAULT_COMMIT_TIMEOUT_S,
    ) -> None:
        """Make an exporter.

        Args:
            source: Where blocks are read.
            worker_id: This worker.
            incarnation: This process.
            transports: What this process can use.
            scheme: The only transport to use; None = the best common one (`auto`).
            clock: Time for stats and pacing; defaults to the system clock.
            connect_timeout_s: Limit for one attempt to connect, and for its HELLO.
            accept_timeout_s: Limit for decode's answer to a claim.
            commit_timeout_s: Limit for `Export.finish`.
        """
        self._source = source
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._transports = transports
        self._scheme = scheme
        self._clock = clock or SystemClock()
        self._connect_timeout_s = connect_timeout_s
        self._accept_timeout_s = accept_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._peers: dict[WorkerId, TransferPeer] = {}
        self._links: dict[WorkerId, asyncio.Task[PeerLink]] = {}
        self._costs: dict[WorkerId, FrameCost] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def update_peers(self, peers: Sequence[TransferPeer]) -> None:
        """Take over what the registry announces: connect to new workers ahead of use, drop those that are gone.

        Exports to a worker that is gone or has restarted fail with `PeerUnavailable`.
        """
        live = [task.result() for task in self._links.values() if _is_connected(task)]
        for link in links_to_drop(live, peers):
            self._drop(link.peer.worker_id, PeerUnavailable(f"worker {link.peer.worker_id} is gone or was restarted"))
        changed = {peer.worker_id for peer in peers if self._peers.get(peer.worker_id) != peer}
        self._peers = {peer.worker_id: peer for peer in peers}
        for worker_id in [known for known in self._links if known not in self._peers]:
            self._drop(worker_id, PeerUnavailable(f"worker {worker_id} is gone"))
        for worker_id in changed:
            task = self._links.get(worker_id)
            if task is not None and not _is_connected(task):
                self._drop(worker_id, PeerUnavailable(f"worker {worker_id} announces another address"))
            self._link_task(self._peers[worker_id])

    def transport_of(self, worker_id: WorkerId) -> str | None:
        """Return the scheme of the live connection to a worker; None = not connected now."""
        task = self._links.get(worker_id)
        return task.result().connection.scheme if task is not None and _is_connected(task) else None

    def begin(
        self,
        handle: KvHandle,
        *,
        is_layerwise: bool | None = None,
        on_failed: Callable[[EngineError], None] | None = None,
    ) -> Export:
        """Start a hand-off: connect if needed and claim the reservation, in the background.

        Args:
            handle: What decode issued.
            is_layerwise: Whether each layer leaves as it becomes ready, or all leave at the end; None = layers leave in
                frames of a size that measured costs decide.
            on_failed: Called on the event loop when the hand-off fails, so that compute can be stopped early. `finish`
                raises the same error.

        Raises:
            PeerUnavailable: The worker is not announced, or was restarted since it issued the handle.
            LayoutMismatch: The handle is for another layout than announced, or that cannot be converted to.
        """
        peer = self._peers.get(handle.worker_id)
        if peer is None:
            raise PeerUnavailable(f"decode worker {handle.worker_id} is not known here")
        if peer.incarnation != handle.incarnation:
            raise PeerUnavailable(f"decode worker {handle.worker_id} was restarted since it made the reservation")
        if peer.layout.fingerprint != handle.layout_fingerprint:
            raise LayoutMismatch(f"the handle is for another KV layout than worker {handle.worker_id} announces")
        peer.layout.check_convertible(self._source.layout)
        return Export(
            handle,
            self._source,
            self._source.layout.shared_with(peer.layout),
            lambda: self._link(peer),
            self._costs.setdefault(handle.worker_id, FrameCost()),
            self._clock,
            is_layerwise=is_layerwise,
            accept_timeout_s=self._accept_timeout_s,
            commit_timeout_s=self._commit_timeout_s,
            on_failed=on_failed,
        )

    async def close(self) -> None:
        """Fail what still runs and close every connection."""
        for worker_id in list(self._links):
            self._drop(worker_id, PeerUnavailable("the prefill worker shuts down"))
        self._peers = {}
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _link(self, peer: TransferPeer) -> PeerLink:
        # Several exports may wait for one attempt to connect; the cancellation of one must not end it.
        task = self._link_task(peer)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if task.cancelled() and (waiter is None or not waiter.cancelling()):
                raise PeerUnavailable(f"decode worker {peer.worker_id} is gone") from None
            raise

    def _link_task(self, peer: TransferPeer) -> asyncio.Task[PeerLink]:
        task = self._links.get(peer.worker_id)
        if task is None or (task.done() and not _is_connected(task)):
            task = asyncio.get_running_loop().create_task(self._open(peer))
            task.add_done_callback(_retrieve)
            self._links[peer.worker_id] = task
        return task

    async def _open(self, peer: TransferPeer) -> PeerLink:
        # Of what this worker has, decode is told of and gets those layers that it has as well.
        hello = Hello(self._worker_id, self._incarnation, self._source.layout.shared_with(peer.layout))
        connection = await open_connection(self._transports, peer, hello, self._scheme, self._connect_timeout_s)
        return PeerLink(peer, connection)

    def _drop(self, worker_id: WorkerId, reason: EngineError) -> None:
        task = self._links.pop(worker_id, None)
        if task is None:
            return
        closing = asyncio.get_running_loop().create_task(_close_link(task, reason))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _close_link(task: asyncio.Task[PeerLink], reason: EngineError) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and task.exception() is None:
        await task.result().close(reason)


def _is_connected(task: asyncio.Task[PeerLink]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and not task.result().is_closed


def _retrieve(task: asyncio.Task[PeerLink]) -> None:
    """Mark a failed attempt's error as seen: whoever needs the link makes the next attempt and gets its error."""
    if not task.cancelled():
        task.exception()
