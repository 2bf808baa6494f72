"""One measured request: its times, its tokens, its errors."""

import time

import pytest

from benchmarks.common.stream import RequestTrace, run_request, wait_idle
from kvrelay.errors import CapacityError, EngineError
from kvrelay.results import Timings, Usage
from tests.unit.benchmarks.fake_client import FakeClient


def trace(*arrivals: tuple[float, int], started_s: float = 10.0) -> RequestTrace:
    num_tokens = sum(count for _, count in arrivals)
    return RequestTrace(started_s, arrivals, arrivals[-1][0], tuple(range(num_tokens)), "", Usage(), Timings())


def test_times_count_from_the_start() -> None:
    seen = trace((10.1, 1), (10.2, 1), (10.6, 3))
    assert seen.ttft_ms == pytest.approx(100)
    assert seen.gaps_ms == pytest.approx([100, 400])
    assert seen.tpot_ms == pytest.approx(125)
    assert seen.step_tokens == [1, 3]
    assert (seen.num_tokens, seen.num_decode_tokens) == (5, 4)


def test_answer_of_one_message_has_no_time_per_token() -> None:
    seen = trace((10.1, 4))
    assert seen.tpot_ms is None
    assert seen.gaps_ms == []


async def test_request_is_greedy_and_of_exact_length() -> None:
    client = FakeClient()
    seen = await run_request(client, [5, 6], max_tokens=7, num_draft_tokens=0, cache_salt="s")
    assert seen.num_tokens == 7
    (options,) = client.requests
    assert (options["token_ids"], options["temperature"], options["ignore_eos"]) == ([5, 6], 0.0, True)
    assert (options["num_draft_tokens"], options["cache_salt"]) == (0, "s")


async def test_time_counts_from_when_a_request_was_due() -> None:
    due_s = time.perf_counter() - 5.0
    assert (await run_request(FakeClient(), [1], max_tokens=1, due_s=due_s)).ttft_ms > 5000


async def test_listener_hears_every_message() -> None:
    heard: list[int] = []
    client = FakeClient(lambda _prompt, _max_tokens: [(0.0, 1), (0.0, 3)])
    await run_request(client, [1], max_tokens=4, on_arrival=lambda _now, count: heard.append(count))
    assert heard == [1, 3]


async def test_refused_request_raises_the_servers_error() -> None:
    with pytest.raises(CapacityError):
        await run_request(FakeClient(shed_from=0), [1], max_tokens=1)


async def test_waiting_for_idle_ends_in_an_error_when_it_never_comes() -> None:
    client = FakeClient()
    await wait_idle(client, 0.2)
    client.num_running = 1
    with pytest.raises(EngineError, match="still busy"):
        await wait_idle(client, 0.2)
