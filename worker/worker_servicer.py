"""WorkerServicer: what every worker answers about itself, whatever its tier."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio

from engine.loop import EngineLoop
from engine.worker_types import WorkerLoad
from kvrelay.v1 import worker_service_pb2 as pb
from kvrelay.v1 import worker_service_pb2_grpc
from kvrelay.wire.engine.workers import ModelInfo, load_to_proto, model_info_to_proto
from worker.kv_events import KvEventLog

LoadReader = Callable[[], Awaitable[WorkerLoad]]
Context = grpc.aio.ServicerContext[object, object]


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Answers WorkerService for one worker.

    Args:
        engine_loop: The engine.
        info: The model and its KV cache.
        read_load: Returns the load now.
        drain: Refuses new requests and waits for the running ones; None = neither Drain nor FlushCache is served.
        default_drain_timeout_s: Used when DrainRequest names none.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        info: ModelInfo,
        read_load: LoadReader,
        drain: Callable[[], Awaitable[None]] | None,
        default_drain_timeout_s: float,
    ) -> None:
        self._engine_loop = engine_loop
        self._info = info
        self._read_load = read_load
        self._drain = drain
        self._default_drain_timeout_s = default_drain_timeout_s
        self._events = KvEventLog(engine_loop)

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Context) -> pb.GetLoadsResponse:
        """Return the load now."""
        return pb.GetLoadsResponse(load=load_to_proto(await self._read_load()))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        """Return the model's and the KV cache's description."""
        return model_info_to_proto(self._info)

    async def SubscribeKvEvents(
        self, request: pb.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[pb.SubscribeKvEventsResponse]:
        """Stream what enters and leaves the prefix cache."""
        async for batch in self._events.subscribe(request.start_sequence_number):
            yield batch

    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Forget every cached prefix that nobody uses."""
        await self._control(context)
        return pb.FlushCacheResponse(num_blocks=await self._engine_loop.call(lambda engine: engine.pool.flush()))

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Refuse new requests and wait for the running ones."""
        drain = await self._control(context)
        timeout_s = request.timeout_ms / 1000 or self._default_drain_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await drain()
        except TimeoutError:
            load = await self._read_load()
            return pb.DrainResponse(num_running=load.num_running + load.num_waiting)
        return pb.DrainResponse()

    async def _control(self, context: Context) -> Callable[[], Awaitable[None]]:
        """Refuse who must not control this worker; returns the drain."""
        if self._drain is None:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, "control of this worker is not served; see --worker-control"
            )
        return self._drain
