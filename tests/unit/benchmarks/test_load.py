"""The load benchmark: arrivals, loops, and the figures of a scenario."""

import itertools
import statistics
from pathlib import Path

import pytest

from benchmarks.common.clusters import ClusterPlan
from benchmarks.common.prompts import PromptSource
from benchmarks.load.arrivals import PlannedRequest, TraceEntry, closed_loop, poisson, read_trace, replay
from benchmarks.load.measure import LoadResult, Slo, run_closed, run_open, summarize
from benchmarks.load.run import LoadSettings
from kvrelay.errors import InvalidRequest
from tests.unit.benchmarks.fake_client import FakeClient

PROMPTS = PromptSource(range(5000))


def test_poisson_arrivals_have_the_rate_and_repeat() -> None:
    planned = poisson(PROMPTS, 2000, 4, 2, rate=50.0, key="k")
    gaps = [later.due_s - earlier.due_s for earlier, later in itertools.pairwise(planned)]
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.15), "an exponential's deviation is its mean"
    assert planned == poisson(PROMPTS, 2000, 4, 2, rate=50.0, key="k")


@pytest.mark.parametrize(("name", "num_entries"), [("azure-conv", 400), ("azure-code", 400), ("mooncake", 300)])
def test_traces_that_come_with_it_are_read(name: str, num_entries: int) -> None:
    entries = read_trace(name)
    assert len(entries) == num_entries
    assert entries[0].due_s == 0.0
    assert [entry.due_s for entry in entries] == sorted(entry.due_s for entry in entries)
    assert all(entry.prompt_tokens > 0 and entry.output_tokens > 0 for entry in entries)


def test_azure_times_keep_their_fractions() -> None:
    assert read_trace("azure-conv")[1].due_s == pytest.approx(4.314579)


@pytest.mark.parametrize("content", ["not,a,trace\n1,2,3\n", "", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_file_of_another_form_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(str(path))
    assert caught.value.field == "trace"


def test_unknown_trace_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequest, match="azure-conv"):
        LoadSettings(ClusterPlan(), trace="no-such-trace")


@pytest.mark.parametrize("wrong", [{"streams": ()}, {"streams": (0,)}, {"rates": (-1.0,)}, {"trace_speed": 0.0}])
def test_settings_that_ask_for_nothing_are_refused(wrong: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(InvalidRequest):
        LoadSettings(ClusterPlan(), **wrong)  # type: ignore[arg-type]  # parametrized by field name


def test_equal_block_ids_become_equal_text() -> None:
    entries = [TraceEntry(0.0, 1536, 10, (7, 8, 9)), TraceEntry(2.0, 1536, 10, (7, 8, 10))]
    first, second = replay(
        entries, PROMPTS, num_requests=2, speed=2.0, scale=0.125, longest_prompt=10_000, longest_output=100
    )
    assert len(first.token_ids) == len(second.token_ids) == 192
    assert first.token_ids[:128] == second.token_ids[:128]
    assert first.token_ids[128:] != second.token_ids[128:]
    assert (first.due_s, second.due_s) == (0.0, 1.0)


def test_trace_without_block_ids_shares_nothing_and_is_cut_to_the_model() -> None:
    entries = [TraceEntry(float(index), 4000, 900) for index in range(3)]
    planned = replay(entries, PROMPTS, num_requests=2, speed=1.0, scale=1.0, longest_prompt=300, longest_output=50)
    assert [(len(request.token_ids), request.output_tokens) for request in planned] == [(300, 50)] * 2
    assert planned[0].token_ids != planned[1].token_ids


async def test_closed_loop_keeps_its_streams_busy_and_no_more() -> None:
    client = FakeClient(lambda _prompt, max_tokens: [(0.01, 1)] * max_tokens)
    result = await run_closed(client, closed_loop(PROMPTS, 9, 4, 3, "k"), num_streams=3)
    assert client.most_running == 3
    assert len(result.traces) == 9
    assert len({options["token_ids"] for options in client.requests}) == 9


async def test_open_loop_does_not_wait_for_answers() -> None:
    client = FakeClient(lambda _prompt, _max_tokens: [(0.3, 1)])
    planned = [PlannedRequest(0.02 * index, (1, 2), 1) for index in range(5)]
    result = await run_open(client, planned)
    assert client.most_running == 5
    assert result.duration_s >= 0.3


async def test_refused_request_counts_against_goodput_and_the_run_goes_on() -> None:
    result = await run_closed(FakeClient(shed_from=3), closed_loop(PROMPTS, 4, 4, 2, "k"), num_streams=1)
    row = summarize("s", result, Slo(1e6, 1e6))
    assert (row["num_requests"], row["num_failed"], row["goodput_share"]) == (4, 1, 0.75)


async def test_goodput_counts_what_keeps_both_limits() -> None:
    def script(prompt: object, max_tokens: int) -> list[tuple[float, int]]:
        return [(0.0, 1), (0.1 if len(client.requests) % 2 else 0.0, 1)]

    client = FakeClient(script)
    result = await run_closed(client, closed_loop(PROMPTS, 4, 4, 2, "k"), num_streams=1)
    assert summarize("s", result, Slo(1e6, 50.0))["goodput_share"] == 0.5
    assert summarize("s", result, Slo(0.0, 1e6))["goodput_share"] == 0.0


def test_scenario_without_an_answer_has_a_row_all_the_same() -> None:
    row = summarize("s", LoadResult(1.0, [], ["CAPACITY"]), Slo(1, 1))
    assert (row["num_failed"], row["ttft_p50_ms"], row["goodput_share"]) == (1, None, 0.0)
