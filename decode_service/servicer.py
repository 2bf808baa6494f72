"""DecodeServicer: sessions of gateways with this decode worker.

Reserve → `Handoffs` grants blocks → KV arrives and is verified → the engine generates → outputs leave through the
session's outbox, one message per step. A session that ends takes its requests with it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable

import grpc.aio
import structlog

from decode_service import convert
from decode_service.handoffs import Handoffs
from decode_service.request import DecodeRequest, DecodeSession, Phase
from decode_service.settings import DecodeSettings
from engine.types import HandoffRecord, RequestId, SequenceOutput
from kv_transfer.transports.grpc.transport import GrpcTransferServicer
from kv_transfer.transports.port import Listener
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import DeviceError, EngineError, LeaseUnknown, WorkerUnavailable
from kvrelay.serving.telemetry import emit_span
from kvrelay.v1 import decode_service_pb2 as pb
from kvrelay.v1 import decode_service_pb2_grpc, session_pb2
from kvrelay.wire.requests import engine_request_from_proto
from worker.sessions.load_reporter import LoadReporter
from worker.sessions.output_router import OutputRouter, Route
from worker.sessions.session import request_error, session_events
from worker.sessions.tracked import TrackedRequests
from worker.tier import WorkerContext
from worker.worker_servicer import load_to_proto

Context = grpc.aio.ServicerContext[pb.DecodeServiceSessionRequest, pb.DecodeServiceSessionResponse]

_log = structlog.get_logger(__name__)


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService for one worker; also its `TierService`."""

    def __init__(
        self, context: WorkerContext, transports: TransportRegistry, scheme: str | None, settings: DecodeSettings
    ) -> None:
        self._context = context
        self._transports = transports
        self._scheme = scheme
        self._settings = settings
        self._requests: TrackedRequests[DecodeRequest] = TrackedRequests()
        self._sessions: dict[str, DecodeSession] = {}
        self._handoffs = Handoffs(context, settings.max_queued_reservations, self._committed, self._failed)
        self._router = OutputRouter(asyncio.get_running_loop(), self._handoffs.blocks_may_be_free)
        self._grpc_path = GrpcTransferServicer(self._handoffs.importer.serve)
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = self._is_broken = False

    # --- TierService ----------------------------------------------------------------------------------------------

    @property
    def transports(self) -> tuple[str, ...]:
        """Schemes this worker can receive over."""
        return self._transports.schemes if self._scheme is None else (self._scheme,)

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """Where KV can be sent to."""
        addresses = [listener.address for listener in self._listeners]
        if "grpc" in self.transports:
            addresses.append(f"grpc://{self._context.address}")
        return tuple(addresses)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service and, beside it, the gRPC byte path."""
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        if "grpc" in self.transports:
            self._grpc_path.add_to_server(server)

    async def open(self) -> None:
        """Listen for KV and start granting reservations."""
        for scheme in self.transports:
            if scheme != "grpc":  # its byte path is served by this worker's own server
                self._listeners.append(await self._transports.get(scheme).listen(self._handoffs.importer.serve))
        self._handoffs.open()
        reporter = LoadReporter(self.read_load, self._context.watch, lambda: self._sessions.values())
        self._context.spawn(reporter.run(), "load_reporter")

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs on the engine's thread."""
        self._router.deliver_threadsafe(outputs)

    async def read_load(self) -> session_pb2.WorkerLoad:
        """Return the load now."""
        load = await self._context.engine_loop.call(lambda engine: engine.load())
        return load_to_proto(
            load,
            num_queued=self._handoffs.num_queued,
            num_leases=self._handoffs.num_leases,
            is_draining=self._is_draining,
        )

    def break_off(self, request_ids: Collection[RequestId], error: EngineError) -> None:
        """See `TierService.break_off`."""
        self._is_draining = self._is_broken = True
        for request_id in request_ids:
            entry = self._requests.get(request_id)
            if entry is not None:
                entry.send_error(error)
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
        """Return once no request is here."""
        await self._requests.wait_idle()

    async def close(self) -> None:
        """End every session, request and transfer."""
        self.end_sessions()
        self._end(list(self._requests))
        for listener in self._listeners:
            await listener.close()
        await self._grpc_path.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- DecodeService --------------------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.DecodeServiceSessionRequest], context: Context
    ) -> AsyncIterator[pb.DecodeServiceSessionResponse]:
        """Serve one gateway until either side ends the stream."""
        if self._is_broken:
            raise WorkerUnavailable("this worker's engine is broken")
        session = DecodeSession()
        self._sessions[session.session_id] = session
        session.outbox.put(
            convert.ready_event(self._context.worker_id, self._context.incarnation, self._settings.lease_ttl_s)
        )
        _log.info("session.opened", session_id=session.session_id)
        try:
            async for event in session_events(
                request_iterator, session.outbox, lambda command: self._on_command(session, command)
            ):
                yield event
        finally:
            del self._sessions[session.session_id]
            num_ended = self._end([entry for entry in self._requests if entry.session is session])
            self._handoffs.importer.end_session(session.session_id)
            _log.info("session.closed", session_id=session.session_id, num_ended=num_ended)

    def _on_command(self, session: DecodeSession, command: pb.DecodeServiceSessionRequest) -> None:
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(session, command.reserve)
            case "prefill_locally":
                self._prefill_locally(session, RequestId(command.prefill_locally.request_id))
            case "supersede":
                self._supersede(session, command.supersede)
            case "abort":
                self._end(self._of_session(session, command.abort.request_ids))
            case "renew":
                for entry in self._of_session(session, command.renew.request_ids):
                    self._handoffs.renew(entry)
            case unknown:
                _log.warning("session.unknown_command", command=unknown)

    def _reserve(self, session: DecodeSession, command: pb.ReserveCommand) -> None:
        message = command.request
        request_id, attempt = RequestId(message.request_id), message.attempt
        now = time.monotonic()
        try:
            if self._is_draining:
                raise WorkerUnavailable("this decode worker is draining")
            if self._requests.get(request_id) is not None:
                raise WorkerUnavailable("an earlier attempt of the request has not ended here yet")
            entry = DecodeRequest(
                request=engine_request_from_proto(message),
                attempt=attempt,
                session=session,
                ttl_s=command.ttl_ms / 1000 if command.ttl_ms else self._settings.lease_ttl_s,
                deadline=now + message.timeout_ms / 1000 if message.timeout_ms else None,
                queued_until=now + self._settings.reservation_timeout_s,
                traceparent=message.traceparent,
            )
            self._handoffs.request(entry)
        except Exception as error:
            session.outbox.put(convert.error_event(request_error(request_id, attempt, error)))
        else:
            self._requests.put(request_id, entry)

    def _supersede(self, session: DecodeSession, command: pb.SupersedeCommand) -> None:
        request_id = RequestId(command.request_id)
        try:
            self._handoffs.supersede(self._reserved(session, request_id), command.attempt)
        except Exception as error:
            session.outbox.put(convert.error_event(request_error(request_id, command.attempt, error)))

    def _prefill_locally(self, session: DecodeSession, request_id: RequestId) -> None:
        try:
            entry = self._reserved(session, request_id)
        except Exception as error:
            session.outbox.put(convert.error_event(request_error(request_id, 0, error)))
            return
        # Fence first: from here on only the engine writes into the blocks.
        self._handoffs.withdraw(entry)
        self._run_in_engine(entry, self._start_local_prefill(entry))

    def _of_session(self, session: DecodeSession, request_ids: Iterable[int]) -> list[DecodeRequest]:
        """Return those of the requests that are here and the session's own: it acts on no other's."""
        entries = [self._requests.get(RequestId(request_id)) for request_id in request_ids]
        return [entry for entry in entries if entry is not None and entry.session is session]

    def _reserved(self, session: DecodeSession, request_id: RequestId) -> DecodeRequest:
        entry = self._requests.get(request_id)
        if entry is None or entry.session is not session or entry.phase is not Phase.RESERVED:
            raise LeaseUnknown(f"request {request_id} holds no reservation here")
        return entry

    # --- a request's way through the engine -----------------------------------------------------------------------

    def _committed(self, entry: DecodeRequest, record: HandoffRecord) -> None:
        self._run_in_engine(entry, self._start_decode(entry, record))

    def _run_in_engine(self, entry: DecodeRequest, start: Coroutine[object, object, None]) -> None:
        entry.enter(Phase.RUNNING)
        route = Route(entry.session.outbox, entry.attempt, lambda output: self._on_output(entry, output))
        self._router.add(entry.request_id, route)
        task = asyncio.get_running_loop().create_task(start, name="decode_start")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_decode(self, entry: DecodeRequest, record: HandoffRecord) -> None:
        request_id, first_token_id, state = entry.request_id, record.first_token_id, record.draft_state
        try:
            output = await self._context.engine_loop.call(
                lambda engine: engine.commit(request_id, first_token_id, state)
            )
        except Exception as error:
            self._failed(entry, error)
            return
        # Prefill has told the gateway of the first token; only its verdict matters here.
        if output is not None and output.finish_reason is not None:
            self._router.remove(request_id)
            self._on_output(entry, output)
            self._handoffs.blocks_may_be_free()

    async def _start_local_prefill(self, entry: DecodeRequest) -> None:
        request_id = entry.request_id
        try:
            await self._context.engine_loop.call(lambda engine: engine.prefill_locally(request_id))
        except Exception as error:
            self._failed(entry, error)

    def _on_output(self, entry: DecodeRequest, output: SequenceOutput) -> None:
        if output.error is not None:
            self._failed(entry, output.error)
            return
        entry.num_output_tokens += len(output.token_ids)
        if output.prefill_timing is not None:
            emit_span("prefill", entry.traceparent, duration_ns=output.prefill_timing.prefill_ns)
        if output.finish_reason is not None:
            self._requests.pop(entry.request_id)
            emit_span(
                "decode",
                entry.traceparent,
                duration_ns=time.monotonic_ns() - entry.started_ns,
                attributes={
                    "request_id": str(entry.request_id),
                    "num_output_tokens": entry.num_output_tokens,
                    "finish_reason": output.finish_reason.value,
                },
            )

    def _failed(self, entry: DecodeRequest, error: BaseException) -> None:
        """End a request with an error. Its writer is fenced already."""
        entry.send_error(error)
        self._end([entry])

    def _end(self, entries: Iterable[DecodeRequest]) -> int:
        """Fence, forget and free requests at whatever phase; returns how many."""
        request_ids = []
        for entry in entries:
            self._handoffs.withdraw(entry)
            self._router.remove(entry.request_id)
            self._requests.pop(entry.request_id)
            request_ids.append(entry.request_id)
        if request_ids:
            task = asyncio.get_running_loop().create_task(self._remove(request_ids), name="decode_remove")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return len(request_ids)

    async def _remove(self, request_ids: list[RequestId]) -> None:
        try:
            await self._context.engine_loop.call(lambda engine: engine.remove(request_ids))
        except DeviceError as error:
            _log.debug("engine.gone", error=str(error))  # with its blocks
        self._handoffs.blocks_may_be_free()
