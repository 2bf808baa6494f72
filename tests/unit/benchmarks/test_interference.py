"""Windows of the interference benchmark: which gaps count, and when long prompts are sent."""

import asyncio
from dataclasses import replace

import pytest

from benchmarks.common.clusters import ClusterPlan
from benchmarks.common.prompts import PromptSource
from benchmarks.interference.run import COLOCATED, DISAGGREGATED, InterferenceSettings, build_report
from benchmarks.interference.window import StreamArrivals, WindowPlan, WindowResult, run_window
from kvrelay.errors import CapacityError, InvalidRequest
from tests.unit.benchmarks.fake_client import FakeClient

PROMPTS = PromptSource(range(500))
PLAN = WindowPlan(
    num_streams=2,
    stream_prompt_tokens=4,
    stream_output_tokens=10,
    seconds=0.25,
    long_prompt_tokens=50,
    long_output_tokens=1,
    interval_s=0.1,
    is_disturbed=True,
)


def test_gap_counts_for_the_window_in_which_it_began() -> None:
    stream = StreamArrivals()
    for when in (0.0, 1.0, 2.0, 9.0, 9.5):
        stream.take(when, 2)
    assert stream.gaps_ms(1.0, 3.0) == [1000.0, 7000.0], "a stall that outlasts the window is seen whole"
    assert stream.num_tokens(1.0, 3.0) == 4


def test_wait_for_a_new_requests_first_token_is_no_gap() -> None:
    stream = StreamArrivals()
    stream.start_request()
    stream.take(0.0, 1)
    stream.take(1.0, 1)
    stream.start_request()
    stream.take(5.0, 1)
    stream.take(6.0, 1)
    assert stream.gaps_ms(0.0, 10.0) == [1000.0, 1000.0]


async def test_long_prompts_arrive_at_their_times_beside_running_streams() -> None:
    client = FakeClient(lambda prompt, max_tokens: [(0.02, 1)] * max_tokens)
    result = await run_window(client, PROMPTS, PLAN, "key")
    long = [options for options in client.requests if len(options["token_ids"]) == 50]
    assert len(long) == result.num_long_sent == 3
    assert len(result.long_ttfts_ms) == 3
    assert len({options["token_ids"] for options in long}) == 3
    assert all(options["num_draft_tokens"] == 0 for options in client.requests if options not in long)
    assert result.num_tokens >= 2
    assert all(gap > 15 for gap in result.gaps_ms)
    assert client.num_running == 0, "all that was started has ended"


async def test_quiet_window_has_no_long_prompts() -> None:
    client = FakeClient(lambda prompt, max_tokens: [(0.02, 1)] * max_tokens)
    result = await run_window(client, PROMPTS, replace(PLAN, is_disturbed=False), "key")
    assert result.num_long_sent == 0
    assert {len(options["token_ids"]) for options in client.requests} == {4}


async def test_stream_that_fails_ends_the_window_with_its_error() -> None:
    with pytest.raises(CapacityError):
        await asyncio.wait_for(run_window(FakeClient(shed_from=0), PROMPTS, PLAN, "key"), 5)


def test_ratios_are_disturbed_p99_over_quiet_p50_of_the_same_cluster() -> None:
    quiet, disturbed = [10.0] * 100, [10.0] * 90 + [50.0] * 10
    windows = {
        (DISAGGREGATED, "quiet"): [WindowResult(quiet)],
        (DISAGGREGATED, "disturbed"): [WindowResult([20.0] * 100)],
        (COLOCATED, "quiet"): [WindowResult(quiet)],
        (COLOCATED, "disturbed"): [WindowResult(disturbed)],
    }
    report = build_report(InterferenceSettings(ClusterPlan()), windows)
    assert report.ratios == {"p99_over_quiet_p50": 2.0, "colocated_p99_over_quiet_p50": 5.0}
    assert len(report.rows) == 4


def test_window_without_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="window_s"):
        InterferenceSettings(ClusterPlan(), window_s=0)
