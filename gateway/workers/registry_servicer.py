"""RegistryService: workers make themselves known. Turns messages into values; `registry.py` decides."""

import grpc
import grpc.aio

from engine.types import Incarnation, WorkerId
from gateway.workers.registry import WorkerRegistry
from kvrelay.v1 import registry_service_pb2 as registry_pb2
from kvrelay.v1 import registry_service_pb2_grpc
from kvrelay.wire.engine.workers import worker_info_from_proto

SERVICE_NAME = "kvrelay.v1.RegistryService"


class RegistryServicer(registry_service_pb2_grpc.RegistryServiceServicer):
    """Serves the registry. One event loop."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry

    async def Register(
        self,
        request: registry_pb2.RegisterRequest,
        context: grpc.aio.ServicerContext[registry_pb2.RegisterRequest, registry_pb2.RegisterResponse],
    ) -> registry_pb2.RegisterResponse:
        """Make a worker known.

        FAILED_PRECONDITION tells why its model or layout does not fit, ALREADY_EXISTS that its name is in use.
        """
        self._registry.register(worker_info_from_proto(request))
        interval_ms = round(self._registry.keep_alive_interval_s * 1000)
        return registry_pb2.RegisterResponse(keep_alive_interval_ms=interval_ms)

    async def KeepAlive(
        self,
        request: registry_pb2.KeepAliveRequest,
        context: grpc.aio.ServicerContext[registry_pb2.KeepAliveRequest, registry_pb2.KeepAliveResponse],
    ) -> registry_pb2.KeepAliveResponse:
        """Renew a registration; NOT_FOUND asks for a new Register."""
        worker_id, incarnation = WorkerId(request.worker_id), Incarnation(request.incarnation)
        if not self._registry.keep_alive(
            worker_id, incarnation, is_draining=request.is_draining, is_stalled=request.is_stalled
        ):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"worker {worker_id} is not registered; register again")
        return registry_pb2.KeepAliveResponse()

    async def Deregister(
        self,
        request: registry_pb2.DeregisterRequest,
        context: grpc.aio.ServicerContext[registry_pb2.DeregisterRequest, registry_pb2.DeregisterResponse],
    ) -> registry_pb2.DeregisterResponse:
        """Forget a worker; one that is not known is forgotten already."""
        self._registry.deregister(WorkerId(request.worker_id), Incarnation(request.incarnation))
        return registry_pb2.DeregisterResponse()
