"""Granting of reservations: all that fit between two steps, in order, and whatever goes wrong ends one request only."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decode_service import handoffs
from decode_service.handoffs import Handoffs
from decode_service.request import DecodeRequest, Phase
from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.engine import Granted
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import EngineRequest, Incarnation, RequestId, SamplingParams, WorkerId
from kvrelay.errors import ContextTooLong, DeviceError
from tests.fakes_handoff import until
from tests.fakes_transport import ArrayCache, tiny_layout
from worker.sessions.session import GatewaySession
from worker.step_watch import StepWatch
from worker.tier import WorkerContext

STEP_S = 0.05
NUM_BLOCKS = 64


class FakeEngine:
    """Reservations of a real scheduler; some requests break it."""

    def __init__(self, num_blocks: int) -> None:
        pool = BlockPool(num_blocks, 16, enable_prefix_cache=False)
        self.scheduler = Scheduler(SchedulerConfig(), pool, max_position=4096, eos_token_ids=frozenset())
        self.pool = pool
        self.errors: dict[RequestId, Exception] = {}

    def reserve(self, request: EngineRequest) -> Granted | None:
        if request.request_id in self.errors:
            raise self.errors[request.request_id]
        sequence = Sequence(request)
        return Granted(tuple(sequence.block_table), 0) if self.scheduler.reserve(sequence) else None

    def remove(self, request_ids: list[RequestId]) -> None:
        for request_id in request_ids:
            self.scheduler.remove(request_id)


class SlowLoop:
    """An engine's thread that is always in a step: a call waits for its end."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.num_calls = 0
        self.during_step: Callable[[], None] = lambda: None
        self.failure: Exception | None = None

    async def call(self, function: Callable[[Any], Any]) -> Any:
        self.num_calls += 1
        await asyncio.sleep(STEP_S)
        if self.failure is not None:
            raise self.failure
        result = function(self.engine)
        self.during_step()
        return result


class Decode:
    """The reservations of one decode worker."""

    def __init__(self, num_blocks: int) -> None:
        self.engine = FakeEngine(num_blocks)
        self.loop = SlowLoop(self.engine)
        self.failures: list[tuple[int, BaseException]] = []
        layout = tiny_layout()
        context = WorkerContext(
            worker_id=WorkerId("d0"),
            incarnation=Incarnation(1),
            engine_loop=self.loop,  # type: ignore[arg-type]  # only `call` is used
            kv_cache=ArrayCache(layout, num_blocks),  # type: ignore[arg-type]  # only a block sink is used
            layout=layout,
            device="cpu",
            address="127.0.0.1:1",
            spawn=lambda work, name: asyncio.get_running_loop().create_task(work, name=name),
            watch=StepWatch(lambda: 0.0, 5.0, None, lambda is_stalled: None),
        )
        self.session = GatewaySession()
        self.handoffs = Handoffs(context, 256, lambda entry, record: None, self._failed)

    def request(self, request_id: int, num_tokens: int = 16, deadline_s: float = 100.0) -> DecodeRequest:
        """Queue one request."""
        now = time.monotonic()
        params = SamplingParams(max_tokens=4)
        entry = DecodeRequest(
            EngineRequest(RequestId(request_id), tuple(range(num_tokens)), params, num_tokens),
            attempt=1,
            session=self.session,
            ttl_s=60.0,
            deadline=now + deadline_s,
            queued_until=now + 100.0,
            traceparent="",
        )
        self.handoffs.request(entry)
        return entry

    def _failed(self, entry: DecodeRequest, error: BaseException) -> None:
        self.failures.append((entry.request_id, error))
        self.handoffs.withdraw(entry)


@asynccontextmanager
async def decode(num_blocks: int = NUM_BLOCKS) -> AsyncIterator[Decode]:
    worker = Decode(num_blocks)
    task = asyncio.get_running_loop().create_task(worker.handoffs._grant_loop())
    try:
        yield worker
        assert not task.done(), "granting has stopped"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _is_reserved(*entries: DecodeRequest) -> bool:
    return all(entry.phase is Phase.RESERVED for entry in entries)


async def test_sixteen_reservations_take_about_one_step() -> None:
    async with decode() as worker:
        started = time.monotonic()
        entries = [worker.request(number) for number in range(1, 17)]
        await until(lambda: _is_reserved(*entries))
        assert time.monotonic() - started < 4 * STEP_S
        assert worker.loop.num_calls <= 2
        assert worker.handoffs.num_leases == 16


async def test_the_head_is_never_overtaken_by_one_that_would_fit() -> None:
    async with decode(num_blocks=8) as worker:
        first = worker.request(1, num_tokens=80, deadline_s=10)
        large = worker.request(2, num_tokens=80, deadline_s=20)
        small = worker.request(3, num_tokens=1, deadline_s=30)
        await until(lambda: _is_reserved(first))
        await asyncio.sleep(3 * STEP_S)
        assert not _is_reserved(large)
        assert not _is_reserved(small)
        worker.handoffs.withdraw(first)
        worker.engine.remove([first.request_id])
        await until(lambda: _is_reserved(large, small))


async def test_free_blocks_are_found_though_nobody_says_so() -> None:
    async with decode(num_blocks=2) as worker:
        first, second = worker.request(1), worker.request(2)
        await until(lambda: _is_reserved(first))
        await asyncio.sleep(2 * STEP_S)  # the second is refused
        worker.handoffs.withdraw(first)
        worker.engine.remove([first.request_id])
        await until(lambda: _is_reserved(second), handoffs.LOOK_AGAIN_S + 10 * STEP_S)


async def test_what_is_withdrawn_while_it_is_granted_gives_its_blocks_back() -> None:
    async with decode() as worker:
        entries = [worker.request(number) for number in range(1, 5)]
        worker.loop.during_step = lambda: worker.handoffs.withdraw(entries[1])
        await until(lambda: _is_reserved(entries[0], *entries[2:]))
        await until(lambda: worker.engine.pool.num_free_blocks == NUM_BLOCKS - 3 * 2)
        assert entries[1].phase is Phase.QUEUED
        assert worker.handoffs.num_leases == 3


async def test_a_more_urgent_one_that_comes_meanwhile_goes_first() -> None:
    async with decode(num_blocks=3) as worker:
        patient = worker.request(1, deadline_s=50)
        urgent: list[DecodeRequest] = []

        def arrive() -> None:
            if not urgent:
                urgent.append(worker.request(2, deadline_s=5))

        worker.loop.during_step = arrive
        await until(lambda: bool(urgent) and _is_reserved(*urgent))
        await asyncio.sleep(2 * STEP_S)
        assert patient.phase is Phase.QUEUED
        assert worker.engine.pool.num_free_blocks == 1


@pytest.mark.parametrize("error", [ContextTooLong("prompt", "too long"), RuntimeError("a bug")])
async def test_an_error_of_one_request_ends_that_one_only(error: Exception) -> None:
    async with decode() as worker:
        worker.engine.errors[RequestId(2)] = error
        entries = [worker.request(number) for number in range(1, 4)]
        await until(lambda: _is_reserved(entries[0], entries[2]))
        assert worker.failures == [(2, error)]
        assert worker.handoffs.num_queued == 0


async def test_a_grant_that_cannot_be_told_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with decode() as worker:
        entries = [worker.request(number) for number in range(1, 4)]
        monkeypatch.setattr(worker.session, "tell", _failing_for(2, worker.session.tell))
        await until(lambda: _is_reserved(entries[0], entries[2]))
        assert [(number, type(error)) for number, error in worker.failures] == [(2, KeyError)]
        assert worker.handoffs.num_leases == 2


def _failing_for(request_id: int, tell: Callable[[RequestId, Any], None]) -> Callable[[RequestId, Any], None]:
    def failing(number: RequestId, event: Any) -> None:
        if number == request_id:
            raise KeyError(number)
        tell(number, event)

    return failing


async def test_an_engine_that_is_gone_ends_all_that_wait() -> None:
    async with decode() as worker:
        worker.loop.failure = DeviceError("the engine failed")
        for number in range(1, 4):
            worker.request(number)
        await until(lambda: len(worker.failures) == 3)
        assert worker.handoffs.num_queued == 0
