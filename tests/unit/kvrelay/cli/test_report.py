"""The figures of one request."""

import io
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from kvrelay.cli.report import RequestRecorder, RequestReport, phase_table, shown_bytes
from kvrelay.errors import EngineError
from kvrelay.results import Chunk, Complete, Started, Timings, Usage
from kvrelay.values import FinishReason


def recorded(arrivals_s: list[tuple[float, int]], end_s: float) -> RequestReport:
    """A request that starts at 10 s and whose chunks arrive at the given times."""
    times: Iterator[float] = iter([10.0, *(time for time, _ in arrivals_s), end_s])
    recorder = RequestRecorder("Hi", now=lambda: next(times))
    recorder.add(Started(1, 42, "tiny", 3))
    for _, num_tokens in arrivals_s:
        recorder.add(Chunk(0, 0, tuple(range(num_tokens)), "x"))
    timings = Timings(
        queue_ns=1_500_000, prefill_ns=2_000_000, transfer_ns=3_000_000, transfer_bytes=10, transport="shm"
    )
    recorder.add(Complete(0, FinishReason.LENGTH, None, Usage(3, 4), timings, "p", "d", 1))
    return recorder.report()


def test_times_are_measured_from_the_call() -> None:
    report = recorded([(10.1, 1), (10.2, 1), (10.5, 1)], 10.6)
    assert report.ttft_ms == 100
    assert report.total_ms == 600
    assert report.inter_token_p50_ms == pytest.approx(200)
    assert (report.queue_ms, report.prefill_ms, report.transfer_ms) == (1.5, 2.0, 3.0)


def test_tokens_that_arrive_together_share_the_wait() -> None:
    assert recorded([(10.1, 1), (10.5, 4)], 10.5).inter_token_p50_ms == pytest.approx(100)


def test_one_token_has_no_inter_token_time() -> None:
    assert recorded([(10.1, 1)], 10.2).inter_token_p50_ms is None


def test_answer_without_tokens_has_its_end_as_first_token() -> None:
    assert recorded([], 10.2).ttft_ms == pytest.approx(200)


def test_unfinished_request_has_no_report() -> None:
    with pytest.raises(EngineError, match="before the completion did"):
        RequestRecorder("Hi").report()


def test_report_is_json_with_the_promised_names() -> None:
    report = json.loads(json.dumps(recorded([(10.1, 1)], 10.2).as_json()))
    promised = {
        "queue_ms",
        "prefill_ms",
        "transfer_ms",
        "transfer_bytes",
        "transport",
        "ttft_ms",
        "inter_token_p50_ms",
        "total_ms",
        "text",
        "usage",
    }
    assert promised <= set(report)
    assert report["usage"]["completion_tokens"] == 4


def test_table_shows_every_phase() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(phase_table([recorded([(10.1, 1), (10.2, 1)], 10.4)], "phases"))
    text = console.export_text()
    assert all(word in text for word in ("queue", "prefill", "transfer", "TTFT", "inter-token p50", "total"))
    assert "10 B, 3.0 ms (shm)" in text


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**20 // 2, "1.5 MiB"), (5 * 2**30, "5.0 GiB")],
)
def test_bytes_have_binary_units(count: int, shown: str) -> None:
    assert shown_bytes(count) == shown
