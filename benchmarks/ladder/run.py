"""The ladder: every rung in every round, the lower ones in this process, the upper ones through a gateway."""

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.clusters import ClusterPlan, running_clusters
from benchmarks.common.progress import BenchProgress
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name, present, ratio
from benchmarks.common.stats import round_order
from benchmarks.common.stream import run_request, wait_idle
from benchmarks.ladder.local import LocalRungs, Measured
from benchmarks.ladder.work import Work, make_work
from engine.model.files.source import resolve_model
from kvrelay.client import AsyncClient
from kvrelay.serving.telemetry import configure_logging
from kvrelay.text.tokenizer import load_tokenizer

NAIVE = "naive: no KV cache"
CACHED = "+ KV cache"
BATCHED = "+ paged KV, continuous batching"
QUANTIZED = "+ native int8 kernels, two tiers"
SPECULATIVE = "+ speculative decoding"
FULL = "+ prefix cache"
RUNGS = (NAIVE, CACHED, BATCHED, QUANTIZED, SPECULATIVE, FULL)

CLUSTER_FLAGS = {
    QUANTIZED: ("--compute", "native", "--speculation", "none", "--no-prefix-cache"),
    SPECULATIVE: ("--compute", "native", "--speculation", "ngram", "--no-prefix-cache"),
    FULL: ("--compute", "native", "--speculation", "ngram"),
}


@dataclass(frozen=True, slots=True)
class LadderSettings:
    """What is run."""

    cluster: ClusterPlan
    num_streams: int = 16
    prefix_tokens: int = 256
    """Length of the document that all requests share."""
    output_tokens: int = 64
    naive_tokens: int = 8
    """Tokens that the naive rung computes in a round."""
    cached_requests: int = 1
    """Requests that the second rung serves in a round."""
    rounds: int = 3

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        return {
            "model": model_name(self.cluster.model),
            "worker_args": list(self.cluster.worker_args),
            "num_streams": self.num_streams,
            "prefix_tokens": self.prefix_tokens,
            "output_tokens": self.output_tokens,
            "naive_tokens": self.naive_tokens,
            "cached_requests": self.cached_requests,
            "rounds": self.rounds,
        }


async def run_ladder(settings: LadderSettings, progress: BenchProgress) -> BenchReport:
    """Run all rungs of all rounds.

    Raises:
        ClusterError: A cluster does not start.
        EngineError: A request failed.
    """
    configure_logging("bench", level="error")  # an engine is in this process, and standard output is the report's
    progress.begin(settings.rounds * len(RUNGS))
    model = settings.cluster.model
    tokenizer = load_tokenizer(resolve_model(model).path)
    work = make_work(tokenizer, settings.num_streams, settings.prefix_tokens, settings.output_tokens)
    progress.say("loading the model in this process")
    local = await asyncio.to_thread(LocalRungs, model, work)
    plans = {rung: settings.cluster.with_args(*flags) for rung, flags in CLUSTER_FLAGS.items()}
    measured: dict[str, list[Measured]] = defaultdict(list)
    async with running_clusters(plans, progress) as clients:
        # The quantized model's answers differ from fp32's by rounding: they have a reference of their own.
        reference = await _answer(clients[QUANTIZED], work.prompts[0], work.output_tokens, "reference")
        for round_index in range(settings.rounds):
            for rung in round_order(RUNGS, round_index):
                progress.say(f"round {round_index + 1}, {rung}")
                if rung in clients:
                    salt = f"{rung} {round_index}"
                    measured[rung].append(await _served(clients[rung], work, reference, salt))
                else:
                    measured[rung].append(await asyncio.to_thread(_run_local, local, rung, settings))
                progress.advance()
    return build_report(settings, measured)


def _run_local(local: LocalRungs, rung: str, settings: LadderSettings) -> Measured:
    if rung == NAIVE:
        return local.naive(settings.naive_tokens)
    return local.cached(settings.cached_requests) if rung == CACHED else local.batched()


async def _served(client: AsyncClient, work: Work, reference: Sequence[int], salt: str) -> Measured:
    """Serve all requests at once; the shared document has been asked about before, as documents are."""
    await _answer(client, work.prefix, 1, salt)
    await wait_idle(client)
    started = time.perf_counter()
    answers = await asyncio.gather(*(_answer(client, prompt, work.output_tokens, salt) for prompt in work.prompts))
    seconds = time.perf_counter() - started
    await wait_idle(client)
    return Measured(sum(map(len, answers)), seconds, is_same=answers[0] == reference)


async def _answer(client: AsyncClient, prompt: Sequence[int], max_tokens: int, salt: str) -> tuple[int, ...]:
    # The salt keeps a round from finding what an earlier one left in the caches.
    return (await run_request(client, prompt, max_tokens=max_tokens, cache_salt=salt)).token_ids


def build_report(settings: LadderSettings, measured: Mapping[str, Sequence[Measured]]) -> BenchReport:
    """Return the report of all rungs, one measurement per round each."""
    speeds = {rung: [each.tokens_per_s for each in measured[rung]] for rung in RUNGS}
    rows: list[Row] = [
        {
            "rung": rung,
            "where": "through the gateway" if rung in CLUSTER_FLAGS else "one process",
            "tokens_per_s": statistics.median(speeds[rung]),
            "factor_over_naive": ratio(speeds[rung], speeds[NAIVE]),
            "factor_over_previous": ratio(speeds[rung], speeds[RUNGS[index - 1]]) if index else None,
            "measured_tokens": sum(each.num_tokens for each in measured[rung]),
            "is_same_answer": all(each.is_same for each in measured[rung]),
        }
        for index, rung in enumerate(RUNGS)
    ]
    chart = BarChart(
        f"the same work, {settings.num_streams} requests",
        "tokens/s",
        RUNGS,
        {"tokens/s": [statistics.median(speeds[rung]) for rung in RUNGS]},
        is_log=True,
    )
    notes = (
        f"Requests: one document of about {settings.prefix_tokens} tokens, {settings.num_streams} questions about it, "
        f"{settings.output_tokens} tokens each; time includes prefill.",
        f"The first rung computes {settings.naive_tokens} tokens of one request a round, spread over its length, and "
        f"the second {settings.cached_requests} request(s); all others do all of the work.",
    )
    return BenchReport(
        "ladder",
        settings.as_json(),
        rows,
        present({"full_over_naive": ratio(speeds[FULL], speeds[NAIVE])}),
        charts=(chart,),
        notes=notes,
    )
