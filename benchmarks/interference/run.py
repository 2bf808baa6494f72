"""The interference benchmark: quiet and disturbed windows, disaggregated and in one process, by turns."""

import statistics
from collections import defaultdict
from dataclasses import dataclass, replace

from benchmarks.common.clusters import ClusterPlan, running_clusters, warm_up
from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name, present, ratio
from benchmarks.common.stats import Spread, median_or_none, round_order, spread
from benchmarks.common.stream import wait_idle
from benchmarks.interference.window import WindowPlan, WindowResult, run_window
from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidRequest

DISAGGREGATED = "disaggregated"
COLOCATED = "colocated"
PHASES = ("quiet", "disturbed")
STREAM_PROMPT_TOKENS = 32
LONGEST_STREAM_TOKENS = 2048
IDLE_TIMEOUT_S = 120.0
KV_MEMORY_MIB = 1024
"""Room for long streams and long prompts side by side, so that no one is preempted for want of blocks."""


@dataclass(frozen=True, slots=True)
class InterferenceSettings:
    """What is run."""

    cluster: ClusterPlan
    num_streams: int = 4
    long_prompt_tokens: int = 1200
    long_output_tokens: int = 8
    interval_s: float = 1.0
    window_s: float = 10.0
    rounds: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("interval_s", "window_s"):
            if getattr(self, name) <= 0:
                raise InvalidRequest(name, "must be above 0")

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        return {
            "model": model_name(self.cluster.model),
            "transport": self.cluster.transport,
            "worker_args": list(self.cluster.worker_args),
            "num_streams": self.num_streams,
            "long_prompt_tokens": self.long_prompt_tokens,
            "long_output_tokens": self.long_output_tokens,
            "interval_s": self.interval_s,
            "window_s": self.window_s,
            "rounds": self.rounds,
            "seed": self.seed,
        }


async def run_interference(settings: InterferenceSettings, progress: BenchProgress) -> BenchReport:
    """Run the windows of all rounds.

    Raises:
        InvalidRequest: The long prompts do not fit the model's context.
        ClusterError: A cluster does not start.
        EngineError: A stream failed.
    """
    base = settings.cluster
    # Ahead of the caller's own flags, which win.
    plan = replace(base, worker_args=(f"--kv-memory-mib={KV_MEMORY_MIB}", *base.worker_args))
    plans = {DISAGGREGATED: plan, COLOCATED: replace(plan, num_prefill=0)}
    windows: dict[tuple[str, str], list[WindowResult]] = defaultdict(list)
    progress.begin(settings.rounds * len(plans) * len(PHASES))
    async with running_clusters(plans, progress) as clients:
        context = (await clients[DISAGGREGATED].list_models())[0].context_length
        if settings.long_prompt_tokens + settings.long_output_tokens > context:
            raise InvalidRequest("prompt_tokens", f"does not fit the model's {context} tokens")
        prompts = await PromptSource.load(clients[DISAGGREGATED], settings.seed)
        for client in clients.values():
            await warm_up(client, prompts, context // 2)
        for round_index in range(settings.rounds):
            for name in round_order(tuple(plans), round_index):
                for phase in PHASES:
                    progress.say(f"round {round_index + 1}, {name}, {phase}")
                    window = await _window(clients[name], prompts, settings, context, phase, f"{name} {round_index}")
                    windows[name, phase].append(window)
                    progress.advance()
    return build_report(settings, windows)


async def _window(
    client: AsyncClient, prompts: PromptSource, settings: InterferenceSettings, context: int, phase: str, key: str
) -> WindowResult:
    plan = WindowPlan(
        num_streams=settings.num_streams,
        stream_prompt_tokens=STREAM_PROMPT_TOKENS,
        stream_output_tokens=min(LONGEST_STREAM_TOKENS, context - STREAM_PROMPT_TOKENS),
        seconds=settings.window_s,
        long_prompt_tokens=settings.long_prompt_tokens,
        long_output_tokens=settings.long_output_tokens,
        interval_s=settings.interval_s,
        is_disturbed=phase == "disturbed",
    )
    result = await run_window(client, prompts, plan, f"{key} {phase}")
    await wait_idle(client, IDLE_TIMEOUT_S)
    return result


def build_report(settings: InterferenceSettings, windows: dict[tuple[str, str], list[WindowResult]]) -> BenchReport:
    """Return the report of all windows, by cluster and phase."""
    spreads = {key: [spread(window.gaps_ms) for window in found if window.gaps_ms] for key, found in windows.items()}
    rows: list[Row] = [
        _row(name, phase, spreads[name, phase], found, settings.window_s) for (name, phase), found in windows.items()
    ]
    ratios = {
        "p99_over_quiet_p50": _p99_over_quiet_p50(spreads, DISAGGREGATED),
        "colocated_p99_over_quiet_p50": _p99_over_quiet_p50(spreads, COLOCATED),
    }
    return BenchReport(
        "interference",
        settings.as_json(),
        rows,
        present(ratios),
        charts=(_chart(spreads),),
        notes=(
            "Times between messages of one stream, speculation off; percentiles of each window, medians over rounds.",
        ),
    )


def _p99_over_quiet_p50(spreads: dict[tuple[str, str], list[Spread]], name: str) -> float | None:
    disturbed = [found.p99 for found in spreads[name, "disturbed"]]
    return ratio(disturbed, [found.p50 for found in spreads[name, "quiet"]])


def _row(name: str, phase: str, spreads: list[Spread], windows: list[WindowResult], window_s: float) -> Row:
    return {
        "cluster": name,
        "phase": phase,
        "num_gaps": sum(len(window.gaps_ms) for window in windows),
        "p50_ms": median_or_none([found.p50 for found in spreads]),
        "p95_ms": median_or_none([found.p95 for found in spreads]),
        "p99_ms": median_or_none([found.p99 for found in spreads]),
        "highest_ms": max((found.highest for found in spreads), default=None),
        "tokens_per_s": statistics.median(window.num_tokens / window_s for window in windows),
        "num_long_prompts": sum(window.num_long_sent for window in windows),
        "num_long_answered": sum(len(window.long_ttfts_ms) for window in windows),
        "long_ttft_p50_ms": median_or_none([ttft for window in windows for ttft in window.long_ttfts_ms]),
    }


def _chart(spreads: dict[tuple[str, str], list[Spread]]) -> BarChart:
    labels = tuple(f"{name}, {phase}" for name, phase in spreads)
    series = {
        which: [median_or_none([getattr(found, which) for found in each]) or 0.0 for each in spreads.values()]
        for which in ("p50", "p95", "p99")
    }
    return BarChart("time between tokens of running streams", "ms", labels, series, is_log=True)
