"""Real prefill and decode services over tiny models in the test's process, and a driver that plays the gateway.

Everything is as in production (servers, sessions, transports, engines on their threads) but the gateway and signals.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from decode_service.servicer import DecodeServicer
from decode_service.settings import DecodeSettings
from engine.engine import Engine
from engine.loop import EngineLoop
from engine.types import EngineRequest, Incarnation, SequenceOutput, WorkerId
from engine.worker_types import WorkerLoad
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.channel import channel_options
from kvrelay.serving.server import ServiceServer
from kvrelay.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    session_pb2,
)
from kvrelay.wire.engine.layout import layout_to_proto
from kvrelay.wire.engine.outputs import output_from_proto
from kvrelay.wire.engine.requests import engine_request_to_proto
from kvrelay.wire.status import from_status
from prefill_service.servicer import LayerListener, PrefillServicer
from worker.step_watch import StepWatch
from worker.tier import Tier, WorkerContext
from worker.transports import make_transports, required_scheme

DecodeCommand = decode_service_pb2.DecodeServiceSessionRequest
PrefillCommand = prefill_service_pb2.PrefillServiceSessionRequest


@dataclass(slots=True)
class HarnessWorker:
    """A running worker."""

    context: WorkerContext
    tier: Tier[Any]

    async def load(self) -> WorkerLoad:
        """Return the engine's counts."""
        return await self.context.engine_loop.call(lambda engine: engine.load())

    async def check_invariants(self) -> None:
        """Raise AssertionError when the engine's books do not balance."""
        await self.context.engine_loop.call(lambda engine: engine.scheduler.check_invariants())

    async def is_idle(self) -> bool:
        """Whether the pool is whole and no lease, sequence or job is left; the books must balance in any case."""
        load = await self.load()
        await self.check_invariants()
        if load.num_free_blocks != load.num_blocks or load.num_running or load.num_waiting or load.num_parked:
            return False
        return not (await self.tier.read_load()).num_leases


@asynccontextmanager
async def run_decode(
    make_engine: Callable[[], Engine],
    worker_id: str = "d0",
    *,
    transports: TransportRegistry | None = None,
    **settings: Any,
) -> AsyncIterator[HarnessWorker]:
    """Run a decode worker; `settings` are fields of `DecodeSettings`, `transports` what it listens on if not theirs."""
    parsed = DecodeSettings.model_validate(settings)

    def make_tier(context: WorkerContext) -> DecodeServicer:
        scheme = required_scheme(parsed.transport) if transports is None else None
        return DecodeServicer(context, transports or make_transports(parsed), scheme, parsed)

    async with _run_worker(make_engine, worker_id, make_tier) as worker:
        yield worker


@asynccontextmanager
async def run_prefill(
    make_engine: Callable[[LayerListener], Engine],
    worker_id: str = "p0",
    *,
    transport: str = "auto",
    transports: TransportRegistry | None = None,
    commit_timeout_s: float = 10.0,
    answer_timeout_s: float | None = None,
) -> AsyncIterator[HarnessWorker]:
    """Run a prefill worker; its engine must report layers to the listener it is given.

    `transports` are what it connects over, if not the settings'; `answer_timeout_s` is how long it waits for decode's
    HELLO and ACCEPTED.
    """
    listener = LayerListener()

    def make_tier(context: WorkerContext) -> PrefillServicer:
        scheme = required_scheme(transport)
        chosen = transports or make_transports(DecodeSettings.model_validate({}))
        servicer = PrefillServicer(context, chosen, scheme, commit_timeout_s)
        if answer_timeout_s is not None:  # no setting of a worker: nobody but a test is in such a hurry
            servicer._exporter._accept_timeout_s = servicer._exporter._connect_timeout_s = answer_timeout_s
        listener.attach(servicer)
        return servicer

    async with _run_worker(lambda: make_engine(listener), worker_id, make_tier) as worker:
        yield worker


@asynccontextmanager
async def _run_worker(
    make_engine: Callable[[], Engine], worker_id: str, make_tier: Callable[[WorkerContext], Tier[Any]]
) -> AsyncIterator[HarnessWorker]:
    tiers: list[Tier[Any]] = []

    def deliver(outputs: list[SequenceOutput]) -> None:
        tiers[0].deliver(outputs)

    failures: list[BaseException] = []
    engine_loop = EngineLoop(make_engine, deliver, lambda error, request_ids: failures.append(error))
    async with ServiceServer() as server:
        server.bind()
        await engine_loop.start()
        kv_cache = await engine_loop.call(lambda engine: engine.kv_cache)
        context = WorkerContext(
            WorkerId(worker_id),
            Incarnation(hash(worker_id) & 0xFFFF),
            engine_loop,
            kv_cache,
            kv_cache.layout,
            "cpu",
            server.address,
            server.create_task,
            StepWatch(lambda: engine_loop.step_age_s, 5.0, None, lambda is_stalled: None),
        )
        tier = make_tier(context)
        tiers.append(tier)
        tier.add_to(server.grpc_server)
        await tier.open()
        await server.start()
        try:
            yield HarnessWorker(context, tier)
        finally:
            await tier.close()
            await engine_loop.stop()
    assert not failures, failures


@dataclass(slots=True)
class Reply:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    transfer: session_pb2.TransferStats | None = None
    num_cached_tokens: int = 0


class Driver:
    """Plays the gateway: one session per worker, requests by hand-off or local prefill."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._events: dict[int, asyncio.Queue[Any]] = {}
        self._decode: Any = None
        self._prefill: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        self._write_lock = asyncio.Lock()
        self.num_step_messages = 0
        self.has_heard_the_end = False
        """Whether a worker said that its session is over."""
        self.traceparent = ""
        """Trace context that goes with every command."""

    async def connect(self, decode: HarnessWorker, prefill: HarnessWorker | None) -> None:
        """Open the sessions and announce decode to prefill."""
        channel = await self._channel(decode)
        self._decode = decode_service_pb2_grpc.DecodeServiceStub(channel).Session()
        self._tasks.append(asyncio.create_task(self._read(self._decode)))
        if prefill is not None:
            channel = await self._channel(prefill)
            self._prefill = prefill_service_pb2_grpc.PrefillServiceStub(channel).Session()
            self._tasks.append(asyncio.create_task(self._read(self._prefill)))
            await self.announce([decode])

    async def announce(self, workers: Sequence[HarnessWorker]) -> None:
        """Tell the prefill worker which decode workers there are."""
        peers = prefill_service_pb2.UpdatePeersCommand(peers=[peer_of(worker) for worker in workers])
        await self._write(self._prefill, PrefillCommand(update_peers=peers))

    async def _channel(self, worker: HarnessWorker) -> grpc.aio.Channel:
        channel = grpc.aio.insecure_channel(worker.context.address, options=channel_options())
        return await self._stack.enter_async_context(channel)

    async def close(self, *, half_close: bool = True) -> None:
        """End the sessions."""
        for call in (self._decode, self._prefill):
            if call is not None:
                if half_close:
                    await call.done_writing()
                else:
                    call.cancel()
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 10)
        await self._stack.aclose()

    async def send_decode(self, command: decode_service_pb2.DecodeServiceSessionRequest) -> None:
        """Send any command to the decode worker."""
        await self._write(self._decode, command)

    async def _write(self, call: Any, command: Any) -> None:
        # A call takes one write at a time.
        async with self._write_lock:
            await call.write(command)

    async def _read(self, call: Any) -> None:
        async for event in call:
            match event.WhichOneof("event"):
                case "step":
                    self.num_step_messages += 1
                    for output in event.step.outputs:
                        self._put(output.request_id, output_from_proto(output))
                case "ending":
                    self.has_heard_the_end = True
                case "reserved" | "committed" | "exported" | "error" as name:
                    body = getattr(event, name)
                    self._put(body.request_id, body)

    def _put(self, request_id: int, event: Any) -> None:
        if request_id in self._events:
            self._events[request_id].put_nowait(event)

    async def reserve(self, request: EngineRequest, attempt: int = 1) -> decode_service_pb2.ReservedEvent:
        """Ask decode for blocks and return its grant."""
        self._events.setdefault(request.request_id, asyncio.Queue())
        message = engine_request_to_proto(request, attempt=attempt, timeout_ms=0, traceparent=self.traceparent)
        await self._write(self._decode, DecodeCommand(reserve=decode_service_pb2.ReserveCommand(request=message)))
        reserved: decode_service_pb2.ReservedEvent = await self.next(request, decode_service_pb2.ReservedEvent)
        return reserved

    async def next(self, request: EngineRequest, kind: type, attempt: int = 0) -> Any:
        """Return the request's next event of a kind; an error event is raised, other kinds are skipped.

        Errors of attempts before `attempt` are old news and skipped as well.
        """
        while True:
            # Not wait_for: until Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(20):
                event = await self._events[request.request_id].get()
            if isinstance(event, session_pb2.RequestError):
                if event.attempt < attempt:
                    continue
                raise from_status(event.status)
            if isinstance(event, kind):
                return event

    async def send_prefill(
        self, request: EngineRequest, reserved: decode_service_pb2.ReservedEvent, attempt: int = 1
    ) -> None:
        """Send a reserved request to the prefill worker."""
        message = engine_request_to_proto(request, attempt=attempt, timeout_ms=0, traceparent=self.traceparent)
        command = prefill_service_pb2.PrefillCommand(request=message, kv_handle=reserved.kv_handle)
        await self._write(self._prefill, PrefillCommand(prefill=command))

    async def supersede(self, request: EngineRequest, attempt: int) -> None:
        """Ask decode to fence the present attempt and grant the next one."""
        command = decode_service_pb2.SupersedeCommand(request_id=request.request_id, attempt=attempt)
        await self._write(self._decode, DecodeCommand(supersede=command))

    async def prefill_locally(self, request: EngineRequest) -> None:
        """Let decode prefill a reserved request."""
        command = decode_service_pb2.PrefillLocallyCommand(request_id=request.request_id)
        await self._write(self._decode, DecodeCommand(prefill_locally=command))

    async def abort(self, request: EngineRequest) -> None:
        """End a request on both tiers."""
        command = session_pb2.AbortCommand(request_ids=[request.request_id])
        await self._write(self._decode, DecodeCommand(abort=command))
        if self._prefill is not None:
            await self._write(self._prefill, PrefillCommand(abort=command))

    async def finish(self, request: EngineRequest) -> Reply:
        """Collect a request's outputs, from whichever tier, until its last."""
        reply = Reply()
        by_index: dict[int, int] = {}
        end: int | None = None
        while end is None or len(by_index) < end:
            event = await self.next(request, object)
            if isinstance(event, decode_service_pb2.CommittedEvent):
                reply.transfer = event.transfer
            elif isinstance(event, SequenceOutput):
                reply.outputs.append(event)
                for offset, token in enumerate(event.token_ids):
                    by_index[event.token_index + offset] = token
                if event.finish_reason is not None:
                    end = event.token_index + len(event.token_ids)
        reply.token_ids = [by_index[index] for index in sorted(by_index)]
        return reply

    async def generate(self, request: EngineRequest) -> Reply:
        """Serve one request by hand-off, as the gateway does."""
        reserved = await self.reserve(request)
        if self._prefill is None:
            await self.prefill_locally(request)
        else:
            await self.send_prefill(request, reserved)
        reply = await self.finish(request)
        reply.num_cached_tokens = reserved.num_cached_tokens
        if reply.transfer is None and any(output.finish_reason for output in reply.outputs[:1]):
            await self.abort(request)  # it ended on its first token: nobody will commit the reservation
        return reply


def peer_of(decode: HarnessWorker) -> prefill_service_pb2.TransferPeer:
    """Return what the registry would announce of a decode worker."""
    return prefill_service_pb2.TransferPeer(
        worker_id=decode.context.worker_id,
        incarnation=decode.context.incarnation,
        addresses=decode.tier.transfer_addresses,
        layout=layout_to_proto(decode.context.layout),
    )


async def settle(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    """Wait until an async condition holds.

    Raises:
        AssertionError: It did not hold in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - the state changes on other threads
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("the condition did not come true in time") from None
