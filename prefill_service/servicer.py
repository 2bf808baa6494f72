"""PrefillServicer: the prefill tier's commands.

Commands become `PrefillJob`s; first tokens leave through the session's outbox as soon as the engine has them, the
export's end follows. A session that ends takes its jobs with it. What both tiers share is in `worker/tier.py`.
"""

import asyncio
from collections.abc import AsyncIterator, Collection

import grpc.aio

from engine.engine import ChunkProgress
from engine.types import RequestId
from engine.worker_types import TransferPeer
from kv_transfer.handoff.exporter import Exporter
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.v1 import prefill_service_pb2 as pb
from kvrelay.v1 import prefill_service_pb2_grpc
from kvrelay.wire.engine.commands import Abort, Command, Prefill, UpdatePeers
from kvrelay.wire.engine.events import Exported
from kvrelay.wire.engine.handoff import kv_handle_from_bytes
from prefill_service.job import PrefillJob
from worker.sessions.output_router import Route
from worker.sessions.session import GatewaySession
from worker.tier import Tier, WorkerContext

Context = grpc.aio.ServicerContext[pb.PrefillServiceSessionRequest, pb.PrefillServiceSessionResponse]


class _Running:
    """A job, its task and the session that asked for it."""

    def __init__(self, job: PrefillJob, session: GatewaySession, task: asyncio.Task[None]) -> None:
        self.job = job
        self.session = session
        self.task = task

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.job.request.request_id

    @property
    def attempt(self) -> int:
        """The job's attempt."""
        return self.job.attempt


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


class PrefillServicer(Tier[_Running], prefill_service_pb2_grpc.PrefillServiceServicer):
    """Serves PrefillService for one worker."""

    def __init__(
        self, context: WorkerContext, transports: TransportRegistry, scheme: str | None, commit_timeout_s: float
    ) -> None:
        super().__init__(context, transports, scheme)
        self._exporter = Exporter(
            context.kv_cache,
            context.worker_id,
            context.incarnation,
            transports,
            scheme=scheme,
            commit_timeout_s=commit_timeout_s,
        )
        self._peers: dict[str, tuple[TransferPeer, ...]] = {}
        """By session."""

    # --- the worker's life --------------------------------------------------------------------------------------------

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service."""
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def close(self) -> None:
        """End every session and job, then the exporter."""
        tasks = [running.task for running in self.requests]
        await super().close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._exporter.close()

    def layer_ready(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        """Tell the exports of a step's hand-offs that a layer's KV is final."""
        for chunk in progress:
            running = self.requests.get(chunk.request_id)
            if running is not None:
                running.job.layer_ready(layer, chunk.num_tokens, chunk.block_ids)

    # --- commands -----------------------------------------------------------------------------------------------------

    async def Session(
        self, request_iterator: AsyncIterator[pb.PrefillServiceSessionRequest], context: Context
    ) -> AsyncIterator[pb.PrefillServiceSessionResponse]:
        """Serve one gateway until either side ends the stream."""
        async for message in self.serve(request_iterator, pb.PrefillServiceSessionResponse):
            yield message

    def handle(self, session: GatewaySession, command: Command) -> None:
        """See `Tier.handle`."""
        match command:
            case Prefill():
                self._start(session, command)
            case Abort(request_ids):
                self.end(self.of_session(session, request_ids))
            case UpdatePeers(peers):
                self._peers[session.session_id] = peers
                self._update_peers()
            case _:
                raise TypeError(f"a prefill worker takes no {type(command).__name__}")

    def session_ended(self, session: GatewaySession) -> None:
        """Forget whom the gateway announced."""
        self._peers.pop(session.session_id, None)
        self._update_peers()

    def end(self, entries: Collection[_Running]) -> None:
        """Cancel jobs; each forgets itself when it has freed what it holds."""
        for entry in entries:
            if not entry.job.is_ending:
                entry.task.cancel()

    def _update_peers(self) -> None:
        """Several gateways share this worker: it may send to what any of them announces."""
        peers = {peer.worker_id: peer for announced in self._peers.values() for peer in announced}
        self._exporter.update_peers(list(peers.values()))

    def _start(self, session: GatewaySession, command: Prefill) -> None:
        request = command.request
        self.check_new(request.request_id)
        handle = kv_handle_from_bytes(command.kv_handle, len(request.token_ids))
        job = PrefillJob(request, handle, command.attempt, command.deadline, command.traceparent)
        self.router.add(request.request_id, Route(session.outbox, job.attempt, job.on_output))
        task = asyncio.get_running_loop().create_task(self._run(session, job), name="prefill_job")
        self.requests.put(request.request_id, _Running(job, session, task))
        # Not in `_run`: a task that is cancelled before its first step never runs at all.
        task.add_done_callback(lambda _: self._forget(request.request_id))

    async def _run(self, session: GatewaySession, job: PrefillJob) -> None:
        request_id = job.request.request_id
        try:
            stats = await job.run(self.context.engine_loop, self._exporter)
        except Exception as error:
            session.fail(request_id, job.attempt, error)
        else:
            if stats is not None:
                session.tell(request_id, Exported(job.attempt, stats))

    def _forget(self, request_id: RequestId) -> None:
        self.router.remove(request_id)
        self.requests.pop(request_id)
