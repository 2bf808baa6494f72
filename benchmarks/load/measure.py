"""Sends planned requests and keeps what came back; turns traces into one row of figures."""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.common.report import JsonValue
from benchmarks.common.stats import spread
from benchmarks.common.stream import RequestTrace, run_request
from benchmarks.load.arrivals import PlannedRequest
from kvrelay.client import AsyncClient
from kvrelay.errors import EngineError


@dataclass(slots=True)
class LoadResult:
    """What one scenario brought."""

    duration_s: float = 0.0
    """From the first request to the last answer."""
    traces: list[RequestTrace] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Reason of each request that was refused or failed."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count for goodput."""

    ttft_ms: float
    tpot_ms: float

    def is_met(self, trace: RequestTrace) -> bool:
        """Whether a request kept both limits."""
        return trace.ttft_ms <= self.ttft_ms and (trace.tpot_ms or 0.0) <= self.tpot_ms


async def run_closed(client: AsyncClient, planned: Sequence[PlannedRequest], num_streams: int) -> LoadResult:
    """Keep `num_streams` requests running until all are done."""
    waiting = deque(planned)
    result = LoadResult()

    async def stream() -> None:
        while waiting:
            await _send(client, waiting.popleft(), result, None)

    started_s = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    result.duration_s = time.perf_counter() - started_s
    return result


async def run_open(client: AsyncClient, planned: Sequence[PlannedRequest]) -> LoadResult:
    """Send each request when it is due, however many are running; times count from when it was due."""
    result = LoadResult()
    started_s = time.perf_counter()

    async def send_when_due(request: PlannedRequest) -> None:
        due_s = started_s + request.due_s
        await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
        await _send(client, request, result, due_s)

    await asyncio.gather(*(send_when_due(request) for request in planned))
    result.duration_s = time.perf_counter() - started_s
    return result


async def _send(client: AsyncClient, request: PlannedRequest, result: LoadResult, due_s: float | None) -> None:
    try:
        trace = await run_request(client, request.token_ids, max_tokens=request.output_tokens, due_s=due_s)
    except EngineError as error:
        # A shed request is an answer of the system under test: it counts against the goodput, and the run goes on.
        result.failures.append(error.reason)
    else:
        result.traces.append(trace)


def summarize(scenario: str, result: LoadResult, slo: Slo) -> dict[str, JsonValue]:
    """Return the row of one scenario."""
    traces = result.traces
    num_requests = len(traces) + len(result.failures)
    num_good = sum(slo.is_met(trace) for trace in traces)
    seconds = max(result.duration_s, 1e-9)
    row: dict[str, JsonValue] = {
        "scenario": scenario,
        "num_requests": num_requests,
        "num_failed": len(result.failures),
        "duration_s": result.duration_s,
        "requests_per_s": len(traces) / seconds,
        "output_tokens_per_s": sum(trace.num_tokens for trace in traces) / seconds,
        "prompt_tokens_per_s": sum(trace.usage.prompt_tokens for trace in traces) / seconds,
        "cached_tokens_share": _share(
            sum(trace.usage.cached_tokens for trace in traces), sum(trace.usage.prompt_tokens for trace in traces)
        ),
        "goodput_per_s": num_good / seconds,
        "goodput_share": _share(num_good, num_requests),
    }
    row |= _spread_columns("ttft", [trace.ttft_ms for trace in traces])
    row |= _spread_columns("tpot", [trace.tpot_ms for trace in traces if trace.tpot_ms is not None])
    row |= _spread_columns("inter_token", [gap for trace in traces for gap in trace.gaps_ms])
    return row


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _spread_columns(name: str, samples_ms: Sequence[float]) -> dict[str, JsonValue]:
    if not samples_ms:
        return {f"{name}_{which}_ms": None for which in ("p50", "p95", "p99")}
    found = spread(samples_ms)
    return {f"{name}_p50_ms": found.p50, f"{name}_p95_ms": found.p95, f"{name}_p99_ms": found.p99}
