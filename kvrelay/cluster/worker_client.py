"""WorkerClient: questions and orders to one worker itself, past the gateway. For operators and for the ready banner."""

from collections.abc import Awaitable
from types import TracebackType
from typing import Any, Self

import grpc.aio

from engine.worker_types import WorkerLoad
from kvrelay.channel import channel_options
from kvrelay.target import parse_target
from kvrelay.v1 import worker_service_pb2 as pb
from kvrelay.v1 import worker_service_pb2_grpc
from kvrelay.wire.engine.workers import ModelInfo, load_from_proto, model_info_from_proto
from kvrelay.wire.status import from_rpc_error

_TIMEOUT_S = 5.0
_DRAIN_MARGIN_S = 5.0


class WorkerClient:
    """One channel to one worker. All methods raise the typed errors of `kvrelay.errors`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(parse_target(address), options=channel_options())
        self._stub: Any = worker_service_pb2_grpc.WorkerServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    async def model_info(self) -> ModelInfo:
        """Return the model and the KV cache."""
        return model_info_from_proto(
            await _answer(self._stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_TIMEOUT_S))
        )

    async def load(self) -> WorkerLoad:
        """Return the load now."""
        response = await _answer(self._stub.GetLoads(pb.GetLoadsRequest(), timeout=_TIMEOUT_S))
        return load_from_proto(response.load)

    async def flush_cache(self) -> int:
        """Forget every cached prefix that nobody uses; returns the number of blocks."""
        response = await _answer(self._stub.FlushCache(pb.FlushCacheRequest(), timeout=_TIMEOUT_S))
        return int(response.num_blocks)

    async def drain(self, timeout_s: float) -> int:
        """Have the worker refuse new requests, and wait for the running ones; returns how many still run."""
        request = pb.DrainRequest(timeout_ms=max(1, round(timeout_s * 1000)))
        response = await _answer(self._stub.Drain(request, timeout=timeout_s + _DRAIN_MARGIN_S))
        return int(response.num_running)


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
