"""The sessions to all registered workers, kept in step with the registry.

Level-triggered: whenever the registry changes, sessions are opened and closed until the two agree, and prefill workers
are told the new list of decode workers. Owns no decision about requests; `gateway/routing/router.py` chooses among what
is usable here.
"""

import asyncio
from collections.abc import Callable

import structlog

from engine.clock import Clock
from engine.types import WorkerId
from engine.worker_types import TransferPeer, WorkerRole
from gateway.workers.registry import WorkerRegistry
from gateway.workers.session import SessionLimits, WorkerSession

_log = structlog.get_logger(__name__)


class WorkerPool:
    """One session per registered worker. One event loop.

    Invariant: after `reconcile`, the sessions are exactly those of the registry's incarnations.
    """

    def __init__(self, registry: WorkerRegistry, *, clock: Clock, limits: SessionLimits) -> None:
        self._registry = registry
        self._clock = clock
        self._limits = limits
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[], None]] = []
        self._gone_listeners: list[Callable[[WorkerId], None]] = []
        self._changed = asyncio.Event()
        self._is_closed = False
        registry.subscribe(self.reconcile)
        registry.ask_for_connections(self._is_connected)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a session opens, ends, or starts to drain; it must not wait."""
        self._listeners.append(listener)

    def subscribe_gone(self, listener: Callable[[WorkerId], None]) -> None:
        """Call `listener` with each worker that left the registry or came back as another process."""
        self._gone_listeners.append(listener)

    def session(self, worker_id: WorkerId) -> WorkerSession | None:
        """Return the session to a worker, open or not."""
        return self._sessions.get(worker_id)

    def sessions(self) -> tuple[WorkerSession, ...]:
        """Return all sessions, open or not."""
        return tuple(self._sessions.values())

    def usable(self, role: WorkerRole) -> tuple[WorkerSession, ...]:
        """Return the sessions of a tier that new requests may be placed on."""
        return tuple(s for s in self._sessions.values() if s.info.role is role and s.is_usable)

    async def wait_usable(self, role: WorkerRole, timeout_s: float) -> bool:
        """Wait until a worker of the tier is usable; False: none was in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.usable(role):
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def reconcile(self) -> None:
        """Open and close sessions until they match the registry."""
        if self._is_closed:
            return
        wanted = {info.worker_id: info for info in self._registry.workers()}
        for worker_id, session in list(self._sessions.items()):
            if wanted.get(worker_id) != session.info:
                self._close(self._sessions.pop(worker_id))
                for listener in self._gone_listeners:
                    listener(worker_id)
        for worker_id, info in wanted.items():
            if worker_id not in self._sessions:
                self._sessions[worker_id] = WorkerSession(
                    info, clock=self._clock, peers=self._peers, on_change=self._session_changed, limits=self._limits
                )
                self._sessions[worker_id].start()
            session = self._sessions[worker_id]
            session.is_drain_announced = self._registry.is_draining(worker_id)
            session.is_stall_announced = self._registry.is_stalled(worker_id)
            session.announce_peers()
        self._session_changed()

    async def close(self) -> None:
        """End all sessions and wait for them."""
        self._is_closed = True
        for session in self._sessions.values():
            self._close(session)
        self._sessions.clear()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close(self, session: WorkerSession) -> None:
        task = asyncio.get_running_loop().create_task(session.close(), name=f"close session {session.info.worker_id}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _peers(self) -> list[TransferPeer]:
        return [
            TransferPeer(info.worker_id, info.incarnation, info.transfer_addresses, info.layout)
            for info in self._registry.workers(WorkerRole.DECODE)
        ]

    def _is_connected(self, worker_id: WorkerId) -> bool:
        session = self._sessions.get(worker_id)
        return session is not None and session.is_open and not session.is_stalled

    def _session_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()
