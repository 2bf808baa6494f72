"""DecodeServicer: the decode tier's commands.

Reserve → `Handoffs` grants blocks → KV arrives and is verified → the engine generates → outputs leave through the
session's outbox, one message per step. A session that ends takes its requests with it. What both tiers share is in
`worker/tier.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Coroutine

import grpc.aio
import structlog

from decode_service.handoffs import Handoffs
from decode_service.request import DecodeRequest, Phase
from decode_service.settings import DecodeSettings
from engine.types import HandoffRecord, RequestId, SequenceOutput
from kv_transfer.transports.grpc.transport import GrpcTransferServicer
from kv_transfer.transports.port import Listener
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import DeviceError, LeaseUnknown
from kvrelay.serving.telemetry import emit_span
from kvrelay.v1 import decode_service_pb2 as pb
from kvrelay.v1 import decode_service_pb2_grpc
from kvrelay.wire.engine.commands import Abort, Command, PrefillLocally, Renew, Reserve, Supersede
from worker.sessions.output_router import Route
from worker.sessions.session import GatewaySession
from worker.tier import Tier, WorkerContext

Context = grpc.aio.ServicerContext[pb.DecodeServiceSessionRequest, pb.DecodeServiceSessionResponse]

_log = structlog.get_logger(__name__)


class DecodeServicer(Tier[DecodeRequest], decode_service_pb2_grpc.DecodeServiceServicer):
    """Serves DecodeService for one worker."""

    def __init__(
        self, context: WorkerContext, transports: TransportRegistry, scheme: str | None, settings: DecodeSettings
    ) -> None:
        self._handoffs = Handoffs(context, settings.max_queued_reservations, self._committed, self._failed)
        super().__init__(
            context,
            transports,
            scheme,
            lease_ttl_s=settings.lease_ttl_s,
            on_step=self._handoffs.blocks_may_be_free,
        )
        self._settings = settings
        self._grpc_path = GrpcTransferServicer(self._handoffs.importer.serve)
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the worker's life --------------------------------------------------------------------------------------------

    @property
    def transfer_addresses(self) -> tuple[str, ...]:
        """Where KV can be sent to."""
        addresses = [listener.address for listener in self._listeners]
        if "grpc" in self.transports:
            addresses.append(f"grpc://{self.context.address}")
        return tuple(addresses)

    @property
    def num_queued(self) -> int:
        """Requests that wait for blocks."""
        return self._handoffs.num_queued

    @property
    def num_leases(self) -> int:
        """Open reservations."""
        return self._handoffs.num_leases

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service and, beside it, the gRPC byte path."""
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)
        if "grpc" in self.transports:
            self._grpc_path.add_to_server(server)

    async def open(self) -> None:
        """Listen for KV and start granting reservations."""
        for scheme in self.transports:
            if scheme != "grpc":  # its byte path is served by this worker's own server
                transport = self.transport_registry.get(scheme)
                self._listeners.append(await transport.listen(self._handoffs.importer.serve))
        self._handoffs.open()
        await super().open()

    async def close(self) -> None:
        """End every session, request and transfer."""
        await super().close()
        for listener in self._listeners:
            await listener.close()
        await self._grpc_path.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- commands -----------------------------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.DecodeServiceSessionRequest], context: Context
    ) -> AsyncIterator[pb.DecodeServiceSessionResponse]:
        """Serve one gateway until either side ends the stream."""
        async for message in self.serve(request_iterator, pb.DecodeServiceSessionResponse):
            yield message

    def handle(self, session: GatewaySession, command: Command) -> None:
        """See `Tier.handle`."""
        match command:
            case Reserve():
                self._reserve(session, command)
            case PrefillLocally(request_id):
                entry = self._reserved(session, request_id)
                # Fence first: from here on only the engine writes into the blocks.
                self._handoffs.withdraw(entry)
                self._run_in_engine(entry, self._start_local_prefill(entry))
            case Supersede(request_id, attempt):
                self._handoffs.supersede(self._reserved(session, request_id), attempt)
            case Abort(request_ids):
                self.end(self.of_session(session, request_ids))
            case Renew(request_ids):
                for entry in self.of_session(session, request_ids):
                    self._handoffs.renew(entry)
            case _:
                raise TypeError(f"a decode worker takes no {type(command).__name__}")

    def session_ended(self, session: GatewaySession) -> None:
        """End leases that no request holds any more."""
        self._handoffs.importer.end_session(session.session_id)

    def _reserve(self, session: GatewaySession, command: Reserve) -> None:
        self.check_new(command.request.request_id)
        entry = DecodeRequest(
            request=command.request,
            attempt=command.attempt,
            session=session,
            ttl_s=command.ttl_ms / 1000 if command.ttl_ms else self._settings.lease_ttl_s,
            deadline=command.deadline,
            queued_until=time.monotonic() + self._settings.reservation_timeout_s,
            traceparent=command.traceparent,
        )
        self._handoffs.request(entry)
        self.requests.put(entry.request_id, entry)

    def _reserved(self, session: GatewaySession, request_id: RequestId) -> DecodeRequest:
        entry = self.requests.get(request_id)
        if entry is None or entry.session is not session or entry.phase is not Phase.RESERVED:
            raise LeaseUnknown(f"request {request_id} holds no reservation here")
        return entry

    # --- a request's way through the engine -----------------------------------------------------------------------

    def _committed(self, entry: DecodeRequest, record: HandoffRecord) -> None:
        self._run_in_engine(entry, self._start_decode(entry, record))

    def _run_in_engine(self, entry: DecodeRequest, start: Coroutine[object, object, None]) -> None:
        entry.enter(Phase.RUNNING)
        route = Route(entry.session.outbox, entry.attempt, lambda output: self._on_output(entry, output))
        self.router.add(entry.request_id, route)
        self._keep(asyncio.get_running_loop().create_task(start, name="decode_start"))

    async def _start_decode(self, entry: DecodeRequest, record: HandoffRecord) -> None:
        request_id, first_token_id, state = entry.request_id, record.first_token_id, record.draft_state
        try:
            output = await self.context.engine_loop.call(
                lambda engine: engine.commit(request_id, first_token_id, state)
            )
        except Exception as error:
            self._failed(entry, error)
            return
        # Prefill has told the gateway of the first token; only its verdict matters here.
        if output is not None and output.finish_reason is not None:
            self.router.remove(request_id)
            self._on_output(entry, output)
            self._handoffs.blocks_may_be_free()

    async def _start_local_prefill(self, entry: DecodeRequest) -> None:
        request_id = entry.request_id
        try:
            await self.context.engine_loop.call(lambda engine: engine.prefill_locally(request_id))
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
            self.requests.pop(entry.request_id)
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
        entry.fail(error)
        self.end([entry])

    def end(self, entries: Collection[DecodeRequest]) -> None:
        """Fence, forget and free requests at whatever phase."""
        for entry in entries:
            self._handoffs.withdraw(entry)
            self.router.remove(entry.request_id)
            self.requests.pop(entry.request_id)
        if entries:
            request_ids = [entry.request_id for entry in entries]
            self._keep(asyncio.get_running_loop().create_task(self._remove(request_ids), name="decode_remove"))

    async def _remove(self, request_ids: list[RequestId]) -> None:
        try:
            await self.context.engine_loop.call(lambda engine: engine.remove(request_ids))
        except DeviceError as error:
            _log.debug("engine.gone", error=str(error))  # with its blocks
        self._handoffs.blocks_may_be_free()

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
