"""RegistryService: workers make themselves known. Turns messages into values; `registry.py` decides."""

import grpc
import grpc.aio

from engine.types import Incarnation, WorkerId
from gateway.workers.registry import WorkerInfo, WorkerRegistry, WorkerRole
from kvrelay.errors import InvalidRequest
from kvrelay.v1 import registry_service_pb2 as registry_pb2
from kvrelay.v1 import registry_service_pb2_grpc
from kvrelay.wire.layout import layout_from_proto

SERVICE_NAME = "kvrelay.v1.RegistryService"

_ROLES = {
    registry_pb2.WORKER_ROLE_PREFILL: WorkerRole.PREFILL,
    registry_pb2.WORKER_ROLE_DECODE: WorkerRole.DECODE,
}


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
        self._registry.register(_to_info(request))
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


def _to_info(message: registry_pb2.RegisterRequest) -> WorkerInfo:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest("role", "must be WORKER_ROLE_PREFILL or WORKER_ROLE_DECODE")
    if not message.HasField("layout"):
        raise InvalidRequest("layout", "is missing")
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        role=role,
        address=message.address,
        model_name=message.model_name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        layout=layout_from_proto(message.layout),
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        transfer_addresses=tuple(message.transfer_addresses),
        transports=tuple(message.transports),
        kernels=message.kernels,
    )
