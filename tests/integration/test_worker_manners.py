"""What a worker's sessions may and may not do to one another, and what becomes of a command that goes wrong."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from engine.types import EngineRequest, RequestId
from kvrelay.cluster.worker_client import WorkerClient
from kvrelay.errors import EngineError, LeaseUnknown, SamplingFailed, StepFailed
from kvrelay.v1 import decode_service_pb2, session_pb2, worker_service_pb2_grpc
from kvrelay.wire.engine.workers import ModelInfo
from tests.engine_driver import make_engine, make_request, run_alone
from tests.tiny_models import TINY_FAMILIES, write_tiny_model
from tests.worker_harness import DecodeCommand, Driver, run_decode, run_prefill, settle
from worker.kv_events import KvEventLog
from worker.worker_servicer import WorkerServicer

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module", name="model")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, TINY_FAMILIES["llama"])
    return folder


def _request(request_id: int) -> EngineRequest:
    return make_request(request_id, [5 + request_id] * 20, max_tokens=8, ignore_eos=True)


async def test_session_acts_on_its_own_requests_only(model: Path) -> None:
    """Aborts, renewals, supersedes and local prefills of another session's request do nothing to it."""
    async with run_decode(lambda: make_engine(model)) as decode:
        owner, stranger = Driver(), Driver()
        await owner.connect(decode, None)
        await stranger.connect(decode, None)
        request = _request(1)
        await owner.reserve(request)
        stranger._events[1] = asyncio.Queue()
        await stranger.send_decode(DecodeCommand(abort=session_pb2.AbortCommand(request_ids=[1])))
        await stranger.send_decode(DecodeCommand(renew=decode_service_pb2.RenewCommand(request_ids=[1])))
        await stranger.supersede(request, 2)
        with pytest.raises(LeaseUnknown):
            await stranger.next(request, object)
        await stranger.prefill_locally(request)
        with pytest.raises(LeaseUnknown):
            await stranger.next(request, object)
        assert (await decode.tier.read_load()).num_leases == 1
        await owner.prefill_locally(request)
        reply = await owner.finish(request)
        assert reply.token_ids == run_alone(make_engine(model), [request])[1]
        await stranger.close()
        await owner.close()
        await settle(decode.is_idle)


async def test_defect_while_a_command_is_handled_is_told_and_ends_no_session(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_decode(lambda: make_engine(model)) as decode:
        driver = Driver()
        await driver.connect(decode, None)
        beside, broken = _request(1), _request(2)
        await driver.reserve(beside)

        def fail(*_arguments: Any) -> None:
            raise KeyError("a defect")

        engine = await decode.context.engine_loop.call(lambda engine: engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "prefill_locally", fail)
            await driver.reserve(broken)
            await driver.prefill_locally(broken)
            with pytest.raises(EngineError, match="internal error"):
                await driver.finish(broken)
            patch.setattr(engine, "reserve", fail)
            patch.setattr(engine, "reserve_all", fail, raising=False)
            with pytest.raises(EngineError, match="internal error"):
                await driver.reserve(broken)
            patch.setattr("worker.tier.command_from_proto", fail)
            with pytest.raises(EngineError, match="internal error"):
                await driver.reserve(broken)
        await driver.prefill_locally(beside)
        assert (await driver.finish(beside)).token_ids == run_alone(make_engine(model), [beside])[1]
        await driver.close()
        await settle(decode.is_idle)


async def test_failed_row_is_told_on_both_tiers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill's first token or one of decode's: the request ends with the reason, its neighbour with its tokens."""
    async with (
        run_decode(lambda: make_engine(model)) as decode,
        run_prefill(lambda listener: make_engine(model, listener=listener)) as prefill,
    ):
        driver = Driver()
        await driver.connect(decode, prefill)
        for worker, min_outputs in ((decode, 2), (prefill, 0)):
            engine = await worker.context.engine_loop.call(lambda engine: engine)
            with monkeypatch.context() as patch:
                patch.setattr(engine._runner._sampler, "sample", _without_token(engine, 2, min_outputs))
                beside, failing = _request(1), _request(2)
                outcomes = await asyncio.gather(
                    driver.generate(beside), driver.generate(failing), return_exceptions=True
                )
            assert isinstance(outcomes[1], SamplingFailed), outcomes[1]
            assert not isinstance(outcomes[0], BaseException)
            assert outcomes[0].token_ids == run_alone(make_engine(model), [beside])[1]
            await driver.abort(failing)
            await settle(decode.is_idle)
            await settle(prefill.is_idle)
        await driver.close()


def _without_token(engine: Any, request_id: int, min_outputs: int) -> Callable[..., Any]:
    """A sampler that fails a request's row once it has so many tokens."""
    sample = engine._runner._sampler.sample

    def failing(logits: Any, items: Any) -> Any:
        sequence = engine.scheduler.get(RequestId(request_id))
        for item in items:
            is_it = sequence is not None and item.request.history.token_ids is sequence.token_ids
            if is_it and sequence.num_output_tokens >= min_outputs:
                logits[item.first_row] = float("nan")
        return sample(logits, items)

    return failing


async def test_broken_engine_names_who_took_part_and_ends_the_session_at_once(model: Path) -> None:
    async with run_decode(lambda: make_engine(model)) as decode:
        driver = Driver()
        await driver.connect(decode, None)
        inside, outside = _request(1), _request(2)
        await driver.reserve(inside)
        await driver.reserve(outside)
        decode.tier.break_off([RequestId(1), RequestId(99)], StepFailed("a step failed"))
        with pytest.raises(StepFailed):
            await driver.next(inside, object)
        # The other one is accused of nothing: its session is over, and the gateway would end it now.
        await settle(lambda: asyncio.sleep(0, driver.has_heard_the_end))
        late = Driver()
        await late.connect(decode, None)
        async with asyncio.timeout(2):
            await asyncio.gather(*late._tasks, return_exceptions=True)
        await late.close()
        decode.tier.end_sessions()
        async with asyncio.timeout(2):
            await asyncio.gather(*driver._tasks)
        assert driver._events[2].empty()
        await driver.close()
        await settle(decode.is_idle)


@pytest.mark.parametrize("is_served", [False, True])
async def test_control_of_a_worker_is_for_those_who_were_given_it(model: Path, is_served: bool) -> None:
    async with run_decode(lambda: make_engine(model)) as decode:
        drained: list[bool] = []

        async def drain() -> None:
            drained.append(True)

        info = ModelInfo("tiny", "llama", 64, 300, decode.context.layout, 24, "cpu", "torch")
        servicer = WorkerServicer(
            decode.context.engine_loop,
            info,
            decode.tier.read_load,
            drain if is_served else None,
            1.0,
        )
        server = grpc.aio.server()
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with WorkerClient(f"127.0.0.1:{port}") as client:
            if is_served:
                assert await client.drain(timeout_s=5.0) == 0
                assert await client.flush_cache() == 0
            else:
                for call in (client.drain(timeout_s=5.0), client.flush_cache()):
                    with pytest.raises(EngineError, match="--worker-control"):
                        await call
            assert (await client.load()).num_blocks == decode.context.kv_cache.num_blocks
            assert await client.model_info() == info
        await server.stop(None)
        assert drained == ([True] if is_served else [])


async def test_subscriber_that_does_not_read_makes_nothing_grow(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_decode(lambda: make_engine(model)) as decode:
        monkeypatch.setattr("engine.cache.block_pool.MAX_KEPT_EVENTS", 8)
        driver = Driver()
        await driver.connect(decode, None)
        log = KvEventLog(decode.context.engine_loop)
        events = log.subscribe(0)
        first = await anext(events)
        assert first.is_snapshot
        # Nobody asks for the next batch while these fill the cache.
        for index in range(12):
            request = make_request(10 + index, [20 + index] * 40, max_tokens=2, ignore_eos=True)
            await driver.generate(request)
        pool = await decode.context.engine_loop.call(lambda engine: engine.pool)
        assert len(pool._events) == 0
        assert pool._events.are_lost
        again = await anext(events)
        assert again.is_snapshot
        assert again.sequence_number > first.sequence_number
        assert len(again.stored) == pool.num_cached_blocks
        await driver.generate(make_request(50, [77] * 20, max_tokens=2, ignore_eos=True))
        change = await anext(events)
        assert not change.is_snapshot
        assert change.sequence_number == again.sequence_number + 1
        assert len(change.stored) == 1
        await events.aclose()
        await driver.close()
        await settle(decode.is_idle)
