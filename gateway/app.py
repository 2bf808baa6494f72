"""The gateway put together: parts, server, readiness, drain.

`__main__.py` runs it as a process; tests and the local cluster run it inside their own loop.
"""

import asyncio
import secrets

import structlog

from engine.clock import Clock, SystemClock
from engine.model.files.source import ModelSource, resolve_model
from engine.worker_types import WorkerRole
from gateway.front.http.app import HttpFront
from gateway.front.http.server import HttpServer
from gateway.front.server_info import ServerInfo
from gateway.front.servicer import SERVICE_NAME as INFERENCE_SERVICE
from gateway.front.servicer import InferenceServicer
from gateway.relay.generation import Generation, GenerationParts
from gateway.relay.relay import RelayLimits
from gateway.relay.tokenizer import TokenizerService
from gateway.routing.admission import Admission
from gateway.routing.prefill_gate import PrefillGate
from gateway.routing.router import AffinityLimits, Router
from gateway.settings import GatewaySettings
from gateway.workers.pool import WorkerPool
from gateway.workers.registry import WorkerRegistry
from gateway.workers.registry_servicer import SERVICE_NAME as REGISTRY_SERVICE
from gateway.workers.registry_servicer import RegistryServicer
from gateway.workers.session import SessionLimits
from kvrelay.channel import PUBLIC_MAX_MESSAGE_BYTES
from kvrelay.serving.heap import freeze_start_up
from kvrelay.serving.server import ServiceServer
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from kvrelay.v1.inference_service_pb2_grpc import add_InferenceServiceServicer_to_server
from kvrelay.v1.registry_service_pb2_grpc import add_RegistryServiceServicer_to_server

_log = structlog.get_logger(__name__)

_CUT_MARGIN_S = 5.0
"""Time that requests cut at the end of the drain have to tell their clients."""


class Gateway:
    """One gateway in the running event loop.

    Invariant: the public service is SERVING exactly while a decode session is usable and no drain has begun.
    """

    def __init__(
        self, settings: GatewaySettings, source: ModelSource, tokenizer: Tokenizer, clock: Clock | None = None
    ) -> None:
        clock = clock or SystemClock()
        self._settings = settings
        self.model_name = settings.served_model_name or source.name
        """What requests and workers call the model."""
        self.server = ServiceServer(
            host=settings.host,
            port=settings.port,
            service_names=(INFERENCE_SERVICE, REGISTRY_SERVICE),
            traced_services=(INFERENCE_SERVICE,),
            max_message_bytes=PUBLIC_MAX_MESSAGE_BYTES,
        )
        self.tokenizer = TokenizerService(tokenizer)
        self.registry = WorkerRegistry(
            model_name=self.model_name,
            tokenizer_vocab_size=tokenizer.vocab_size,
            keep_alive_interval_s=settings.keep_alive_interval_s,
            clock=clock,
        )
        session_limits = SessionLimits(
            ready_timeout_s=settings.session_ready_timeout_s, silence_s=settings.worker_silence_s
        )
        self.pool = WorkerPool(self.registry, clock=clock, limits=session_limits)
        self.router = Router(
            self.pool, AffinityLimits(capacity=settings.prefix_affinity_entries), self.tokenizer.common_prefix()
        )
        self.prefill_gate = PrefillGate(settings.max_prefill_tokens, lambda: len(self.pool.usable(WorkerRole.PREFILL)))
        self.admission = Admission(
            max_running=settings.max_running_requests,
            max_queued=settings.max_queued_requests,
            queue_timeout_s=settings.queue_timeout_s,
            clock=clock,
        )
        self.generation = Generation(
            GenerationParts(
                self.tokenizer, self.registry, self.pool, self.router, self.admission, self.prefill_gate, clock
            ),
            model_names=tuple(dict.fromkeys((self.model_name, source.name))),
            max_prompt_bytes=settings.max_prompt_bytes,
            relay_limits=RelayLimits(
                max_attempts=settings.max_attempts,
                local_prefill_max_tokens=settings.local_prefill_max_tokens,
                worker_wait_s=settings.worker_wait_s,
            ),
        )
        self.info = ServerInfo(
            model_name=self.model_name,
            tokenizer=self.tokenizer,
            registry=self.registry,
            pool=self.pool,
            admission=self.admission,
            generation=self.generation,
            clock=clock,
            instance_id=settings.instance_id or secrets.token_hex(8),
        )
        self.http: HttpServer | None = None
        if settings.http_port is not None:
            front = HttpFront(
                self.generation,
                self.tokenizer,
                self.info,
                clock=clock,
                max_body_bytes=settings.max_body_bytes,
                write_timeout_s=settings.write_timeout_s,
            )
            self.http = HttpServer(front.app(), settings.host, settings.http_port, settings.write_timeout_s)
        self.pool.subscribe(self._update_readiness)
        self.pool.subscribe(self.prefill_gate.let_pass)
        self.pool.subscribe_gone(self.router.forget_worker)

    @property
    def address(self) -> str:
        """`host:port` of the public API, once started."""
        return self.server.address

    async def start(self) -> None:
        """Bind and answer; readiness follows the decode workers.

        Raises:
            InvalidRequest: the address cannot be used.
        """
        servicer = InferenceServicer(
            self.generation,
            self.tokenizer,
            self.info,
            clock=SystemClock(),
            write_timeout_s=self._settings.write_timeout_s,
        )
        add_InferenceServiceServicer_to_server(servicer, self.server.grpc_server)
        add_RegistryServiceServicer_to_server(RegistryServicer(self.registry), self.server.grpc_server)
        await self.server.start()
        if self.http is not None:
            await self.http.start()
        self.server.health.set_serving(REGISTRY_SERVICE)
        self.server.create_task(self._expire_workers(), "expire workers")

    async def run_until_signal(self) -> int:
        """Serve until SIGTERM or SIGINT, drain, stop, and return the exit code."""
        timeout_s = self._settings.drain_timeout_s + _CUT_MARGIN_S
        try:
            return await self.server.run_until_signal(on_drain=self.drain, drain_timeout_s=timeout_s)
        finally:
            await self.stop()

    async def drain(self) -> None:
        """Refuse new requests and finish the running ones, within the limit of the settings."""
        self.server.health.set_not_serving(INFERENCE_SERVICE)
        await self.generation.drain(self._settings.drain_timeout_s)

    async def stop(self) -> None:
        """Stop answering, end the sessions and wait for all of it."""
        if self.http is not None:
            await self.http.stop(_CUT_MARGIN_S)
        await self.server.stop()
        await self.pool.close()
        self.tokenizer.close()

    def _update_readiness(self) -> None:
        if self.pool.usable(WorkerRole.DECODE) and not self.generation.is_draining:
            self.server.health.set_serving(INFERENCE_SERVICE)
        else:
            self.server.health.set_not_serving(INFERENCE_SERVICE)

    async def _expire_workers(self) -> None:
        while True:
            await asyncio.sleep(self.registry.keep_alive_interval_s)
            self.registry.expire()


async def serve(settings: GatewaySettings) -> int:
    """Load the tokenizer, run a gateway until a signal, and return the exit code.

    Args:
        settings: The process's settings.

    Raises:
        InvalidRequest: a setting cannot be used.
    """
    source = await asyncio.to_thread(resolve_model, settings.model)
    tokenizer = await asyncio.to_thread(load_tokenizer, source.path)
    gateway = Gateway(settings, source, tokenizer)
    freeze_start_up()
    try:
        await gateway.start()
        running = asyncio.ensure_future(gateway.run_until_signal())
        # One turn of the loop, so that signals are handled before anybody is told that there is a process to signal.
        await asyncio.sleep(0)
        _log.info("gateway.started", address=gateway.address, model=gateway.model_name)
        return await running
    finally:
        await gateway.stop()
