"""Handoffs: gives requests KV blocks and a lease, and takes their KV over when it has been verified.

Between engine (whose blocks) and importer (who may write them). The order that matters everywhere: fence the writer
first, free the blocks after.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import structlog

from decode_service.request import DecodeRequest, Phase
from decode_service.reservation_queue import ReservationQueue
from engine.clock import SystemClock
from engine.engine import Engine, Granted
from engine.types import EngineRequest, Epoch, HandoffRecord, LeaseId
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kvrelay.errors import DeviceError, EngineError, LeaseError, LeaseExpired, LeaseUnknown, TransferError
from kvrelay.serving.telemetry import emit_span
from kvrelay.wire.engine.events import Committed, Reserved
from kvrelay.wire.engine.handoff import handoff_record_from_bytes, kv_handle_to_bytes
from worker.tier import WorkerContext

TICK_INTERVAL_S = 0.5
LOOK_AGAIN_S = 0.1
"""How often the queue is looked at while it waits: steps without outputs free the way too, and tell nobody."""

_log = structlog.get_logger(__name__)


class Handoffs:
    """Reservations and hand-offs of one decode worker.

    Invariant: a request has a lease exactly while its phase is RESERVED.

    Args:
        context: The worker.
        max_queued: Most requests that wait for blocks.
        on_committed: Called once per verified hand-off, on the event loop; the engine gets the sequence after it.
        on_failed: Called when a request has ended here with an error; its blocks are free by then.
    """

    def __init__(
        self,
        context: WorkerContext,
        max_queued: int,
        on_committed: Callable[[DecodeRequest, HandoffRecord], None],
        on_failed: Callable[[DecodeRequest, BaseException], None],
    ) -> None:
        self._context = context
        self._on_committed = on_committed
        self._on_failed = on_failed
        self._queue = ReservationQueue(max_queued)
        self._by_lease: dict[LeaseId, DecodeRequest] = {}
        self._wake = asyncio.Event()
        self.importer = Importer(
            context.kv_cache,
            LeaseTable(SystemClock()),
            self._commit,
            self._attempt_failed,
            worker_id=context.worker_id,
            incarnation=context.incarnation,
        )

    @property
    def num_queued(self) -> int:
        """Requests that wait for blocks."""
        return len(self._queue)

    @property
    def num_leases(self) -> int:
        """Open reservations."""
        return len(self._by_lease)

    def open(self) -> None:
        """Start granting and expiring."""
        self._context.spawn(self._grant_loop(), "reservations")
        self._context.spawn(self._tick_loop(), "lease_clock")

    def request(self, entry: DecodeRequest) -> None:
        """Queue a request for blocks.

        Raises:
            CapacityError: Too many are waiting.
        """
        self._queue.push(entry)
        self._wake.set()

    def blocks_may_be_free(self) -> None:
        """Look again whether the head of the queue can be granted."""
        if len(self._queue):
            self._wake.set()

    def supersede(self, entry: DecodeRequest, attempt: int) -> None:
        """Fence a reservation's present writer and grant it anew to the next attempt.

        Raises:
            LeaseError: There is no reservation any more.
        """
        if entry.lease_id is None:
            raise LeaseUnknown(f"request {entry.request_id} is {entry.phase}, not reserved")
        handle = self.importer.supersede(entry.lease_id)
        entry.attempt = attempt
        _tell_reserved(entry, handle)

    def renew(self, entry: DecodeRequest) -> None:
        """Keep a reservation whose prefill waits for its turn; what is not reserved (any more) needs nothing."""
        if entry.lease_id is not None:
            with contextlib.suppress(LeaseError):
                self.importer.keep_alive(entry.lease_id)

    def withdraw(self, entry: DecodeRequest) -> None:
        """Take a request out of the queue or end its lease. Afterwards nobody writes into its blocks."""
        self._queue.remove(entry)
        if entry.lease_id is not None:
            self.importer.release(entry.lease_id)
            self._forget_lease(entry)

    async def _grant_loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S if len(self._queue) else None):
                    await self._wake.wait()
            self._wake.clear()
            while await self._grant_queued():
                continue

    async def _grant_queued(self) -> bool:
        """Grant all that fit, in one call of the engine; returns whether the queue is to be looked at again at once."""
        entries = self._queue.entries
        results = await self._try_reserve(entries) if entries else []
        refused: DecodeRequest | None = None
        unwanted: list[DecodeRequest] = []
        for entry, result in zip(entries, results, strict=False):
            if result is None:
                refused = entry
            elif self._queue.head is entry:
                self._queue.remove(entry)
                self._settle(entry, result)
            elif isinstance(result, Granted):
                # Withdrawn meanwhile, or a more urgent one came: what was granted goes back.
                unwanted.append(entry)
        if unwanted:
            await self._give_back(unwanted)
        head = self._queue.head
        return head is not None and (head is not refused or bool(unwanted))

    async def _try_reserve(self, entries: Sequence[DecodeRequest]) -> list[Granted | Exception | None]:
        """Ask for blocks in order; the results end with the first that has to wait, which is None."""
        requests = [entry.request for entry in entries]
        try:
            return await self._context.engine_loop.call(lambda engine: _reserve_in_order(engine, requests))
        except Exception as error:
            return [error] * len(entries)  # the engine is gone

    async def _give_back(self, entries: Sequence[DecodeRequest]) -> None:
        request_ids = [entry.request_id for entry in entries]
        with contextlib.suppress(DeviceError):  # it is gone with its blocks
            await self._context.engine_loop.call(lambda engine: engine.remove(request_ids))

    def _settle(self, entry: DecodeRequest, result: Granted | Exception) -> None:
        """Tell a request that has left the queue what came of it. Whatever goes wrong ends this request only."""
        try:
            if isinstance(result, Exception):
                raise result
            self._grant(entry, result)
        except Exception as error:
            self._on_failed(entry, error)

    def _grant(self, entry: DecodeRequest, granted: Granted) -> None:
        block_size = self._context.layout.block_size
        start_token = granted.num_cached_tokens
        handle = self.importer.reserve(
            granted.block_ids[start_token // block_size :],
            start_token,
            len(entry.request.token_ids),
            entry.session.session_id,
            entry.ttl_s,
        )
        entry.lease_id = handle.lease_id
        entry.enter(Phase.RESERVED)
        self._by_lease[handle.lease_id] = entry
        _tell_reserved(entry, handle)
        _log.debug("handoff.lease_granted", request_id=entry.request_id, lease_id=handle.lease_id)

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.importer.tick()
            for entry, error in self._queue.expire(time.monotonic()):
                self._on_failed(entry, error)

    def _commit(self, lease_id: LeaseId, epoch: Epoch, record: bytes, stats: TransferStats) -> None:
        """Take over a verified hand-off. Called by the importer on the event loop."""
        entry = self._by_lease.get(lease_id)
        if entry is None:
            raise LeaseUnknown(f"lease {lease_id} belongs to no request")
        self._forget_lease(entry)
        try:
            handoff = handoff_record_from_bytes(record)
        except TransferError as error:
            self._on_failed(entry, error)
            raise
        emit_span(
            "kv.import",
            handoff.traceparent or entry.traceparent,
            duration_ns=stats.total_ns,
            attributes={
                "request_id": str(entry.request_id),
                "num_bytes": stats.num_bytes,
                "num_frames": stats.num_frames,
                "exposed_ns": stats.exposed_ns,
                "transport": stats.transport,
            },
        )
        _log.debug("handoff.committed", request_id=entry.request_id, epoch=epoch, num_bytes=stats.num_bytes)
        entry.session.tell(entry.request_id, Committed(entry.attempt, stats))
        self._on_committed(entry, handoff)

    def _attempt_failed(self, lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
        """Note that an attempt ended without a commit. The lease stands for the next attempt unless it has expired."""
        entry = self._by_lease.get(lease_id)
        if entry is None:
            return
        _log.info("handoff.attempt_failed", request_id=entry.request_id, epoch=epoch, reason=error.reason)
        if isinstance(error, LeaseExpired):
            self._forget_lease(entry)
            self._on_failed(entry, error)

    def _forget_lease(self, entry: DecodeRequest) -> None:
        if entry.lease_id is not None:
            self._by_lease.pop(entry.lease_id, None)
            entry.lease_id = None


def _tell_reserved(entry: DecodeRequest, handle: KvHandle) -> None:
    granted = Reserved(entry.attempt, kv_handle_to_bytes(handle), handle.start_token)
    entry.session.tell(entry.request_id, granted)


def _reserve_in_order(engine: Engine, requests: Sequence[EngineRequest]) -> list[Granted | Exception | None]:
    """Reserve blocks on the engine's thread until one has to wait."""
    results: list[Granted | Exception | None] = []
    for request in requests:
        try:
            results.append(engine.reserve(request))
        except Exception as error:
            results.append(error)
        if results[-1] is None:
            break
    return results
