"""The transfer benchmark: which way its ratios go, and what crosses the pipe between its processes."""

import json
from dataclasses import replace

import pytest

from benchmarks.common.stream import RequestTrace
from benchmarks.transfer.receiver import handle_from_json, handle_to_json
from benchmarks.transfer.run import exposed_share, path_row, worst_second_token, worst_speed_ratio
from benchmarks.transfer.serving import ONE_PROCESS, ServingSamples, serving_row
from benchmarks.transfer.shapes import LLAMA_3_8B, layout_from_json, layout_to_json, smollm2_shape
from engine.config import KvDtype
from engine.types import Epoch, LeaseId
from kvrelay.results import Timings, Usage


def test_shapes_are_those_of_the_models() -> None:
    assert LLAMA_3_8B.layout().bytes_per_token == 128 * 1024
    assert smollm2_shape(KvDtype.BF16).layout().bytes_per_token == 23_040


def test_handles_and_layouts_cross_the_pipe_unchanged() -> None:
    layout = smollm2_shape(KvDtype.INT8).layout()
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout
    values = {
        "lease_id": (1 << 62) + 1,
        "epoch": 3,
        "ticket": "00ff" * 8,
        "start_token": 16,
        "num_tokens": 100,
        "layout_fingerprint": layout.fingerprint,
    }
    handle = handle_from_json(values)
    assert (handle.lease_id, handle.epoch, len(handle.ticket)) == (LeaseId((1 << 62) + 1), Epoch(3), 16)
    assert handle_to_json(handle) == values


def test_ratio_is_bandwidth_of_the_worse_shape() -> None:
    seconds = {
        ("small", "memcpy"): [1.0, 1.0],
        ("small", "shm"): [2.0, 2.0],
        ("large", "memcpy"): [1.0],
        ("large", "shm"): [4.0],
    }
    assert worst_speed_ratio(seconds, "shm", "memcpy") == 0.25, "four times the time is a quarter of the bandwidth"
    assert worst_speed_ratio(seconds, "ucx", "socket") is None


def test_row_gives_bandwidth_and_time_per_thousand_tokens() -> None:
    seconds = {("llama-3-8b", "shm"): [0.1], ("llama-3-8b", "memcpy"): [0.05]}
    row = path_row(LLAMA_3_8B, "shm", seconds, 2000)
    assert row["megabytes"] == pytest.approx(262.144)
    assert row["gigabytes_per_s"] == pytest.approx(2.62144)
    assert row["ms_per_1000_tokens"] == pytest.approx(50)
    assert (row["baseline"], row["share_of_baseline"]) == ("memcpy", 0.5)


def samples(cluster: str, ttft_s: float, second_s: float, timings: Timings) -> ServingSamples:
    arrivals = ((ttft_s, 1), (ttft_s + second_s, 1), (ttft_s + second_s + 0.01, 1))
    trace = RequestTrace(0.0, arrivals, 9.0, (0, 1, 2), "", Usage(), timings)
    return ServingSamples(cluster, 1000, [trace])


def test_request_row_shows_growth_over_one_process() -> None:
    travelled = Timings(transport="grpc", transfer_ns=40_000_000, transfer_exposed_ns=10_000_000)
    row = serving_row(samples("grpc", 0.5, 0.03, travelled), samples(ONE_PROCESS, 0.4, 0.01, Timings()))
    assert row["ttft_growth_ms"] == pytest.approx(100)
    assert row["second_token_growth_ms"] == pytest.approx(20)
    assert row["second_token_limit_ms"] == pytest.approx(1.5 * 10 + 10)
    assert row["second_token_over_limit"] == pytest.approx(30 / 25)
    assert (row["transfer_ms"], row["exposed_ms"]) == (40, 10)


def test_the_second_token_counts_where_it_is_worst() -> None:
    travelled = Timings(transport="grpc", transfer_ns=40_000_000, transfer_exposed_ns=10_000_000)
    served = {
        ("grpc", 60): samples("grpc", 0.5, 0.02, travelled),
        ("grpc", 1000): samples("grpc", 0.5, 0.03, travelled),
        (ONE_PROCESS, 1000): samples(ONE_PROCESS, 0.5, 0.9, Timings()),
    }
    assert worst_second_token(served) == pytest.approx(30 / 25)
    assert worst_second_token({}) is None


def test_exposed_share_is_taken_from_requests_whose_kv_travelled() -> None:
    travelled = Timings(transport="grpc", transfer_ns=40_000_000, transfer_exposed_ns=10_000_000)
    served = {("grpc", 1000): samples("grpc", 0.5, 0.03, travelled)}
    local = replace(served["grpc", 1000].traces[0], timings=Timings())
    served["grpc", 1000].traces.append(local)
    assert exposed_share(served) == 0.25
    assert exposed_share({}) is None
