"""Each benchmark end to end with the smallest settings: real processes, the real model, the JSON that is promised.

Nothing here says how fast anything is; that is for runs on a quiet machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_leaks")]

KEYS = ["name", "commit", "machine", "settings", "rows", "ratios"]
BENCH = [sys.executable, "-m", "kvrelay.cli.main", "bench"]


def run(command: list[str], json_file: Path) -> dict[str, Any]:
    """Run a benchmark and return what it wrote."""
    done = subprocess.run(
        [*command, "--json", str(json_file)], check=False, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(json_file.read_text())
    assert list(report) == KEYS
    assert report["rows"]
    assert all(isinstance(value, float) for value in report["ratios"].values())
    return report


def test_load_serves_closed_and_open_loops_and_a_trace(tmp_path: Path) -> None:
    flags = ["--streams", "2", "--rate", "5", "--trace", "mooncake", "--trace-speed", "100", "--trace-scale", "0.005"]
    flags += ["--requests", "3", "--prompt-tokens", "10", "--output-tokens", "3", "--plot", str(tmp_path / "p.png")]
    report = run([*BENCH, "load", *flags], tmp_path / "r.json")
    assert (report["name"], report["ratios"]) == ("load", {})
    assert [row["scenario"] for row in report["rows"]] == ["closed, 2 streams", "open, 5 requests/s", "trace mooncake"]
    for row in report["rows"]:
        assert (row["num_requests"], row["num_failed"]) == (3, 0)
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"]
        assert 0 < row["inter_token_p50_ms"] <= row["inter_token_p99_ms"]
    assert (tmp_path / "p.png").stat().st_size > 1000


def test_interference_compares_two_tiers_with_one_process(tmp_path: Path) -> None:
    flags = ["--streams", "2", "--prompt-tokens", "64", "--window", "1.5", "--interval", "0.5", "--rounds", "1"]
    report = run([*BENCH, "interference", *flags], tmp_path / "r.json")
    assert set(report["ratios"]) == {"p99_over_quiet_p50", "colocated_p99_over_quiet_p50"}
    phases = [(row["cluster"], row["phase"]) for row in report["rows"]]
    assert sorted(phases) == sorted(
        (cluster, phase) for cluster in ("disaggregated", "colocated") for phase in ("quiet", "disturbed")
    )
    for row in report["rows"]:
        assert row["num_gaps"] > 0
        assert row["num_long_prompts"] == (3 if row["phase"] == "disturbed" else 0)


def test_every_rung_of_the_ladder_gives_the_same_answer(tmp_path: Path) -> None:
    flags = ["--streams", "2", "--prefix-tokens", "32", "--output-tokens", "4", "--naive-tokens", "2", "--rounds", "1"]
    report = run([*BENCH, "ladder", *flags], tmp_path / "r.json")
    assert set(report["ratios"]) == {"full_over_naive"}
    assert len(report["rows"]) == 6
    assert all(row["is_same_answer"] for row in report["rows"])
    assert [row["measured_tokens"] for row in report["rows"]] == [2, 4, 8, 8, 8, 8]


def test_transfer_measures_each_transport_beside_its_baseline(tmp_path: Path) -> None:
    flags = ["--tokens", "64", "--rounds", "1", "--repeats", "1"]
    report = run([*BENCH, "transfer", *flags], tmp_path / "r.json")
    names = {
        "shm_over_memcpy",
        "shm_over_memcpy_by_layer",
        "grpc_over_socket",
        "exposed_over_total_1000_grpc",
        "second_token_over_limit",
        "layerwise_over_oneshot_60",
    }
    assert set(report["ratios"]) - {"ucx_over_socket"} == names
    raw = [row for row in report["rows"] if row["what"].startswith("KV of ")]
    assert {row["what"] for row in raw} == {"KV of smollm2", "KV of llama-3-8b"}
    assert {row["path"] for row in raw} >= {"memcpy", "socket", "shm", "grpc", "inproc"}
    assert all(row["gigabytes_per_s"] > 0 for row in raw)
    requests = [row for row in report["rows"] if row["what"] == "request"]
    assert {row["num_tokens"] for row in requests} == {60, 1000}
    assert all(row["exposed_ms"] > 0 for row in requests if row["path"] == "grpc" and row["num_tokens"] == 1000)
    frames = {row["path"]: row["num_frames"] for row in report["rows"] if row["what"] == "prefill and hand-off"}
    assert frames["grpc, layerwise"] > frames["grpc, oneshot"]


def test_speculation_changes_no_answer(tmp_path: Path) -> None:
    flags = ["--category", "qa", "--category", "editing", "--limit", "1", "--output-tokens", "12", "--streams", "16"]
    report = run([*BENCH, "spec", *flags], tmp_path / "r.json")
    assert set(report["ratios"]) == {"ngram_editing", "worst_category", "adaptive_16"}
    by_category = {row["category"]: row for row in report["rows"]}
    assert set(by_category) == {"qa", "editing", "16 streams"}
    for category in ("qa", "editing"):
        assert by_category[category]["num_different"] == 0
        assert by_category[category]["tokens_per_step"] >= 1


def test_speculation_is_measured_in_process_too(tmp_path: Path) -> None:
    flags = ["--category", "mt_bench", "--limit", "1", "--output-tokens", "12", "--streams", "4", "--in-process"]
    report = run([*BENCH, "spec", *flags], tmp_path / "r.json")
    by_category = {row["category"]: row for row in report["rows"]}
    assert set(by_category) == {"mt_bench", "4 streams"}
    assert by_category["mt_bench"]["num_different"] == 0
    assert report["settings"]["in_process"] is True


def test_compare_measures_what_is_installed(tmp_path: Path) -> None:
    flags = ["--peer", "transformers", "--output-tokens", "4", "--streams", "2", "--long-tokens", "64"]
    flags += ["--repeats", "1", "--rounds", "1", "--markdown", str(tmp_path / "t.md")]
    report = run([sys.executable, "-m", "benchmarks.compare", *flags], tmp_path / "r.json")
    assert set(report["ratios"]) == {"total16_over_best", "ttft60_over_best"}
    assert [row["system"] for row in report["rows"]] == ["kvrelay", "transformers"]
    assert len((tmp_path / "t.md").read_text().splitlines()) == 4


@pytest.fixture
def _heeded_interrupts() -> Iterator[None]:
    """A shell has what it runs in the background ignore Ctrl-C, this suite too, and processes would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeded_interrupts")
def test_interrupted_benchmark_takes_its_cluster_down() -> None:
    process = subprocess.Popen([*BENCH, "load", "--requests", "1000"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            if "closed" in line:
                break
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.stderr.read()
    assert process.wait(60) == 130
    deadline = time.monotonic() + 10
    while _children_of(process.pid):
        assert time.monotonic() < deadline, "the cluster was left behind"
        time.sleep(0.05)


def _children_of(pid: int) -> list[str]:
    """Command lines that name a process as the one they must not outlive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "kvrelay.cluster.child" in words and str(pid) in words:
                found.append(" ".join(words))
    return found


def test_wrong_settings_start_nothing() -> None:
    for flags in (["load", "--trace", "nonsense"], ["spec", "--drafter", "nonsense"], ["load", "--plot", "x.txt"]):
        done = subprocess.run([*BENCH, *flags], check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, flags
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stderr
