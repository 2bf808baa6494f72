"""The standard health protocol on asyncio servers.

Owns who counts as ready: "" says that the process lives, a full service name says that the service takes requests.
Never decides that itself; services call `Health.set_serving`. Added to every server by `kvrelay/serving/server.py`.
"""

import asyncio
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

# Enum values of HealthCheckResponse.ServingStatus, which the type stubs only know as numbers.
_SERVING: Final[int] = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final[int] = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: Final[int] = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):
    """Servicer of `grpc.health.v1.Health` with plain, synchronous setters.

    Belongs to the event loop that serves it. The library's own asyncio servicer keeps its watchers waiting for ever,
    so that a single watcher makes every shutdown last its whole grace period; here `shut_down` ends them.
    """

    def __init__(self) -> None:
        self._statuses = {"": _SERVING}
        self._changed = asyncio.Event()
        self._is_shut_down = False

    def set_serving(self, service_name: str) -> None:
        """Say that the service takes requests. Ignored after `shut_down`."""
        self._set(service_name, _SERVING)

    def set_not_serving(self, service_name: str) -> None:
        """Say that the service takes no requests for now."""
        self._set(service_name, _NOT_SERVING)

    def is_serving(self, service_name: str) -> bool:
        """Whether the service was last said to take requests."""
        return self._statuses.get(service_name) == _SERVING

    def enter_drain(self) -> None:
        """Turn every named service NOT_SERVING for good; the process still counts as alive."""
        for service_name in list(self._statuses):
            if service_name:
                self._set(service_name, _NOT_SERVING)
        self._is_shut_down = True

    def shut_down(self) -> None:
        """Turn everything NOT_SERVING for good and end all watchers."""
        self.enter_drain()
        self._statuses[""] = _NOT_SERVING
        self._wake_watchers()

    def _set(self, service_name: str, status: int) -> None:
        if self._is_shut_down or self._statuses.get(service_name) == status:
            return
        self._statuses[service_name] = status
        self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(  # noqa: N802 - the wire contract's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        """Answer with the service's status; NOT_FOUND for a name nobody set, as the protocol asks."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no health is known of {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - the wire contract's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> None:
        """Send the service's status now and at every change, until the server shuts down."""
        last_status: int | None = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _SERVICE_UNKNOWN)
            if status != last_status:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last_status = status
            if self._statuses[""] == _NOT_SERVING:
                return
            await changed.wait()


def add_health(server: grpc.aio.Server) -> Health:
    """Register a health servicer and return it."""
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return health
