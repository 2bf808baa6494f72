"""What the parts of the GPU check share: where they run, how they time, and where rows go. Measures nothing itself.

A part is a function that takes a `Bench` and emits rows. It runs in a process of its own (`gpu_check.py`), because an
error on the device makes every later call in the same process fail; rows are written out one by one for the same
reason. In a rehearsal everything runs on the CPU under Triton's interpreter, with sizes that take seconds: figures then
mean nothing, but every line of a part has run.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.report import JsonValue

_REPEATS = 7
_CALLS_PER_REPLAY = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device can do, measured by `gpu_kernel_speed.measure_ceilings` in the same run."""

    copy_bytes_per_s: float
    """Of a large device-to-device copy, bytes read plus bytes written."""
    matmul_flop_per_s: float
    """Of a large bf16 product of random data."""

    def seconds(self, num_bytes: float, flop: float = 0.0) -> float:
        """The floor of an operation: no version of it runs much faster."""
        return max(num_bytes / self.copy_bytes_per_s, flop / self.matmul_flop_per_s)


@dataclass(frozen=True, slots=True)
class Bench:
    """One part's run."""

    device: torch.device
    is_rehearsal: bool
    is_warm_up: bool
    """Whether to run everything once without timing it, so that compiled kernels lie in the disk cache."""
    out: Path
    """File to which rows are appended, one JSON object a line."""
    ceilings: Ceilings

    def emit(self, kind: str, name: str, **values: JsonValue) -> None:
        """Write one row."""
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "name": name, **values}) + "\n")

    def check(self, name: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
        """Emit whether a result is near its oracle: ||found - wanted|| / ||wanted||, and every element finite."""
        distance = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)
        error = float(distance)
        is_good = error <= tolerance and bool(torch.isfinite(found.double()).all())
        self.emit("check", name, ok=is_good, error=error if error == error else None, tolerance=tolerance)

    def expect(self, name: str, is_good: bool, **values: JsonValue) -> None:
        """Emit a check that is right or wrong."""
        self.emit("check", name, ok=is_good, **values)

    def attempt(self, kind: str, name: str, body: Callable[[], None]) -> None:
        """Run a body; what it raises becomes a row, and the part goes on."""
        try:
            body()
        except Exception as error:  # every kind of failure is a finding here
            self.emit(kind, name, ok=False, message=_text(error))

    def seconds(self, calls: Sequence[Callable[[], object]]) -> float:
        """Median time of one call, on the device alone.

        Args:
            calls: The same operation on different inputs, as many as it takes to pass the second-level cache. They are
                captured in a CUDA graph, so that launching costs nothing, and must not wait for the device.
        """
        if self.device.type != "cuda" or self.is_warm_up:
            return self._once(calls[0])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls[:2]:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        rounds = -(-_CALLS_PER_REPLAY // len(calls))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        return self.event_seconds(graph.replay) / (rounds * len(calls))

    def event_seconds(self, call: Callable[[], object], repeats: int = _REPEATS) -> float:
        """Median time of one call between two events; of a call that launches much, its launching counts too."""
        if self.device.type != "cuda" or self.is_warm_up:
            return self._once(call)
        times: list[float] = []
        for _ in range(repeats):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            call()
            end_event.record()
            end_event.synchronize()
            times.append(float(start_event.elapsed_time(end_event)) / 1000.0)
        return statistics.median(times)

    def speed(
        self,
        name: str,
        calls: Sequence[Callable[[], object]],
        *,
        num_bytes: float,
        flop: float = 0.0,
        baseline: Sequence[Callable[[], object]] | None = None,
        **values: JsonValue,
    ) -> None:
        """Time an operation against its floor and a baseline, and emit the row; a failure becomes the row.

        Args:
            name: Of the row.
            calls: See `seconds`.
            num_bytes: Least bytes the operation moves.
            flop: Operations it does, at the rate of bf16 products.
            baseline: PyTorch's way to the same result; one that fails is left out.
            values: More for the row.
        """
        row: dict[str, JsonValue] = dict(values)
        try:
            took, floor = self.seconds(calls), self.ceilings.seconds(num_bytes, flop)
            row |= {"us": took * 1e6, "floor_us": floor * 1e6, "share_of_floor": floor / took}
        except Exception as error:  # every kind of failure is a finding here
            self.emit("speed", name, ok=False, message=_text(error), **row)
            return
        if baseline is not None:
            try:
                torch_s = self.seconds(baseline)
                row |= {"torch_us": torch_s * 1e6, "times_torch": torch_s / took}
            except Exception as error:  # a baseline that this build of PyTorch lacks is no failure of ours
                row["torch_message"] = _text(error)
        self.emit("speed", name, ok=True, **row)

    def _once(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def randn(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
        """Fresh random numbers on the device."""
        return (torch.randn(shape, device=self.device, dtype=torch.float32) * scale).to(dtype)

    def size(self, production: int, rehearsal: int) -> int:
        """A size that a rehearsal keeps small."""
        return rehearsal if self.is_rehearsal else production

    @property
    def dtype(self) -> torch.dtype:
        """bf16, which the interpreter has not."""
        return torch.float16 if self.is_rehearsal else torch.bfloat16

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[-600:]}"


def read_rows(path: Path) -> list[Mapping[str, JsonValue]]:
    """The rows that a part wrote, as far as it came."""
    if not path.exists():
        return []
    rows: list[Mapping[str, JsonValue]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a part that was stopped in the middle of a line
            break
    return rows
