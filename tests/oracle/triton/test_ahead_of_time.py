"""Every kernel compiles for sm_90 and sm_80, and fits: what the interpreter accepts, the compiler must accept too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
_SHARED_LIMITS = {"sm_90": 227 * 1024, "sm_80": 163 * 1024}
"""Most shared memory a program can have."""
_MOST_STACK_BYTES = 256
"""A few spilled values are no harm; more mean that a tile is too large for its registers."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=["sm_90", "sm_80"])
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reports(target: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """One report a launch, from a process of its own without the interpreter and without older builds."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.oracle.triton.ahead_of_time", target]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_launch_compiles(reports: list[dict[str, object]]) -> None:
    assert len(reports) > 30
    failed = {f"{report['name']} {report['kernel']}": report["error"] for report in reports if "error" in report}
    assert not failed


def test_every_kernel_is_among_the_launches(reports: list[dict[str, object]]) -> None:
    launched = set[str]()
    for path in (ROOT / "engine" / "kernels" / "triton").glob("*.py"):
        launched |= set(re.findall(r"^ +(_\w+)\[.+\]\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert len(launched) > 10
    assert launched == {report["kernel"] for report in reports}


def test_every_launch_fits_the_device(target: str, reports: list[dict[str, object]]) -> None:
    limit = _SHARED_LIMITS[target]
    too_large = [report for report in reports if int(str(report.get("shared_bytes", 0))) > limit]
    assert not too_large
    spilled = [report for report in reports if int(str(report.get("stack_bytes", 0))) > _MOST_STACK_BYTES]
    assert not spilled


def test_products_use_the_tensor_cores(target: str, reports: list[dict[str, object]]) -> None:
    """Large tiles take the instructions of a warp group on sm_90; small ones the ones that a warp has."""
    large = "wgmma.mma_async" if target == "sm_90" else "mma.sync"
    wanted = {
        "decode-bf16": "mma.sync",
        "prefill-bf16": large,
        "linear-bf16": large,
        "int8-many-rows": large,
        "w4a16-bf16-awq": "mma.sync",
    }
    if target == "sm_90":
        wanted["fp8-many-rows"] = large
    used = {
        report["name"]: report["matrix_instructions"]
        for report in reports
        if report["name"] in wanted and report["matrix_instructions"]
    }
    assert used == {name: [instruction] for name, instruction in wanted.items()}
