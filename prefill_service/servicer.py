"""PrefillServicer: sessions of gateways with this prefill worker.

Commands become `PrefillJob`s; first tokens leave through the session's outbox as soon as the engine has them, the
export's end follows. A session that ends takes its jobs with it.
"""

import asyncio
from collections.abc import AsyncIterator, Collection

import grpc.aio
import structlog

from engine.engine import ChunkProgress
from engine.types import RequestId, SequenceOutput
from kv_transfer.handoff.exporter import Exporter
from kv_transfer.handoff.handle import Peer
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.v1 import prefill_service_pb2 as pb
from kvrelay.v1 import prefill_service_pb2_grpc, session_pb2
from kvrelay.wire.requests import engine_request_from_proto
from prefill_service import convert
from prefill_service.job import PrefillJob
from worker.kv_handle import kv_handle_from_proto
from worker.sessions.load_reporter import LoadReporter
from worker.sessions.outbox import Outbox
from worker.sessions.output_router import OutputRouter, Route
from worker.sessions.session import new_session_id, request_error, session_events
from worker.sessions.tracked import TrackedRequests
from worker.tier import WorkerContext
from worker.worker_servicer import load_to_proto

Context = grpc.aio.ServicerContext[pb.PrefillServiceSessionRequest, pb.PrefillServiceSessionResponse]

_log = structlog.get_logger(__name__)


class _Session:
    """One gateway's session."""

    def __init__(self) -> None:
        self.session_id = new_session_id()
        self.outbox: Outbox[pb.PrefillServiceSessionResponse] = Outbox(convert.step_event)
        self.peers: list[Peer] = []

    def put_load(self, load: session_pb2.WorkerLoad) -> None:
        self.outbox.put(convert.load_event(load))


class _Running:
    """A job, its task and the session that asked for it."""

    def __init__(self, job: PrefillJob, session: _Session, task: asyncio.Task[None]) -> None:
        self.job = job
        self.session = session
        self.task = task


class LayerListener:
    """Carries the engine's layer reports to the event loop. Made before the servicer: the engine needs it first."""

    def __init__(self) -> None:
        self._target: tuple[asyncio.AbstractEventLoop, PrefillServicer] | None = None

    def attach(self, servicer: "PrefillServicer") -> None:
        """Start reporting to a servicer on the running event loop."""
        self._target = (asyncio.get_running_loop(), servicer)

    def on_layer(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        """See `ExportListener.on_layer`; called on the engine's thread."""
        if self._target is not None:
            loop, servicer = self._target
            if not loop.is_closed():
                loop.call_soon_threadsafe(servicer.layer_ready, layer, progress)


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService for one worker; also its `TierService`."""

    def __init__(
        self, context: WorkerContext, transports: TransportRegistry, scheme: str | None, commit_timeout_s: float
    ) -> None:
        self._context = context
        self._transports = transports
        self._scheme = scheme
        self._exporter = Exporter(
            context.kv_cache,
            context.worker_id,
            context.incarnation,
            transports,
            scheme=scheme,
            commit_timeout_s=commit_timeout_s,
        )
        self._router = OutputRouter(asyncio.get_running_loop())
        self._sessions: dict[str, _Session] = {}
        self._running: TrackedRequests[_Running] = TrackedRequests()
        self._is_draining = self._is_broken = False

    # --- TierService ----------------------------------------------------------------------------------------------

    @property
    def transports(self) -> tuple[str, ...]:
        """Schemes this worker can send over."""
        return self._transports.schemes if self._scheme is None else (self._scheme,)

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """None: KV leaves this tier."""
        return ()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def open(self) -> None:
        """Start reporting the load."""
        reporter = LoadReporter(self.read_load, self._context.watch, lambda: self._sessions.values())
        self._context.spawn(reporter.run(), "load_reporter")

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs on the engine's thread."""
        self._router.deliver_threadsafe(outputs)

    async def read_load(self) -> session_pb2.WorkerLoad:
        """Return the load now."""
        load = await self._context.engine_loop.call(lambda engine: engine.load())
        return load_to_proto(load, num_queued=0, num_leases=0, is_draining=self._is_draining)

    def break_off(self, request_ids: Collection[RequestId], error: EngineError) -> None:
        """See `TierService.break_off`."""
        self._is_draining = self._is_broken = True
        for request_id in request_ids:
            running = self._running.get(request_id)
            if running is not None:
                event = request_error(request_id, running.job.attempt, error)
                running.session.outbox.put(convert.error_event(event))
        for session in self._sessions.values():
            session.outbox.put(convert.ending_event(str(error)))

    def start_drain(self) -> None:
        """Refuse new requests."""
        self._is_draining = True

    def end_sessions(self) -> None:
        """See `TierService.end_sessions`."""
        for session in self._sessions.values():
            session.outbox.close()

    async def wait_idle(self) -> None:
        """Return once no job runs."""
        await self._running.wait_idle()

    async def close(self) -> None:
        """End every session and job, then the exporter."""
        self.end_sessions()
        entries = list(self._running)
        self._abort(entries)
        await asyncio.gather(*(entry.task for entry in entries), return_exceptions=True)
        await self._exporter.close()

    # --- PrefillService -------------------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.PrefillServiceSessionRequest], context: Context
    ) -> AsyncIterator[pb.PrefillServiceSessionResponse]:
        """Serve one gateway until either side ends the stream."""
        if self._is_broken:
            raise WorkerUnavailable("this worker's engine is broken")
        session = _Session()
        self._sessions[session.session_id] = session
        session.outbox.put(convert.ready_event(self._context.worker_id, self._context.incarnation))
        _log.info("session.opened", session_id=session.session_id)
        try:
            async for event in session_events(
                request_iterator, session.outbox, lambda command: self._on_command(session, command)
            ):
                yield event
        finally:
            del self._sessions[session.session_id]
            num_ended = self._abort([running for running in self._running if running.session is session])
            self._update_peers()
            _log.info("session.closed", session_id=session.session_id, num_ended=num_ended)

    def layer_ready(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        """Tell the exports of a step's hand-offs that a layer's KV is final."""
        for chunk in progress:
            running = self._running.get(chunk.request_id)
            if running is not None:
                running.job.layer_ready(layer, chunk.num_tokens, chunk.block_ids)

    def _on_command(self, session: _Session, command: pb.PrefillServiceSessionRequest) -> None:
        match command.WhichOneof("command"):
            case "update_peers":
                session.peers = convert.peers_from_proto(command.update_peers.peers)
                self._update_peers()
            case "prefill":
                self._start(session, command.prefill)
            case "abort":
                running = [self._running.get(RequestId(request_id)) for request_id in command.abort.request_ids]
                self._abort([entry for entry in running if entry is not None and entry.session is session])
            case unknown:
                _log.warning("session.unknown_command", command=unknown)

    def _update_peers(self) -> None:
        """Several gateways share this worker: it may send to what any of them announces."""
        peers = {peer.worker_id: peer for session in self._sessions.values() for peer in session.peers}
        self._exporter.update_peers(list(peers.values()))

    def _start(self, session: _Session, command: pb.PrefillCommand) -> None:
        message = command.request
        request_id, attempt = RequestId(message.request_id), message.attempt
        try:
            if self._is_draining:
                raise WorkerUnavailable("this prefill worker is draining")
            if self._running.get(request_id) is not None:
                raise WorkerUnavailable("an earlier attempt of the request has not ended here yet")
            request = engine_request_from_proto(message)
            handle = kv_handle_from_proto(command.kv_handle, len(request.token_ids))
            job = PrefillJob(request, handle, attempt, message.traceparent)
        except Exception as error:
            session.outbox.put(convert.error_event(request_error(request_id, attempt, error)))
            return
        timeout_s = message.timeout_ms / 1000 if message.timeout_ms else None
        self._router.add(request_id, Route(session.outbox, attempt, job.on_output))
        task = asyncio.get_running_loop().create_task(self._run(session, job, timeout_s), name="prefill_job")
        self._running.put(request_id, _Running(job, session, task))
        # Not in `_run`: a task that is cancelled before its first step never runs at all.
        task.add_done_callback(lambda _: self._forget(request_id))

    async def _run(self, session: _Session, job: PrefillJob, timeout_s: float | None) -> None:
        request_id = job.request.request_id
        try:
            stats = await job.run(self._context.engine_loop, self._exporter, timeout_s)
        except Exception as error:
            session.outbox.put(convert.error_event(request_error(request_id, job.attempt, error)))
        else:
            if stats is not None:
                session.outbox.put(convert.exported_event(request_id, job.attempt, stats))

    def _forget(self, request_id: RequestId) -> None:
        self._router.remove(request_id)
        self._running.pop(request_id)

    @staticmethod
    def _abort(entries: list[_Running]) -> int:
        for entry in entries:
            if not entry.job.is_ending:
                entry.task.cancel()
        return len(entries)
