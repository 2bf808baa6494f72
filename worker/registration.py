"""Registration: makes this worker known to its gateway and keeps it so until the end.

A gateway that restarts has forgotten its workers; KeepAlive then answers NOT_FOUND and the worker registers again.
"""

import asyncio
import contextlib
from collections.abc import Callable

import grpc
import grpc.aio
import structlog

from engine.worker_types import WorkerInfo
from kvrelay.channel import channel_options
from kvrelay.v1 import registry_service_pb2 as pb
from kvrelay.v1 import registry_service_pb2_grpc
from kvrelay.wire.engine.workers import worker_info_to_proto
from kvrelay.wire.status import from_rpc_error
from worker.step_watch import StepWatch

RETRY_INTERVAL_S = 0.5
RPC_TIMEOUT_S = 5.0
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)

_log = structlog.get_logger(__name__)


class Registration:
    """Keeps one worker registered with one gateway.

    Args:
        gateway: The gateway's address, host:port.
        info: What to register.
        is_draining: Read before each KeepAlive.
        watch: Says before each KeepAlive whether the engine hangs.
    """

    def __init__(self, gateway: str, info: WorkerInfo, is_draining: Callable[[], bool], watch: StepWatch) -> None:
        self._gateway = gateway
        self._info = info
        self._is_draining = is_draining
        self._watch = watch
        self._channel = grpc.aio.insecure_channel(gateway, options=channel_options())
        self._stub = registry_service_pb2_grpc.RegistryServiceStub(self._channel)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Register and keep alive until cancelled.

        Raises:
            EngineError: The gateway refuses this worker for good, e.g. because its KV layout does not fit.
        """
        while True:
            interval_s = await self._register()
            while await self._keep_alive(interval_s):
                pass

    def report_now(self) -> None:
        """Tell the gateway now rather than at the next KeepAlive that this worker drains, or hangs, or moves again."""
        self._wake.set()

    async def close(self) -> None:
        """Deregister, if the gateway can be reached, and close the channel."""
        request = pb.DeregisterRequest(worker_id=self._info.worker_id, incarnation=self._info.incarnation)
        try:
            await self._stub.Deregister(request, timeout=1.0)
        except grpc.aio.AioRpcError as error:
            _log.debug("registration.deregister_failed", code=error.code().name)
        await self._channel.close()

    async def _register(self) -> float:
        """Register, trying until it works; returns the keep-alive interval in seconds."""
        told: grpc.StatusCode | None = None
        while True:
            try:
                response = await self._stub.Register(worker_info_to_proto(self._info), timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() in _REFUSALS:
                    raise from_rpc_error(error) from error
                if error.code() is not told:
                    # Somebody has to do something about a name in use; a gateway that is not there yet will come.
                    log = _log.warning if error.code() is grpc.StatusCode.ALREADY_EXISTS else _log.info
                    log("registration.waiting", gateway=self._gateway, code=error.code().name, reason=error.details())
                    told = error.code()
                await asyncio.sleep(RETRY_INTERVAL_S)
            else:
                _log.info("registration.registered", gateway=self._gateway, worker_id=self._info.worker_id)
                return float(response.keep_alive_interval_ms) / 1000

    async def _keep_alive(self, interval_s: float) -> bool:
        """Wait one interval and renew; False when the worker must register again."""
        # Not wait_for: until Python 3.12 it may swallow a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._wake.wait()
        self._wake.clear()
        request = pb.KeepAliveRequest(
            worker_id=self._info.worker_id,
            incarnation=self._info.incarnation,
            is_draining=self._is_draining(),
            step_age_ms=round(1000 * self._watch.step_age_s),
            is_stalled=self._watch.is_stalled,
        )
        try:
            await self._stub.KeepAlive(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            _log.info("registration.lost", gateway=self._gateway, code=error.code().name)
            return False
        return True
