"""The load benchmark: scenarios against one cluster, one row each."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.common.clusters import ClusterPlan, running_cluster, warm_up
from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name
from benchmarks.common.stream import wait_idle
from benchmarks.load.arrivals import PlannedRequest, closed_loop, poisson, read_trace, replay
from benchmarks.load.measure import Slo, run_closed, run_open, summarize
from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidRequest

CONTEXT_MARGIN_TOKENS = 8
"""Left free behind prompt and output."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What is sent to which cluster."""

    cluster: ClusterPlan
    target: str | None = None
    """A gateway that runs already; None = a local cluster of its own."""
    streams: tuple[int, ...] = (4,)
    """Closed loops: requests kept running."""
    rates: tuple[float, ...] = ()
    """Open loops: Poisson arrivals per second."""
    trace: str | None = None
    trace_speed: float = 1.0
    trace_scale: float = 0.1
    num_requests: int = 32
    """Requests of each scenario."""
    prompt_tokens: int = 60
    output_tokens: int = 64
    slo_ttft_ms: float = 500.0
    slo_tpot_ms: float = 100.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.streams or self.rates or self.trace):
            raise InvalidRequest("streams", "give at least one of --streams, --rate and --trace")
        for name, values in (("streams", self.streams), ("rate", self.rates), ("trace_speed", (self.trace_speed,))):
            if any(value <= 0 for value in values):
                raise InvalidRequest(name, "must be above 0")
        if self.trace is not None:
            read_trace(self.trace)  # a wrong name is told before a cluster starts

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        plan = self.cluster
        own: dict[str, JsonValue] = (
            {}
            if self.target
            else {
                "model": model_name(plan.model),
                "prefill": plan.num_prefill,
                "decode": plan.num_decode,
                "transport": plan.transport,
                "worker_args": list(plan.worker_args),
            }
        )
        return own | {
            "is_own_cluster": self.target is None,
            "streams": list(self.streams),
            "rates": list(self.rates),
            "trace": None if self.trace is None else model_name(self.trace),
            "num_requests": self.num_requests,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "trace_speed": self.trace_speed,
            "trace_scale": self.trace_scale,
            "slo_ttft_ms": self.slo_ttft_ms,
            "slo_tpot_ms": self.slo_tpot_ms,
            "seed": self.seed,
        }


async def run_load(settings: LoadSettings, progress: BenchProgress) -> BenchReport:
    """Run every scenario, one after the other.

    Raises:
        InvalidRequest: The prompts do not fit the model's context.
        ClusterError: The cluster does not start.
    """
    progress.begin(len(settings.streams) + len(settings.rates) + bool(settings.trace))
    slo = Slo(settings.slo_ttft_ms, settings.slo_tpot_ms)
    rows: list[Row] = []
    async with _client(settings, progress) as client:
        context = (await client.list_models())[0].context_length
        _check_fits(settings, context)
        prompts = await PromptSource.load(client, settings.seed)
        await warm_up(client, prompts, context // 2)
        for num_streams in settings.streams:
            name = f"closed, {num_streams} streams"
            progress.say(name)
            planned = closed_loop(prompts, settings.num_requests, settings.prompt_tokens, settings.output_tokens, name)
            rows.append(summarize(name, await run_closed(client, planned, num_streams), slo))
            progress.advance()
        for name, planned in _open_scenarios(settings, prompts, context):
            await wait_idle(client)
            progress.say(name)
            rows.append(summarize(name, await run_open(client, planned), slo))
            progress.advance()
    return BenchReport("load", settings.as_json(), rows, {}, charts=_charts(rows))


@asynccontextmanager
async def _client(settings: LoadSettings, progress: BenchProgress) -> AsyncIterator[AsyncClient]:
    if settings.target is not None:
        async with AsyncClient(settings.target) as client:
            yield client
    else:
        async with running_cluster(settings.cluster, progress, "a cluster") as client:
            yield client


def _check_fits(settings: LoadSettings, context: int) -> None:
    if settings.prompt_tokens + settings.output_tokens + CONTEXT_MARGIN_TOKENS > context:
        raise InvalidRequest("prompt_tokens", f"with --output-tokens it does not fit the model's {context} tokens")


def _open_scenarios(
    settings: LoadSettings, prompts: PromptSource, context: int
) -> list[tuple[str, list[PlannedRequest]]]:
    scenarios = []
    for rate in settings.rates:
        name = f"open, {rate:g} requests/s"
        planned = poisson(
            prompts,
            settings.num_requests,
            settings.prompt_tokens,
            settings.output_tokens,
            rate,
            f"open {settings.seed}",
        )
        scenarios.append((name, planned))
    if settings.trace is not None:
        longest_output = max(context // 4, 1)
        planned = replay(
            read_trace(settings.trace),
            prompts,
            num_requests=settings.num_requests,
            speed=settings.trace_speed,
            scale=settings.trace_scale,
            longest_prompt=context - longest_output - CONTEXT_MARGIN_TOKENS,
            longest_output=longest_output,
        )
        scenarios.append((f"trace {model_name(settings.trace)}", planned))
    return scenarios


def _charts(rows: list[Row]) -> tuple[BarChart, ...]:
    labels = tuple(str(row["scenario"]) for row in rows)
    charts = []
    for name, title in (("ttft", "time to the first token"), ("inter_token", "time between tokens")):
        series = {which: [_number(row[f"{name}_{which}_ms"]) for row in rows] for which in ("p50", "p95", "p99")}
        charts.append(BarChart(title, "ms", labels, series))
    speeds = {"output tokens/s": [_number(row["output_tokens_per_s"]) for row in rows]}
    return (*charts, BarChart("throughput", "tokens/s", labels, speeds))


def _number(value: JsonValue) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
