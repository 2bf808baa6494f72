"""Hand-offs of really computed prompts with the way of sending forced: layer by layer, at once, or as it would be.

One engine in this process, the receiver in the other one, so that what differs is only how the frames leave.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import torch

from benchmarks.transfer.receiver_process import OpenedReceiver, opened_receiver, receiver_process
from engine.engine import ChunkProgress, Engine
from engine.loop import EngineLoop
from engine.types import EngineRequest, Incarnation, RequestId, SamplingParams, SequenceOutput, WorkerId
from engine.worker_types import TransferStats
from kv_transfer.handoff.export import Export
from kv_transfer.handoff.exporter import Exporter
from kvrelay.errors import DeviceError
from prefill_service.settings import PrefillSettings
from worker.compute.bootstrap import build_engine
from worker.transports import make_transports

MODES: dict[str, bool | None] = {"adaptive": None, "layerwise": True, "oneshot": False}
"""Name and what `Exporter.begin` is told. `adaptive` is what workers do."""
EXPORTED_TOKENS = 2
"""More than one, or the request would end on its first token and hand nothing over."""


@dataclass(frozen=True, slots=True)
class HandoffSample:
    """One hand-off."""

    total_s: float
    """From the request to the engine until the receiver owns the KV."""
    stats: TransferStats


class PrefillSide:
    """A prefill worker without its service. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._export: Export | None = None
        self._first: asyncio.Future[SequenceOutput] | None = None
        self._ids = itertools.count(1)

    def on_layer(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        """See `ExportListener.on_layer`; on the engine's thread."""
        self._loop.call_soon_threadsafe(self._layer_ready, layer, progress)

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs, on the engine's thread."""
        self._loop.call_soon_threadsafe(self._first_token, outputs[0])

    def failed(self, error: BaseException) -> None:
        """Take the engine's end, on its thread."""
        self._loop.call_soon_threadsafe(self._give_up, error)

    def _layer_ready(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        if self._export is not None:
            for chunk in progress:
                self._export.layer_ready(layer, chunk.num_tokens, chunk.block_ids)

    def _first_token(self, output: SequenceOutput) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(output)

    def _give_up(self, error: BaseException) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_exception(DeviceError(f"the engine failed: {error}"))

    async def hand_off(self, engine_loop: EngineLoop, export: Export, token_ids: Sequence[int]) -> HandoffSample:
        """Compute a prompt and hand its KV over."""
        request_id = RequestId(next(self._ids))
        params = SamplingParams(max_tokens=EXPORTED_TOKENS, temperature=0.0, ignore_eos=True)
        request = EngineRequest(request_id, tuple(token_ids), params, len(token_ids))
        self._first = self._loop.create_future()
        self._export = export
        started = time.perf_counter()
        try:
            await engine_loop.call(lambda engine: engine.add_handoff(request))
            await self._first
            stats = await export.finish(b"")
            return HandoffSample(time.perf_counter() - started, stats)
        finally:
            self._export = None
            await engine_loop.call(lambda engine: _remove(engine, request_id))


def _remove(engine: Engine, request_id: RequestId) -> None:
    engine.remove([request_id])


class HandoffBench:
    """Hand-offs from an engine here into the other process."""

    def __init__(self, side: PrefillSide, engine_loop: EngineLoop, exporter: Exporter, opened: OpenedReceiver) -> None:
        self._side = side
        self._engine_loop = engine_loop
        self._exporter = exporter
        self._opened = opened

    async def run(self, token_ids: Sequence[int], mode: str) -> HandoffSample:
        """Hand one prompt over in one of `MODES`."""
        handle = await self._opened.reserve(len(token_ids))
        async with self._exporter.begin(handle, is_layerwise=MODES[mode]) as export:
            return await self._side.hand_off(self._engine_loop, export, token_ids)


@asynccontextmanager
async def handoff_bench(
    model: str, scheme: str, worker_args: Sequence[str], longest: int
) -> AsyncIterator[HandoffBench]:
    """Load the model here and open a receiver for its KV in another process.

    Args:
        model: As `--model` takes it.
        scheme: The transport.
        worker_args: More worker flags, as a prefill worker would get them.
        longest: Most tokens of a prompt.
    """
    settings = PrefillSettings.parse(
        ["--model", model, "--speculation", "none", "--no-prefix-cache", *worker_args], "kvrelay bench transfer"
    )
    async with AsyncExitStack() as stack:
        side = PrefillSide()
        threads = torch.get_num_threads()
        stack.callback(torch.set_num_threads, threads)
        engine_loop = EngineLoop(
            lambda: build_engine(settings, side), side.deliver, lambda error, request_ids: side.failed(error)
        )
        stack.push_async_callback(engine_loop.stop)
        await engine_loop.start()
        cache = await engine_loop.call(lambda engine: engine.kv_cache)
        process = await stack.enter_async_context(receiver_process())
        opened = await stack.enter_async_context(opened_receiver(process, cache.layout, longest))
        exporter = Exporter(cache, WorkerId("bench-prefill"), Incarnation(1), make_transports(settings), scheme=scheme)
        stack.push_async_callback(exporter.close)
        exporter.update_peers([opened.peer()])
        yield HandoffBench(side, engine_loop, exporter, opened)
