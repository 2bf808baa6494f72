"""Which workers there are, as they told us: registrations, keep-alives, incarnations, and whether tiers fit together.

Pure but for its clock; `registry_servicer.py` feeds it from RPCs, `pool.py` opens sessions to what it lists.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from engine.clock import Clock
from engine.types import Incarnation, WorkerId
from engine.worker_types import WorkerInfo, WorkerRole
from kvrelay.errors import InvalidRequest, LayoutMismatch, NameTaken

_log = structlog.get_logger(__name__)

MISSED_KEEP_ALIVES = 3
"""A registration ends after this many missed keep-alives."""


@dataclass(slots=True)
class _Entry:
    info: WorkerInfo
    last_seen: float
    is_draining: bool = False
    is_stalled: bool = False


class WorkerRegistry:
    """All registered workers. One event loop.

    Invariants: one entry per worker id; any prefill and any decode worker listed have convertible layouts of one model.
    """

    def __init__(
        self, *, model_name: str, tokenizer_vocab_size: int, keep_alive_interval_s: float, clock: Clock
    ) -> None:
        self._model_name = model_name
        self._tokenizer_vocab_size = tokenizer_vocab_size
        self._clock = clock
        self._entries: dict[WorkerId, _Entry] = {}
        self._listeners: list[Callable[[], None]] = []
        self._is_connected: Callable[[WorkerId], bool] = lambda worker_id: False
        self._last_check = clock.now()
        self.keep_alive_interval_s = keep_alive_interval_s

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every change; it reads what it needs from the registry and must not wait."""
        self._listeners.append(listener)

    def ask_for_connections(self, is_connected: Callable[[WorkerId], bool]) -> None:
        """Use `is_connected` to tell a worker that lives from one whose process is gone."""
        self._is_connected = is_connected

    def register(self, info: WorkerInfo) -> None:
        """Make a worker known, or replace a process that is gone under its id (a restart has a new incarnation).

        Raises:
            InvalidRequest: a field is unusable.
            NameTaken: another process lives under the id.
            LayoutMismatch: its model or KV layout does not fit the cluster.
        """
        _check_fields(info)
        self._check_fits(info)
        known = self._entries.get(info.worker_id)
        is_other = known is not None and known.info.incarnation != info.incarnation
        if known is not None and is_other and self._is_connected(info.worker_id):
            raise NameTaken(
                f"worker {info.worker_id} runs already, at {known.info.address}; give this one another --worker-id, or"
                " stop the other one"
            )
        self._entries[info.worker_id] = _Entry(info, self._clock.now())
        if known is None or known.info != info or known.is_draining:
            _log.info(
                "worker.registered",
                worker_id=info.worker_id,
                incarnation=info.incarnation,
                worker_role=info.role.value,
                address=info.address,
                num_blocks=info.num_blocks,
                is_restart=known is not None and known.info.incarnation != info.incarnation,
            )
            if info.vocab_size < self._tokenizer_vocab_size:
                # Such models are served: only prompts with one of those tokens are refused.
                _log.warning(
                    "worker.vocab_below_tokenizers",
                    worker_id=info.worker_id,
                    vocab_size=info.vocab_size,
                    tokenizer_vocab_size=self._tokenizer_vocab_size,
                )
            self._changed()

    def keep_alive(
        self, worker_id: WorkerId, incarnation: Incarnation, *, is_draining: bool, is_stalled: bool = False
    ) -> bool:
        """Renew a registration; False asks the worker to register (again)."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.info.incarnation != incarnation:
            return False
        entry.last_seen = self._clock.now()
        if entry.is_draining != is_draining:
            entry.is_draining = is_draining
            _log.info("worker.drain_changed", worker_id=worker_id, is_draining=is_draining)
            self._changed()
        if entry.is_stalled != is_stalled:
            entry.is_stalled = is_stalled
            _log.warning("worker.stall_changed", worker_id=worker_id, is_stalled=is_stalled)
            self._changed()
        return True

    def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> bool:
        """Forget a worker; False: it was not known, or another incarnation is."""
        entry = self._entries.get(worker_id)
        if entry is None or entry.info.incarnation != incarnation:
            return False
        del self._entries[worker_id]
        _log.info("worker.deregistered", worker_id=worker_id)
        self._changed()
        return True

    def expire(self) -> tuple[WorkerId, ...]:
        """Forget workers that missed their keep-alives; call it about every keep-alive interval.

        Time in which this process itself stood still counts for nobody: the keep-alives of that time may wait in a
        socket.
        """
        now = self._clock.now()
        stalled = max(0.0, now - self._last_check - 2 * self.keep_alive_interval_s)
        self._last_check = now
        for entry in self._entries.values():
            entry.last_seen += stalled
        oldest = now - MISSED_KEEP_ALIVES * self.keep_alive_interval_s
        expired = tuple(worker_id for worker_id, entry in self._entries.items() if entry.last_seen < oldest)
        for worker_id in expired:
            del self._entries[worker_id]
            _log.warning("worker.expired", worker_id=worker_id)
        if expired:
            self._changed()
        return expired

    def workers(self, role: WorkerRole | None = None) -> tuple[WorkerInfo, ...]:
        """Return the registered workers of a tier (None: of both), sorted by id."""
        infos = (entry.info for entry in self._entries.values())
        return tuple(sorted((info for info in infos if role in (None, info.role)), key=lambda info: info.worker_id))

    def is_stalled(self, worker_id: WorkerId) -> bool:
        """Whether the worker said that its engine hangs."""
        entry = self._entries.get(worker_id)
        return entry is not None and entry.is_stalled

    def is_draining(self, worker_id: WorkerId) -> bool:
        """Whether the worker said that it takes no new requests."""
        entry = self._entries.get(worker_id)
        return entry is not None and entry.is_draining

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _check_fits(self, info: WorkerInfo) -> None:
        if info.model_name != self._model_name:
            raise LayoutMismatch(f"this gateway serves {self._model_name!r}, not {info.model_name!r}")
        for other in self.workers():
            if other.worker_id == info.worker_id:
                continue
            try:
                if other.role is WorkerRole.DECODE:
                    other.layout.check_convertible(info.layout)
                else:
                    info.layout.check_convertible(other.layout)
                if other.vocab_size != info.vocab_size:
                    raise LayoutMismatch(f"vocab_size differs: {info.vocab_size} and {other.vocab_size}")
            except LayoutMismatch as error:
                raise LayoutMismatch(
                    f"{info.role} worker {info.worker_id} does not fit {other.role} worker {other.worker_id}: {error}"
                ) from error


def _check_fields(info: WorkerInfo) -> None:
    if not info.worker_id or len(info.worker_id) > 256:
        raise InvalidRequest("worker_id", "must have 1 to 256 characters")
    if info.incarnation == 0:
        raise InvalidRequest("incarnation", "must not be 0")
    host, separator, port = info.address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest("address", f"must be host:port, not {info.address!r}")
    if host in ("0.0.0.0", "[::]", "::"):
        raise InvalidRequest("address", f"{info.address} can be listened on but not dialled; name the host")
    for name in ("num_blocks", "max_num_seqs", "context_length", "vocab_size"):
        if getattr(info, name) < 1:
            raise InvalidRequest(name, "must be at least 1")
