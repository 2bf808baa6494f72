"""The life of one worker process: bind, load, serve, register, drain, stop. Shared by both tiers' `__main__`."""

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, TypeAlias

import structlog

from engine.engine import Engine, ExportListener
from engine.loop import EngineLoop
from engine.model.files.source import resolve_model
from engine.types import Incarnation, RequestId, SequenceOutput, WorkerId
from engine.worker_types import WorkerInfo, WorkerRole
from kvrelay.errors import EngineError, StepFailed
from kvrelay.serving.heap import freeze_start_up
from kvrelay.serving.server import ServiceServer
from kvrelay.serving.start_up import stops_at_once
from kvrelay.serving.telemetry import configure_logging, configure_tracing, shutdown_tracing
from kvrelay.v1 import worker_service_pb2_grpc
from kvrelay.wire.engine.workers import ModelInfo
from worker.advertise import advertised_host
from worker.compute.bootstrap import build_engine
from worker.compute.kernels import describe_kernels
from worker.priority import share_cores
from worker.registration import Registration
from worker.settings import WorkerSettings
from worker.step_watch import StepWatch
from worker.tier import Tier, WorkerContext
from worker.worker_servicer import WorkerServicer

WORKER_SERVICE = "kvrelay.v1.WorkerService"
LOAD_PROGRESS_STEP = 0.25
LAST_WORDS_S = 0.5
"""How long a process with a broken engine lives on, for gateways to read why and to end their sessions."""

AnyTier: TypeAlias = Tier[Any]

_log = structlog.get_logger(__name__)


class WorkerProcess:
    """One worker: an engine, a tier's service, a server and a registration.

    Args:
        settings: The worker's settings.
        role: `prefill` or `decode`.
        service_name: Full name of the tier's service, for health and reflection.
        make_tier: Builds the tier's service once the engine is there.
        export_listener: Passed to the engine (prefill tier).
    """

    def __init__(
        self,
        settings: WorkerSettings,
        role: WorkerRole,
        service_name: str,
        make_tier: Callable[[WorkerContext], AnyTier],
        export_listener: ExportListener | None = None,
    ) -> None:
        self._settings = settings
        self._role = role
        self._service_name = service_name
        self._make_tier = make_tier
        self._export_listener = export_listener
        self._tier: AnyTier | None = None
        self._registration: Registration | None = None
        self._is_draining = False

    async def run(self) -> int:
        """Serve until SIGTERM and return the exit code."""
        settings = self._settings
        async with ServiceServer(
            host=settings.host, port=settings.port, service_names=[self._service_name, WORKER_SERVICE]
        ) as server:
            server.bind()
            engine_loop = EngineLoop(self._build_engine, self._deliver, self._fatal_handler(server))
            try:
                await engine_loop.start()
                context = await self._context(server, engine_loop, self._watch(server, engine_loop))
                tier = self._tier = self._make_tier(context)
                return await self._serve(server, context, tier)
            finally:
                if self._tier is not None:
                    await self._tier.close()
                await engine_loop.stop()

    async def _serve(self, server: ServiceServer, context: WorkerContext, tier: AnyTier) -> int:
        tier.add_to(server.grpc_server)
        await tier.open()
        info = await self._describe(context, tier)
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(
            WorkerServicer(
                context.engine_loop,
                ModelInfo.of(info, context.device),
                tier.read_load,
                (lambda: self._drain(tier)) if self._settings.worker_control else None,
                self._settings.drain_timeout_s,
            ),
            server.grpc_server,
        )
        freeze_start_up()
        await server.start()
        server.health.set_serving(self._service_name)
        server.health.set_serving(WORKER_SERVICE)
        registration = self._registration = Registration(
            self._settings.gateway, info, lambda: self._is_draining, context.watch
        )
        server.create_task(context.watch.run(), "step_watch")
        server.create_task(registration.run(), "registration")
        _log.info(
            "worker.ready",
            worker_id=context.worker_id,
            model=info.model_name,
            kernels=info.kernels,
            address=context.address,
            num_blocks=info.num_blocks,
            block_size=info.layout.block_size,
            transports=list(info.transports),
        )

        async def drain() -> None:
            registration.report_now()
            await self._drain(tier)

        try:
            return await server.run_until_signal(drain, self._settings.drain_timeout_s)
        finally:
            await registration.close()

    async def _drain(self, tier: AnyTier) -> None:
        self._is_draining = True
        tier.start_drain()
        await tier.wait_idle()

    def _build_engine(self) -> Engine:
        reported = 0.0

        def progress(num_done: int, num_total: int) -> None:
            nonlocal reported
            if num_total and num_done / num_total >= reported + LOAD_PROGRESS_STEP:
                reported = num_done / num_total
                _log.info("model.loading", percent=round(100 * reported))

        return build_engine(self._settings, self._export_listener, progress)

    def _deliver(self, outputs: list[SequenceOutput]) -> None:
        if self._tier is not None:
            self._tier.deliver(outputs)

    def _fatal_handler(self, server: ServiceServer) -> Callable[[BaseException, tuple[RequestId, ...]], None]:
        loop = asyncio.get_running_loop()

        def break_off(error: BaseException, request_ids: tuple[RequestId, ...]) -> None:
            if self._tier is not None:
                self._tier.break_off(request_ids, StepFailed(f"an engine step failed: {type(error).__name__}"))
            server.health.enter_drain()
            loop.call_later(LAST_WORDS_S, end)

        def end() -> None:
            if self._tier is not None:
                self._tier.end_sessions()
            server.request_stop(exit_code=1)

        def on_fatal(error: BaseException, request_ids: tuple[RequestId, ...]) -> None:
            # The device's state is unknown after a failed step: stop, and let the supervisor start a fresh process.
            # What ran here must not wait for that, so the sessions end before the drain begins.
            if not loop.is_closed():
                loop.call_soon_threadsafe(break_off, error, request_ids)

        return on_fatal

    def _watch(self, server: ServiceServer, engine_loop: EngineLoop) -> StepWatch:
        def on_change(is_stalled: bool) -> None:
            tell = server.health.set_not_serving if is_stalled else server.health.set_serving
            tell(self._service_name)
            if self._registration is not None:
                self._registration.report_now()

        settings = self._settings
        return StepWatch(
            lambda: engine_loop.step_age_s, settings.step_stall_s, settings.step_limit_s or None, on_change
        )

    async def _context(self, server: ServiceServer, engine_loop: EngineLoop, watch: StepWatch) -> WorkerContext:
        settings = self._settings
        kv_cache, device = await engine_loop.call(lambda engine: (engine.kv_cache, engine.model.device))
        # A name may have to be resolved.
        host = await asyncio.to_thread(advertised_host, settings.advertise_host, settings.host, settings.gateway)
        return WorkerContext(
            worker_id=WorkerId(settings.resolved_worker_id(self._role.value)),
            incarnation=Incarnation(secrets.randbits(63)),
            engine_loop=engine_loop,
            kv_cache=kv_cache,
            layout=kv_cache.layout,
            device=str(device),
            address=f"[{host}]:{server.port}" if ":" in host else f"{host}:{server.port}",
            spawn=server.create_task,
            watch=watch,
        )

    async def _describe(self, context: WorkerContext, tier: AnyTier) -> WorkerInfo:
        model = await context.engine_loop.call(lambda engine: engine.model)
        config, settings = model.config, self._settings
        return WorkerInfo(
            worker_id=context.worker_id,
            incarnation=context.incarnation,
            role=self._role,
            address=context.address,
            model_name=settings.served_model_name or resolve_model(settings.model).name,
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            context_length=config.max_position,
            layout=context.layout,
            num_blocks=context.kv_cache.num_blocks,
            max_num_seqs=settings.max_num_seqs,
            transfer_addresses=tier.transfer_addresses,
            transports=tier.transports,
            kernels=await asyncio.to_thread(describe_kernels, model, settings.compute, settings.model),
        )


def run_worker(settings: WorkerSettings, role_name: str, make_process: Callable[[], WorkerProcess]) -> int:
    """Set up logging and tracing, run a worker to its end, and return the process's exit code."""
    configure_logging(role_name, settings.log_json, settings.log_level)
    configure_tracing(f"kvrelay-{role_name}", settings.otlp_endpoint)
    share_cores(settings.nice, settings.time_slice_us)
    try:
        with stops_at_once(f"kvrelay {role_name}"):
            return asyncio.run(make_process().run())
    except EngineError as error:
        _log.error("worker.failed", error=str(error))
        return 1
    finally:
        shutdown_tracing()
