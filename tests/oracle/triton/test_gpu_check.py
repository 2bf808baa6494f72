"""The device script, rehearsed: its parts run on the CPU in small, so that a machine with a GPU meets no line unrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.report import Row
from benchmarks.gpu_check import CHECKS, TIMED, ratios_of, table_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["rows", "products", "attention", "sampling", "handoff", "check:model", "model:fp8"])
def test_parts_run_and_their_checks_are_good(part: str, tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--rehearse", "--only", part, "--json", str(report)]
    command += ["--seconds", "500"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    assert [row for row in rows if row["ok"] is False] == []
    started = {str(row["name"]).removesuffix(" starts") for row in rows if row["kind"] == "part"}
    assert started == {"ceilings", *(name for name in (*CHECKS, *TIMED) if part in name)}


def test_script_needs_no_more_than_its_page_says() -> None:
    """A machine with a GPU may have PyTorch, Triton, numpy and xxhash, and nothing else of ours."""
    absent = ("structlog", "gguf", "safetensors", "pydantic", "grpc", "yaml", "tokenizers", "huggingface_hub")
    parts = ("gpu_check", "gpu_handoff", "gpu_kernel_checks", "gpu_kernel_speed", "gpu_model")
    lines = [
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))",
        *(f"import benchmarks.{part}" for part in parts),
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_checks_are_good_on_the_device(tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--only", "check", "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ratios_take_the_best_way_to_cut_and_leave_out_what_is_missing() -> None:
    rows: list[Row] = [
        {"kind": "speed", "name": "decode attention 64 x 4096 torch.bfloat16", "share_of_floor": 0.7},
        {"kind": "speed", "name": "decode attention 64 x 4096 torch.bfloat16", "share_of_floor": 0.8},
        {"kind": "speed", "name": "decode attention 64 x 4096 torch.int8", "share_of_floor": 0.9},
        {"kind": "model", "name": "decode dense weights, bfloat16 KV, batch 1", "tokens_per_s": 200.0},
        {"kind": "model", "name": "decode int4 weights, bfloat16 KV, batch 1", "tokens_per_s": 500.0},
        {"kind": "part", "name": "handoff", "ok": False, "message": "no time was left"},
    ]
    assert ratios_of(rows) == {"decode_attention_share": 0.8, "int4_over_bf16_decode": 2.5}


def test_table_tells_failures_first_and_targets_last() -> None:
    rows: list[Row] = [
        {"kind": "check", "name": "linear", "ok": True},
        {"kind": "check", "name": "decode", "ok": False, "error": 0.5, "tolerance": 0.01},
        {"kind": "speed", "name": "silu_mul", "ok": True, "us": 10.0, "floor_us": 8.0, "share_of_floor": 0.8},
    ]
    lines = table_of(rows)
    assert lines[0] == "checks: 1 of 2 good"
    assert lines[1] == "  FAILED decode: error 0.5 over 0.01"
    assert "silu_mul" in lines[2]
    assert lines[-1].endswith("not measured")
