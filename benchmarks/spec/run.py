"""The speculation benchmark: every task by plain decoding and with each drafter, by turns, then 16 streams at once."""

import asyncio
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.clusters import ClusterPlan, running_clusters, setting_choices
from benchmarks.common.data import corpus
from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name, present, ratio
from benchmarks.common.stats import round_order
from benchmarks.spec.figures import SHOWN_POSITIONS, Tally, merged
from benchmarks.spec.tasks import EDITING, SpecTask, TextSource, chosen_categories, load_tasks
from benchmarks.spec.variants import ClusterVariant, LocalText, LocalVariant, Variant
from kvrelay.errors import InvalidRequest

PLAIN = "none"
"""The variant without speculation, named as workers name it."""

Tallies = Mapping[tuple[str, str], Sequence[Tally]]
"""By drafter and category, one tally per round."""
Speeds = Mapping[str, Sequence[float]]
"""Tokens per second of many streams by drafter, one per round."""


@dataclass(frozen=True, slots=True)
class SpecSettings:
    """What is run."""

    cluster: ClusterPlan
    drafters: tuple[str, ...] = ("ngram",)
    categories: tuple[str, ...] = ()
    """Empty: all."""
    limit: int | None = 10
    """Most tasks of each category."""
    output_tokens: int = 512
    rounds: int = 1
    num_streams: int = 16
    """Streams of the last part; 0 leaves it out."""
    is_local: bool = False
    """Whether engines in this process are measured instead of clusters behind gateways."""

    def __post_init__(self) -> None:
        known = [choice for choice in setting_choices("speculation") if choice != PLAIN]
        for drafter in self.drafters:
            if drafter not in known:
                raise InvalidRequest("drafter", f"{drafter!r} is none of {', '.join(known)}")
        chosen_categories(self.categories)

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        return {
            "model": model_name(self.cluster.model),
            "worker_args": list(self.cluster.worker_args),
            "drafters": list(self.drafters),
            "categories": list(chosen_categories(self.categories)),
            "limit": self.limit,
            "output_tokens": self.output_tokens,
            "turns": "first",
            "rounds": self.rounds,
            "num_streams": self.num_streams,
            "in_process": self.is_local,
        }


async def run_spec(settings: SpecSettings, progress: BenchProgress) -> BenchReport:
    """Run all tasks of all rounds.

    Raises:
        ClusterError: A cluster does not start.
        EngineError: A request failed.
    """
    if settings.is_local:
        model = settings.cluster.model
        plans = _plans(settings)
        progress.say("loading models")
        engines = {name: LocalVariant(model, plan.worker_args) for name, plan in plans.items()}
        texts = LocalText(model)
        prompts = PromptSource([token_id for text in corpus() for token_id in await texts.tokenize(text)])
        return await _measure(settings, engines, texts, prompts, engines[PLAIN].context_length, progress)
    async with running_clusters(_plans(settings), progress) as clients:
        context = (await clients[PLAIN].list_models())[0].context_length
        prompts = await PromptSource.load(clients[PLAIN])
        clusters = {name: ClusterVariant(client) for name, client in clients.items()}
        return await _measure(settings, clusters, clients[PLAIN], prompts, context, progress)


def _plans(settings: SpecSettings) -> dict[str, ClusterPlan]:
    return {name: settings.cluster.with_args("--speculation", name) for name in (PLAIN, *settings.drafters)}


async def _measure(
    settings: SpecSettings,
    variants: Mapping[str, Variant],
    texts: TextSource,
    prompts: PromptSource,
    context: int,
    progress: BenchProgress,
) -> BenchReport:
    for variant in variants.values():
        await variant.prepare(prompts, context // 2)
    progress.say("preparing tasks")
    categories = chosen_categories(settings.categories)
    tasks = await load_tasks(texts, categories, settings.limit, settings.output_tokens, context)
    if not tasks:
        raise InvalidRequest("category", "none of the tasks fits the model's context")
    progress.begin(settings.rounds * (len(tasks) + bool(settings.num_streams)))
    tallies: dict[tuple[str, str], list[Tally]] = defaultdict(list)
    speeds: dict[str, list[float]] = defaultdict(list)
    for round_index in range(settings.rounds):
        for key, tally in (await single_streams(variants, tasks, round_index, progress)).items():
            tallies[key].append(tally)
        if settings.num_streams:
            progress.say(f"round {round_index + 1}, {settings.num_streams} streams")
            for name in round_order(tuple(variants), round_index):
                salt = f"streams {name} {round_index}"
                speeds[name].append(await many_streams(variants[name], tasks, settings.num_streams, salt))
                await variants[name].settle()
            progress.advance()
    return build_report(settings, tallies, speeds)


async def single_streams(
    variants: Mapping[str, Variant], tasks: Sequence[SpecTask], round_index: int, progress: BenchProgress
) -> dict[tuple[str, str], Tally]:
    """Run every task with every variant, one request at a time; return tallies by variant and category."""
    tallies: dict[tuple[str, str], Tally] = defaultdict(Tally)
    for index, task in enumerate(tasks):
        progress.say(f"round {round_index + 1}, {task.category}")
        traces = {}
        for name in round_order(tuple(variants), index):
            # A salt per round: what n-gram drafting remembers of finished requests holds this round's other tasks, and
            # never the answer to the same one.
            traces[name] = await variants[name].run(task.token_ids, task.max_tokens, f"{name} {round_index}")
        plain = traces[PLAIN].token_ids
        for name, trace in traces.items():
            tallies[name, task.category].add(trace, is_same=trace.token_ids == plain)
        progress.advance()
    return tallies


async def many_streams(variant: Variant, tasks: Sequence[SpecTask], num_streams: int, salt: str) -> float:
    """Keep many streams running over tasks of all categories; return tokens per second."""
    by_category: dict[str, list[SpecTask]] = defaultdict(list)
    for task in tasks:
        by_category[task.category].append(task)
    depth = max(len(group) for group in by_category.values())
    # One of each category after the other, so that streams differ as they would in service.
    mixed = [group[place] for place in range(depth) for group in by_category.values() if place < len(group)]
    repeats = -(-2 * num_streams // len(mixed))
    waiting = deque((task, number) for number in range(repeats) for task in mixed[: 2 * num_streams])
    num_tokens = 0

    async def stream() -> None:
        nonlocal num_tokens
        while waiting:
            task, number = waiting.popleft()
            trace = await variant.run(task.token_ids, task.max_tokens, f"{salt} {number}")
            num_tokens += trace.num_tokens

    started_s = time.perf_counter()
    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return num_tokens / (time.perf_counter() - started_s)


def _speed_ratio(tallies: Tallies, drafter: str, categories: Sequence[str]) -> float | None:
    """Return the drafter's speed over plain decoding's: tokens over seconds of all tasks, medians over rounds."""
    speeds = []
    for name in (drafter, PLAIN):
        rounds = zip(*(tallies[name, category] for category in categories), strict=True)
        speeds.append([merged(list(each)).tokens_per_s for each in rounds])
    return ratio(*speeds)


def build_report(settings: SpecSettings, tallies: Tallies, speeds: Speeds) -> BenchReport:
    """Return the report of all rounds."""
    measured = list(dict.fromkeys(category for _, category in tallies))
    spec_bench = [category for category in measured if category != EDITING]
    groups = {category: [category] for category in measured}
    if len(spec_bench) > 1:
        groups["all of Spec-Bench"] = spec_bench
    rows: list[Row] = [
        _row(tallies, name, label, group) for name in settings.drafters for label, group in groups.items()
    ]
    rows += [_streams_row(speeds, name, settings.num_streams) for name in settings.drafters if speeds.get(name)]
    ratios: dict[str, float | None] = {}
    if "ngram" in settings.drafters:
        for category in ("rag", "summarization", EDITING):
            if category in measured:
                ratios[f"ngram_{category}"] = _speed_ratio(tallies, "ngram", [category])
    for name in ("eagle", "auto"):
        if name in settings.drafters and spec_bench:
            ratios[f"{name}_all"] = _speed_ratio(tallies, name, spec_bench)
    by_category = [_speed_ratio(tallies, name, [category]) for name in settings.drafters for category in measured]
    ratios["worst_category"] = min((value for value in by_category if value is not None), default=None)
    adaptive = "auto" if "auto" in settings.drafters else settings.drafters[0]
    ratios["adaptive_16"] = (
        ratio(speeds.get(adaptive, ()), speeds.get(PLAIN, ())) if settings.num_streams == 16 else None
    )
    return BenchReport(
        "spec", settings.as_json(), rows, present(ratios), charts=_charts(settings, tallies, groups), notes=_NOTES
    )


_NOTES = (
    "tokens per step: accepted drafts and the token that every step gives.",
    "accepted by position: share of steps in which at least 1, 2, ... drafts were accepted.",
)


def _row(tallies: Tallies, name: str, label: str, group: Sequence[str]) -> dict[str, JsonValue]:
    tally = merged([tally for category in group for tally in tallies[name, category]])
    plain = merged([tally for category in group for tally in tallies[PLAIN, category]])
    return {
        "drafter": name,
        "category": label,
        "num_tasks": tally.num_tasks,
        "tokens_per_step": tally.tokens_per_step,
        "acceptance": tally.acceptance,
        "accepted_by_position": tally.accepted_by_position(),
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": tally.tokens_per_s,
        "speedup": _speed_ratio(tallies, name, group),
        "num_different": tally.num_different,
    }


def _streams_row(speeds: Speeds, name: str, num_streams: int) -> dict[str, JsonValue]:
    return {
        "drafter": name,
        "category": f"{num_streams} streams",
        "plain_tokens_per_s": statistics.median(speeds[PLAIN]),
        "tokens_per_s": statistics.median(speeds[name]),
        "speedup": ratio(speeds[name], speeds[PLAIN]),
    }


def _charts(settings: SpecSettings, tallies: Tallies, groups: Mapping[str, Sequence[str]]) -> tuple[BarChart, ...]:
    labels = tuple(groups)
    speedups = {
        name: [_speed_ratio(tallies, name, group) or 0.0 for group in groups.values()] for name in settings.drafters
    }
    lengths = {
        name: [
            merged([tally for category in group for tally in tallies[name, category]]).tokens_per_step
            for group in groups.values()
        ]
        for name in settings.drafters
    }
    positions = tuple(str(position) for position in range(1, SHOWN_POSITIONS + 1))
    accepted = {
        name: {
            label: merged([tally for category in group for tally in tallies[name, category]]).accepted_by_position()
            for label, group in groups.items()
        }
        for name in settings.drafters
    }
    return (
        BarChart("speed over plain decoding", "×", labels, speedups),
        BarChart("tokens per step", "tokens", labels, lengths),
        *(
            BarChart(f"{name}: share of steps in which so many drafts were accepted", "share", positions, by_position)
            for name, by_position in accepted.items()
        ),
    )
