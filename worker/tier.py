"""Tier: the base of both tiers' services: gateways' sessions, the requests on this worker, outputs, loads, the end.

A tier adds what its commands mean and what it keeps of a request. Everything here belongs to one event loop, except
`deliver`. Next: `decode_service/servicer.py` and `prefill_service/servicer.py`.
"""

import abc
import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import structlog

from engine.cache.layout import KvLayout
from engine.loop import EngineLoop
from engine.model.kv_cache import KvCache
from engine.types import Incarnation, RequestId, SequenceOutput, WorkerId
from engine.worker_types import WorkerLoad
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.wire.engine.commands import Command, CommandMessage, addressee_of, command_from_proto
from kvrelay.wire.engine.events import Ending, EventMessage, Ready, event_to_proto
from worker.sessions.load_reporter import LoadReporter
from worker.sessions.output_router import OutputRouter
from worker.sessions.session import GatewaySession, session_events
from worker.sessions.tracked import TrackedRequests
from worker.step_watch import StepWatch

_log = structlog.get_logger(__name__)


class TaskSpawner(Protocol):
    """Runs background tasks that end with the server."""

    def __call__(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start a task; if it fails, the worker drains and exits."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What a tier's service works with."""

    worker_id: WorkerId
    incarnation: Incarnation
    engine_loop: EngineLoop
    kv_cache: KvCache
    layout: KvLayout
    device: str
    """What the engine computes on, e.g. `cpu` or `cuda:0`."""
    address: str
    """The worker's gRPC address as others reach it, host:port."""
    spawn: TaskSpawner
    watch: StepWatch
    """Knows whether the engine hangs."""


class TierRequest(Protocol):
    """What a tier keeps of one request, as far as the base has to know."""

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        ...

    @property
    def attempt(self) -> int:
        """Number of the attempt that it is here for."""
        ...

    @property
    def session(self) -> GatewaySession:
        """The session that brought it; no other acts on it."""
        ...


Entry = TypeVar("Entry", bound=TierRequest)


class Tier(abc.ABC, Generic[Entry]):
    """One tier's service on top of a running engine.

    Args:
        context: The worker.
        transports: The transports of this process.
        scheme: The only one to use; None = any.
        lease_ttl_s: What sessions are told of leases; 0 = this tier grants none.
        on_step: Called after each step's outputs.
    """

    def __init__(
        self,
        context: WorkerContext,
        transports: TransportRegistry,
        scheme: str | None,
        *,
        lease_ttl_s: float = 0.0,
        on_step: Callable[[], None] | None = None,
    ) -> None:
        self.context = context
        self.requests: TrackedRequests[Entry] = TrackedRequests()
        self.sessions: dict[str, GatewaySession] = {}
        self.router = OutputRouter(asyncio.get_running_loop(), on_step)
        self.transport_registry = transports
        self._scheme = scheme
        self._lease_ttl_s = lease_ttl_s
        self._is_draining = self._is_broken = False

    # --- what a tier adds ---------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def add_to(self, server: grpc.aio.Server) -> None:
        """Register its servicers. Called once, before the server starts."""

    @abc.abstractmethod
    def handle(self, session: GatewaySession, command: Command) -> None:
        """Carry out a command; returns at once. An exception ends the request that the command is about."""

    @abc.abstractmethod
    def end(self, entries: Collection[Entry]) -> None:
        """End requests at whatever phase, and free what they hold."""

    def session_ended(self, session: GatewaySession) -> None:
        """Forget what a session leaves behind besides its requests."""

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """Where KV can be sent to; empty on the prefill tier."""
        return ()

    @property
    def num_queued(self) -> int:
        """Requests that wait outside the engine, e.g. for a reservation."""
        return 0

    @property
    def num_leases(self) -> int:
        """Open reservations."""
        return 0

    # --- the worker's life --------------------------------------------------------------------------------------------

    @property
    def transports(self) -> tuple[str, ...]:
        """Schemes of the transports it can use, best first."""
        return self.transport_registry.schemes if self._scheme is None else (self._scheme,)

    async def open(self) -> None:
        """Start background work. Called once, before the first session."""
        reporter = LoadReporter(
            self.read_load, self.context.watch, lambda: [session.outbox for session in self.sessions.values()]
        )
        self.context.spawn(reporter.run(), "load_reporter")

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs. Called on the engine's thread; returns at once."""
        self.router.deliver_threadsafe(outputs)

    async def read_load(self) -> WorkerLoad:
        """Return the load now."""
        load = await self.context.engine_loop.call(lambda engine: engine.load())
        return replace(
            load,
            num_waiting=load.num_waiting + self.num_queued,
            num_leases=self.num_leases,
            is_draining=self._is_draining,
        )

    def break_off(self, request_ids: Collection[RequestId], error: EngineError) -> None:
        """Tell these requests that the engine is broken, and every gateway that its session is over.

        So they resume elsewhere what ran here, before this process has ended. New sessions are refused.

        Args:
            request_ids: Those that took part in the step that broke it.
            error: What to tell them; the others learn of it by their session's end, and are not accused.
        """
        self._is_draining = self._is_broken = True
        for request_id in request_ids:
            entry = self.requests.get(request_id)
            if entry is not None:
                entry.session.fail(request_id, entry.attempt, error)
        for session in self.sessions.values():
            session.outbox.put(Ending(str(error)))

    def end_sessions(self) -> None:
        """End the streams of gateways that have not ended them."""
        for session in self.sessions.values():
            session.outbox.close()

    def start_drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        """Return once no request is here any more."""
        await self.requests.wait_idle()

    async def close(self) -> None:
        """End sessions and requests; a tier goes on with its transfers. Afterwards nothing touches the engine."""
        self.end_sessions()
        self.end(list(self.requests))

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def serve(
        self, messages: AsyncIterator[CommandMessage], kind: Callable[..., EventMessage]
    ) -> AsyncIterator[EventMessage]:
        """Serve one gateway until either side ends the stream.

        Args:
            messages: The tier's command messages.
            kind: Its event message.
        """
        if self._is_broken:
            raise WorkerUnavailable("this worker's engine is broken")
        session = GatewaySession()
        self.sessions[session.session_id] = session
        session.outbox.put(
            Ready(self.context.worker_id, self.context.incarnation, lease_ttl_ms=math.ceil(1000 * self._lease_ttl_s))
        )
        _log.info("session.opened", session_id=session.session_id)
        try:
            async for event in session_events(
                messages, session.outbox, lambda message: self._on_message(session, message)
            ):
                yield event_to_proto(event, kind)
        finally:
            del self.sessions[session.session_id]
            entries = [entry for entry in self.requests if entry.session is session]
            self.end(entries)
            self.session_ended(session)
            _log.info("session.closed", session_id=session.session_id, num_ended=len(entries))

    def _on_message(self, session: GatewaySession, message: CommandMessage) -> None:
        try:
            command = command_from_proto(message, time.monotonic())
            if command is None:
                _log.warning("session.unknown_command", command=message.WhichOneof("command"))
            else:
                self.handle(session, command)
        except Exception as error:
            # Whatever goes wrong ends this request only, and it is told.
            addressee = addressee_of(message)
            if addressee is None:
                raise
            session.fail(*addressee, error)

    def check_new(self, request_id: RequestId) -> None:
        """Refuse a request where the worker drains or still has it.

        Raises:
            WorkerUnavailable: It does.
        """
        if self._is_draining:
            raise WorkerUnavailable("this worker is draining")
        if self.requests.get(request_id) is not None:
            raise WorkerUnavailable("an earlier attempt of the request has not ended here yet")

    def of_session(self, session: GatewaySession, request_ids: Collection[RequestId]) -> list[Entry]:
        """Return those of the requests that are here and the session's own: it acts on no other's."""
        entries = [self.requests.get(request_id) for request_id in request_ids]
        return [entry for entry in entries if entry is not None and entry.session is session]
