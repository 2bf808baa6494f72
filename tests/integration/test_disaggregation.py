"""Prefill and decode services over real sessions and transports: the tokens of one engine, and nothing left behind."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.trace import SpanContext

from engine.config import KvDtype, SchedulerConfig
from engine.types import EngineRequest
from kvrelay.errors import CapacityError, ContextTooLong, InvalidRequest, LeaseExpired, LeaseUnknown
from kvrelay.serving.telemetry import in_memory_spans, span, traceparent
from kvrelay.v1 import decode_service_pb2, prefill_service_pb2
from tests.engine_driver import make_engine, make_request, run_alone, run_to_end
from tests.tiny_models import write_tiny_model
from tests.worker_harness import Driver, HarnessWorker, run_decode, run_prefill, settle

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "ignore_eos": True}
TRANSPORTS = ["shm", "grpc"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("disaggregation") / "llama", "llama")


def _requests(count: int, seed: int = 0) -> list[EngineRequest]:
    rng = random.Random(seed)
    requests = []
    for index in range(1, count + 1):
        prompt = [rng.randrange(4, 250) for _ in range(rng.choice([1, 2, 15, 16, 17, 40, 130]))]
        params: dict[str, Any] = SAMPLED | {"seed": index} if index % 2 else {"ignore_eos": True}
        requests.append(make_request(index, prompt, **params | {"max_tokens": rng.choice([1, 2, 9, 24])}))
    return requests


class Pair:
    """A prefill and a decode worker with a connected driver."""

    def __init__(self, decode: HarnessWorker, prefill: HarnessWorker, driver: Driver) -> None:
        self.decode, self.prefill, self.driver = decode, prefill, driver

    async def is_idle(self) -> bool:
        """Whether both pools are whole and no lease, sequence or job is left."""
        return await self.decode.is_idle() and await self.prefill.is_idle()


@asynccontextmanager
async def run_pair(
    model: Path,
    transport: str = "shm",
    decode_engine: dict[str, Any] | None = None,
    prefill_engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """Run two connected workers; they must be idle at the end."""
    make_decode = partial(make_engine, model, **decode_engine or {})
    make_prefill = partial(make_engine, model, **prefill_engine or {})
    async with (
        run_decode(make_decode, transport=transport, **settings) as decode,
        run_prefill(lambda listener: make_prefill(listener=listener), transport=transport) as prefill,
    ):
        driver = Driver()
        await driver.connect(decode, prefill)
        pair = Pair(decode, prefill, driver)
        try:
            yield pair
            await settle(pair.is_idle)
        finally:
            await driver.close()


async def _serve(pair: Pair, requests: list[EngineRequest]) -> dict[int, list[int]]:
    replies = await asyncio.gather(*(pair.driver.generate(request) for request in requests))
    return {request.request_id: reply.token_ids for request, reply in zip(requests, replies, strict=True)}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_disaggregated_equals_one_process(no_leaks: None, model: Path, transport: str) -> None:
    requests = _requests(16)
    expected = run_alone(make_engine(model), requests)
    async with run_pair(model, transport) as pair:
        assert await _serve(pair, requests) == expected


async def test_first_token_comes_from_prefill_and_the_rest_from_decode(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 45), max_tokens=6, ignore_eos=True)
    async with run_pair(model) as pair:
        reply = await pair.driver.generate(request)
        assert [output.token_index for output in reply.outputs] == list(range(6))
        assert reply.outputs[0].prefill_timing is not None
        assert reply.transfer is not None
        assert reply.transfer.transport == "shm"
        layout = pair.decode.context.layout
        assert reply.transfer.num_bytes == 3 * layout.block_bytes * layout.num_layers


async def test_only_what_decode_lacks_travels(no_leaks: None, model: Path) -> None:
    shared = list(range(5, 69))
    first = make_request(1, [*shared, 70], max_tokens=3, ignore_eos=True)
    second = make_request(2, [*shared, 71, 72], max_tokens=3, ignore_eos=True)
    expected = run_alone(make_engine(model), [first, second])
    async with run_pair(model) as pair:
        assert (await pair.driver.generate(first)).token_ids == expected[1]
        reply = await pair.driver.generate(second)
        assert reply.token_ids == expected[2]
        assert reply.num_cached_tokens == 64
        assert reply.transfer is not None
        layout = pair.decode.context.layout
        assert reply.transfer.num_bytes == layout.block_bytes * layout.num_layers


async def test_prompt_that_prefill_has_cached_is_still_sent_whole(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 70), max_tokens=4, ignore_eos=True)
    again = make_request(2, range(5, 70), max_tokens=4, ignore_eos=True)
    expected = run_alone(make_engine(model), [request])[1]
    async with run_pair(model, decode_engine={"prefix_cache": False}) as pair:
        assert (await pair.driver.generate(request)).token_ids == expected
        reply = await pair.driver.generate(again)
        assert reply.token_ids == expected
        assert reply.outputs[0].num_cached_tokens == 64


@pytest.mark.parametrize("budget", [8, 24])
async def test_chunked_prefill_streams_the_same_kv(no_leaks: None, model: Path, budget: int) -> None:
    requests = _requests(8, seed=5)
    expected = run_alone(make_engine(model), requests)
    prefill_engine = {"scheduler": SchedulerConfig(max_num_seqs=min(64, budget), max_num_batched_tokens=budget)}
    async with run_pair(model, prefill_engine=prefill_engine) as pair:
        assert await _serve(pair, requests) == expected


@pytest.mark.parametrize(("prefill_size", "decode_size"), [(16, 32), (32, 16), (8, 64)])
async def test_block_sizes_may_differ_between_the_tiers(
    no_leaks: None, model: Path, prefill_size: int, decode_size: int
) -> None:
    requests = _requests(10, seed=7)
    expected = run_alone(make_engine(model), requests)
    async with run_pair(
        model, decode_engine={"block_size": decode_size}, prefill_engine={"block_size": prefill_size}
    ) as pair:
        assert await _serve(pair, requests) == expected


def _hand_over(model: Path, request: EngineRequest, from_dtype: KvDtype, to_dtype: KvDtype) -> list[int]:
    """The tokens of a hand-off whose KV is copied and rounded by torch alone, without any transport."""
    prefill, decode = make_engine(model, dtype=from_dtype), make_engine(model, dtype=to_dtype)
    prefill.add_handoff(request)
    (first,) = prefill.step()
    tokens = list(first.token_ids)
    granted = decode.reserve(request)
    sequence = prefill.scheduler.get(request.request_id)
    assert granted is not None
    assert sequence is not None
    num_blocks = len(sequence.block_table)
    source, target = prefill.kv_cache.elements, decode.kv_cache.elements
    target[:, list(granted.block_ids[:num_blocks])] = source[:, sequence.block_table].to(target.dtype)
    output = decode.commit(request.request_id, tokens[0])
    assert output is not None
    tokens += run_to_end(decode, first_index=1).get(request.request_id, []) if output.finish_reason is None else []
    return tokens


@pytest.mark.parametrize(
    ("prefill_dtype", "decode_dtype"),
    [(KvDtype.FP32, KvDtype.BF16), (KvDtype.BF16, KvDtype.FP32), (KvDtype.BF16, KvDtype.BF16)],
)
async def test_kv_dtypes_may_differ_between_the_tiers(
    no_leaks: None, model: Path, prefill_dtype: KvDtype, decode_dtype: KvDtype
) -> None:
    requests = _requests(6, seed=8)
    expected = {request.request_id: _hand_over(model, request, prefill_dtype, decode_dtype) for request in requests}
    async with run_pair(model, decode_engine={"dtype": decode_dtype}, prefill_engine={"dtype": prefill_dtype}) as pair:
        assert await _serve(pair, requests) == expected


async def test_request_can_be_prefilled_by_decode_itself(no_leaks: None, model: Path) -> None:
    requests = _requests(8, seed=2)
    expected = run_alone(make_engine(model), requests)
    async with run_pair(model) as pair:
        for request in requests:
            await pair.driver.reserve(request)
            await pair.driver.prefill_locally(request)
            assert (await pair.driver.finish(request)).token_ids == expected[request.request_id]


async def test_many_streams_share_step_messages(no_leaks: None, model: Path) -> None:
    requests = [make_request(i, [i + 4] * 20, max_tokens=40, ignore_eos=True) for i in range(1, 17)]
    async with run_pair(model) as pair:
        await _serve(pair, requests)
        # 16 first tokens at most one by one, then one message per step for all 16 streams.
        assert pair.driver.num_step_messages < 16 + 3 * 40


async def test_one_trace_spans_both_tiers_and_the_transfer(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 45), max_tokens=5, ignore_eos=True)
    async with run_pair(model) as pair:
        with in_memory_spans() as exporter, span("gateway.generate") as root:
            pair.driver.traceparent = traceparent(root)
            await pair.driver.generate(request)
            await settle(pair.is_idle)
    spans = {finished.name: finished for finished in exporter.get_finished_spans()}
    assert {"prefill", "kv.export", "kv.import", "decode"} <= set(spans)
    assert len({finished.context.trace_id for finished in spans.values()}) == 1
    for child, parent in (("prefill", "gateway.generate"), ("kv.export", "prefill"), ("kv.import", "prefill")):
        assert _span_id(spans[child].parent) == _span_id(spans[parent].context)
    sizes = [(spans[name].attributes or {}).get("num_bytes") for name in ("kv.export", "kv.import")]
    assert sizes[0] == sizes[1] is not None


def _span_id(context: SpanContext | None) -> int:
    assert context is not None
    return context.span_id


async def test_later_epoch_fences_the_first_writer(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 45), max_tokens=5, ignore_eos=True)
    expected = run_alone(make_engine(model), [request])[1]
    async with run_pair(model) as pair:
        driver = pair.driver
        old = await driver.reserve(request)
        await driver.send_decode(
            decode_service_pb2.DecodeServiceSessionRequest(
                supersede=decode_service_pb2.SupersedeCommand(request_id=1, attempt=2)
            )
        )
        new = await driver.next(request, decode_service_pb2.ReservedEvent)
        assert (new.attempt, new.kv_handle.epoch) == (2, old.kv_handle.epoch + 1)
        await driver.send_prefill(request, old, attempt=1)
        with pytest.raises(Exception, match=r"epoch|ticket"):
            await driver.next(request, prefill_service_pb2.ExportedEvent)
        await driver.send_prefill(request, new, attempt=2)
        assert (await driver.finish(request)).token_ids == expected


async def test_handle_that_decode_never_issued_is_refused(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 45), max_tokens=5, ignore_eos=True)
    async with run_pair(model) as pair:
        reserved = await pair.driver.reserve(request)
        reserved.kv_handle.ticket = bytes(16)
        await pair.driver.send_prefill(request, reserved)
        with pytest.raises(LeaseUnknown):
            await pair.driver.next(request, prefill_service_pb2.ExportedEvent)
        await pair.driver.abort(request)


async def test_bad_requests_are_refused_and_the_session_goes_on(no_leaks: None, model: Path) -> None:
    async with run_pair(model, decode_engine={"num_blocks": 8}) as pair:
        bad: list[tuple[EngineRequest, type[Exception], str]] = [
            (make_request(1, []), InvalidRequest, "prompt"),
            (make_request(2, [99_999]), InvalidRequest, "token_ids"),
            (make_request(3, range(5, 105), max_tokens=100), ContextTooLong, "KV cache"),
            (make_request(4, range(5, 105), max_tokens=1000), ContextTooLong, "context"),
        ]
        for request, kind, text in bad:
            with pytest.raises(kind, match=text):
                await pair.driver.reserve(request)
        assert len((await pair.driver.generate(make_request(9, [5, 6], ignore_eos=True))).token_ids) == 16


async def test_reservation_waits_for_blocks_and_is_granted_when_they_come(no_leaks: None, model: Path) -> None:
    first = make_request(1, range(5, 105), max_tokens=8, ignore_eos=True)
    second = make_request(2, range(105, 205), max_tokens=8, ignore_eos=True)
    async with run_pair(model, decode_engine={"num_blocks": 9}) as pair:
        await pair.driver.reserve(first)
        waiting = asyncio.create_task(pair.driver.reserve(second))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await pair.driver.abort(first)
        await asyncio.wait_for(waiting, 5)
        await pair.driver.abort(second)


async def test_reservation_that_waits_too_long_is_shed(no_leaks: None, model: Path) -> None:
    first = make_request(1, range(5, 105), max_tokens=8, ignore_eos=True)
    second = make_request(2, range(105, 205), max_tokens=8, ignore_eos=True)
    async with run_pair(model, decode_engine={"num_blocks": 9}, reservation_timeout_s=0.3) as pair:
        await pair.driver.reserve(first)
        with pytest.raises(CapacityError):
            await pair.driver.reserve(second)
        await pair.driver.abort(first)


async def test_lease_without_news_expires_and_frees_its_blocks(no_leaks: None, model: Path) -> None:
    request = make_request(1, range(5, 105), max_tokens=8, ignore_eos=True)
    async with run_pair(model, lease_ttl_s=0.2) as pair:
        await pair.driver.reserve(request)
        with pytest.raises(LeaseExpired):
            await pair.driver.next(request, decode_service_pb2.CommittedEvent)


@pytest.mark.parametrize("half_close", [True, False])
async def test_lost_session_frees_everything_it_started(no_leaks: None, model: Path, half_close: bool) -> None:
    async with run_pair(model) as pair:
        other = Driver()
        await other.connect(pair.decode, pair.prefill)
        reserved = make_request(1, range(5, 105), max_tokens=300, ignore_eos=True)
        running = make_request(2, range(5, 105), max_tokens=300, ignore_eos=True)
        grant = await other.reserve(running)
        await other.send_prefill(running, grant)
        await other.next(running, decode_service_pb2.CommittedEvent)
        await other.reserve(reserved)
        await other.close(half_close=half_close)
        await settle(pair.is_idle)


async def test_mixed_cancelled_and_finished_requests_leave_both_pools_whole(no_leaks: None, model: Path) -> None:
    rng = random.Random(11)
    expected = run_alone(make_engine(model), (requests := _requests(100, seed=9)))
    outcomes = {"finished": 0, "cancelled": 0}

    async def serve_or_cancel(pair: Pair, request: EngineRequest) -> None:
        task = asyncio.create_task(pair.driver.generate(request))
        if request.request_id % 2:
            await asyncio.sleep(rng.random() * 0.2)
            if not task.done():
                await pair.driver.abort(request)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                outcomes["cancelled"] += 1
                return
        assert (await task).token_ids == expected[request.request_id]
        outcomes["finished"] += 1

    async with run_pair(model, decode_engine={"num_blocks": 120}) as pair:
        for start in range(0, 100, 25):
            await asyncio.gather(*(serve_or_cancel(pair, request) for request in requests[start : start + 25]))
        await settle(pair.is_idle)
    assert min(outcomes.values()) >= 20, outcomes
