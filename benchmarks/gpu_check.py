"""The GPU path on a machine that has one: checks and times every kernel, and runs a model of 8B shape end to end.

    python -m benchmarks.gpu_check --json results.json

Needs PyTorch with CUDA and Triton, nothing else of the project's dependencies but numpy and xxhash; takes up to six
minutes on an H200. `--rehearse` runs every line of it in small on a CPU, under Triton's interpreter.

Every part runs in a process of its own, since an error on the device spoils the process that made it, and writes its
rows as it goes: what fails or runs out of time loses its own rows only. First the ceilings are measured, then all
checks run side by side while the timed parts compile what they will need; then each timed part has the device alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.common.report import BenchReport, JsonValue, write_json

_DEFAULT_SECONDS = 345.0
_CHECK_SECONDS = 150.0
_PART_SECONDS = 70.0
_CEILINGS_SECONDS = 60.0
_STATED_TARGETS = {
    "decode_attention_share": 0.75,
    "decode_bf16_share": 0.70,
    "prefill_share": 0.55,
    "int4_over_bf16_decode": 2.4,
}
"""What the GPU path is meant to reach on an H200; printed beside what was measured."""

CHECKS = ("check:decode", "check:prefill", "check:rows", "check:products", "check:sampling", "check:model")
TIMED = ("model:dense", "model:int4", "speed:attention", "speed:products", "model:fp8", "handoff", "speed:rows")


@dataclass(slots=True)
class _Running:
    """A part's process and the file of its rows."""

    name: str
    process: "subprocess.Popen[bytes]"
    rows: Path
    log: Path
    deadline: float


def run_part(name: str, out: Path, ceilings: Sequence[float], *, is_rehearsal: bool, is_warm_up: bool) -> None:
    """Run one part in this process."""
    import torch  # the parent process never loads it: it must not touch the device

    from benchmarks import gpu_handoff, gpu_kernel_checks, gpu_kernel_speed, gpu_model
    from benchmarks.gpu_bench import Bench, Ceilings
    from engine.model.cuda.linear import WeightFormat

    device = torch.device("cpu" if is_rehearsal else "cuda")
    bench = Bench(device, is_rehearsal, is_warm_up, out, Ceilings(*ceilings))
    parts: Mapping[str, Callable[[Bench], None]] = {
        "ceilings": gpu_kernel_speed.measure_ceilings,
        "check:decode": gpu_kernel_checks.check_decode,
        "check:prefill": gpu_kernel_checks.check_prefill,
        "check:rows": gpu_kernel_checks.check_rows,
        "check:products": gpu_kernel_checks.check_products,
        "check:sampling": gpu_kernel_checks.check_sampling,
        "check:model": gpu_model.check_model,
        "speed:attention": gpu_kernel_speed.time_attention,
        "speed:products": gpu_kernel_speed.time_products,
        "speed:rows": gpu_kernel_speed.time_rows,
        "handoff": gpu_handoff.time_handoff,
        "model:dense": partial(gpu_model.time_model, weight_format=WeightFormat.DENSE),
        "model:int4": partial(gpu_model.time_model, weight_format=WeightFormat.INT4),
        "model:fp8": partial(gpu_model.time_model, weight_format=WeightFormat.FP8),
    }
    bench.emit("part", f"{name} starts", ok=True, torch=torch.__version__, device=_device_name(device))
    with torch.no_grad():
        bench.attempt("part", name, partial(parts[name], bench))


def _device_name(device: object) -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else str(device)


class Check:
    """One run of all parts."""

    def __init__(self, folder: Path, seconds: float, *, is_rehearsal: bool, only: str) -> None:
        self._folder = folder
        self._deadline = time.monotonic() + seconds
        self._is_rehearsal = is_rehearsal
        self._only = only
        self._ceilings = (1e12, 1e14)
        self.rows: list[Mapping[str, JsonValue]] = []

    def run(self) -> None:
        """Run everything that there is time for."""
        self._collect([self._start("ceilings", _CEILINGS_SECONDS)])
        for row in self.rows:
            if row["kind"] == "ceilings":
                self._ceilings = float(str(row["copy_bytes_per_s"])), float(str(row["matmul_flop_per_s"]))
        checks = [self._start(name, _CHECK_SECONDS) for name in CHECKS if self._only in name]
        timed = [name for name in TIMED if self._only in name]
        if self._is_rehearsal:
            self._collect(checks)
        else:
            warm_ups = [self._start(name, _CHECK_SECONDS, is_warm_up=True) for name in timed if name != "handoff"]
            self._collect(checks)
            self._finish(warm_ups)
        for name in timed:
            left = self._deadline - time.monotonic()
            if left < 10.0:
                self.rows.append({"kind": "part", "name": name, "ok": False, "message": "no time was left"})
                continue
            self._collect([self._start(name, min(_PART_SECONDS if not self._is_rehearsal else 600.0, left))])

    def _start(self, name: str, seconds: float, *, is_warm_up: bool = False) -> _Running:
        stem = name.replace(":", "-") + ("-warm" if is_warm_up else "")
        rows, log = self._folder / f"{stem}.jsonl", self._folder / f"{stem}.log"
        command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", name, "--out", str(rows)]
        command += ["--ceilings", *(repr(ceiling) for ceiling in self._ceilings)]
        command += ["--rehearse"] * self._is_rehearsal + ["--warm-up"] * is_warm_up
        environment = os.environ | {"TRITON_INTERPRET": "1" if self._is_rehearsal else "0"}
        if self._is_rehearsal:
            # The interpreter multiplies with numpy, and on some processors OpenBLAS's choice is not row-exact.
            environment["OPENBLAS_CORETYPE"] = "Sandybridge"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        scale = 20.0 if self._is_rehearsal else 1.0
        return _Running(name, process, rows, log, time.monotonic() + seconds * scale)

    def _finish(self, parts: Sequence[_Running]) -> None:
        for part in parts:
            try:
                part.process.wait(max(0.1, part.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()

    def _collect(self, parts: Sequence[_Running]) -> None:
        self._finish(parts)
        for part in parts:
            found = _read_rows(part.rows)
            self.rows += found
            if part.process.returncode != 0:
                tail = part.log.read_text(encoding="utf-8", errors="replace")[-1500:]
                how = "ran out of time" if part.process.returncode < 0 else f"ended with {part.process.returncode}"
                self.rows.append({"kind": "part", "name": part.name, "ok": False, "message": f"{how}: {tail}"})


def _read_rows(path: Path) -> list[Mapping[str, JsonValue]]:
    # Imported late for the same reason as torch, which `gpu_bench` loads.
    import json

    rows: list[Mapping[str, JsonValue]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a part that was stopped in the middle of a line
            break
    return rows


def ratios_of(rows: Sequence[Mapping[str, JsonValue]]) -> dict[str, float]:
    """The figures that the targets speak of, as far as they were measured."""

    def best(kind: str, name: str, figure: str) -> float | None:
        found = [
            float(str(row[figure]))
            for row in rows
            if row["kind"] == kind and name in str(row["name"]) and figure in row
        ]
        return max(found, default=None)

    int4, dense = (
        best("model", f"decode {weights} weights, bfloat16 KV, batch 1", "tokens_per_s")
        for weights in ("int4", "dense")
    )
    figures = {
        "decode_attention_share": best("speed", "decode attention 64 x 4096 torch.bfloat16", "share_of_floor"),
        "decode_bf16_share": best("model", "decode dense weights, bfloat16 KV, batch 1", "share_of_floor"),
        "prefill_share": best("model", "prefill dense weights, bfloat16 KV", "share_of_floor"),
        "int4_over_bf16_decode": int4 / dense if int4 is not None and dense else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def table_of(rows: Sequence[Mapping[str, JsonValue]]) -> list[str]:
    """Lines for people: failures first, then every timed row, then the targets."""
    checks = [row for row in rows if row["kind"] == "check"]
    failed = [row for row in rows if row.get("ok") is False]
    lines = [f"checks: {sum(row['ok'] is True for row in checks)} of {len(checks)} good"]
    for row in failed:
        detail = row.get("message") or f"error {row.get('error')} over {row.get('tolerance')}"
        lines.append(f"  FAILED {row['name']}: {str(detail).strip()[-300:]}")
    for row in rows:
        if row["kind"] == "speed" and "us" in row:
            torch_us = f"{float(str(row['torch_us'])):9.1f}" if "torch_us" in row else " " * 9
            lines.append(
                f"{row['name']!s:52} {float(str(row['us'])):9.1f} us  floor {float(str(row['floor_us'])):9.1f}"
                f"  {float(str(row['share_of_floor'])):6.1%}  torch {torch_us}  {row.get('tiles', '')}"
            )
        if row["kind"] == "model" and "ms" in row:
            lines.append(
                f"{row['name']!s:52} {float(str(row['ms'])):9.3f} ms  floor {float(str(row['floor_ms'])):9.3f}"
                f"  {float(str(row['share_of_floor'])):6.1%}  {float(str(row['tokens_per_s'])):10.0f} tokens/s"
            )
        if row["kind"] == "handoff" and "total_ms" in row:
            lines.append(
                f"{row['name']!s:52} total {float(str(row['total_ms'])):8.2f} ms, prefill"
                f" {float(str(row['prefill_ms'])):8.2f}, exposed {float(str(row['exposed_ms'])):8.2f}"
            )
    measured = ratios_of(rows)
    for name, target in _STATED_TARGETS.items():
        found = f"{measured[name]:.3f}" if name in measured else "not measured"
        lines.append(f"target {name:28} {target:5.2f}  measured {found}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check, or one part of it; the status is 0 when every check was good and no part was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", default="-", help="file for the report, - = standard output")
    parser.add_argument("--seconds", type=float, default=_DEFAULT_SECONDS, help="time for everything")
    parser.add_argument("--only", default="", help="parts whose name holds this, such as model or check:rows")
    parser.add_argument("--rehearse", action="store_true", help="small sizes on the CPU, under the interpreter")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ceilings", type=float, nargs=2, default=(1e12, 1e14), help=argparse.SUPPRESS)
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        run_part(options.part, options.out, options.ceilings, is_rehearsal=options.rehearse, is_warm_up=options.warm_up)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        check = Check(Path(folder), options.seconds, is_rehearsal=options.rehearse, only=options.only)
        check.run()
    settings: dict[str, JsonValue] = {"is_rehearsal": options.rehearse, "only": options.only}
    write_json(BenchReport("gpu", settings, check.rows, ratios_of(check.rows)), options.json)
    sys.stderr.write("\n".join(table_of(check.rows)) + "\n")
    return 1 if any(row.get("ok") is False for row in check.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
