"""kvrelay beside other systems on this machine: `python -m benchmarks.compare`.

All systems are loaded, and take turns with the same prompts: one stream's decode speed, time to the first token,
prefill of a long prompt, 16 streams' total speed. Only the one that is measured runs; the others are stopped. Results:
medians, ratios, one Markdown table.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common.clusters import ClusterPlan, running_cluster
from benchmarks.common.deliver import Outputs, run_and_deliver
from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.report import BarChart, BenchReport, JsonValue, Row, model_name, present, ratio
from benchmarks.common.stats import round_order
from benchmarks.common.table import markdown_table
from benchmarks.peers.answers import Peer
from benchmarks.peers.find import LLAMACPP, LLAMACPP_Q4_0, OPENVINO, PEERS, chosen_peers, install, missing, running_peer
from benchmarks.peers.kvrelay_peer import NAME, KvrelayPeer
from engine.model.files.source import resolve_model
from kvrelay.cli.console import err, out, readable_errors
from kvrelay.errors import InvalidRequest

SHORT_TOKENS = 60
LONG_TOKENS = 1000
NUM_STREAMS = 16


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """What is run."""

    cluster: ClusterPlan
    peers: tuple[str, ...]
    output_tokens: int = 64
    repeats: int = 2
    """Single-stream measurements of each system in a round."""
    rounds: int = 5
    num_streams: int = NUM_STREAMS
    short_tokens: int = SHORT_TOKENS
    long_tokens: int = LONG_TOKENS

    def as_json(self) -> dict[str, JsonValue]:
        """Return the settings as the report shows them."""
        return {
            "model": model_name(self.cluster.model),
            "worker_args": list(self.cluster.worker_args),
            "peers": list(self.peers),
            "output_tokens": self.output_tokens,
            "repeats": self.repeats,
            "rounds": self.rounds,
            "num_streams": self.num_streams,
            "short_tokens": self.short_tokens,
            "long_tokens": self.long_tokens,
        }


@dataclass(slots=True)
class Samples:
    """What one system showed."""

    decode1: list[float] = field(default_factory=list)
    """Tokens per second of one stream, after its first token."""
    ttft60_ms: list[float] = field(default_factory=list)
    prefill1000: list[float] = field(default_factory=list)
    """Prompt tokens per second until the first token."""
    total16: list[float] = field(default_factory=list)
    """Tokens per second of many streams together, prefill included."""


async def run_compare(settings: CompareSettings, progress: BenchProgress) -> BenchReport:
    """Measure every system in every round.

    Raises:
        EngineError: A system failed.
        ClusterError: The cluster does not start.
    """
    model = resolve_model(settings.cluster.model).path
    samples: dict[str, Samples] = defaultdict(Samples)
    progress.begin(settings.rounds * (1 + len(settings.peers)))
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(running_cluster(settings.cluster, progress, NAME))
        prompts = await PromptSource.load(client)
        systems: list[Peer] = [KvrelayPeer(client)]
        for name in settings.peers:
            progress.say(f"starting {name}")
            peer = await stack.enter_async_context(running_peer(name, model, len(os.sched_getaffinity(0))))
            systems.append(peer)
            peer.pause()
        for system in systems:
            progress.say(f"warming up {system.name}")
            await _measure(system, prompts, settings, "warm-up", Samples())
        for round_index in range(settings.rounds):
            for system in round_order(systems, round_index):
                progress.say(f"round {round_index + 1}, {system.name}")
                await _measure(system, prompts, settings, f"round {round_index}", samples[system.name])
                progress.advance()
    return build_report(settings, samples)


async def _measure(system: Peer, prompts: PromptSource, settings: CompareSettings, key: str, samples: Samples) -> None:
    """Run one system's round; the prompts depend on the round alone."""
    short = [prompts.cut(settings.short_tokens, f"{key} short {index}") for index in range(settings.repeats)]
    long = [prompts.cut(settings.long_tokens, f"{key} long {index}") for index in range(settings.repeats)]
    many = [prompts.cut(settings.short_tokens, f"{key} stream {index}") for index in range(settings.num_streams)]
    system.resume()
    try:
        for answer in (await system.run(short, settings.output_tokens, together=False)).answers:
            samples.decode1.append(answer.decode_tokens_per_s)
            samples.ttft60_ms.append(answer.first_s * 1e3)
        for answer in (await system.run(long, 1, together=False)).answers:
            samples.prefill1000.append(settings.long_tokens / answer.first_s)
        together = await system.run(many, settings.output_tokens, together=True)
        samples.total16.append(together.num_tokens / together.seconds)
    finally:
        system.pause()


def build_report(settings: CompareSettings, samples: Mapping[str, Samples]) -> BenchReport:
    """Return the report of what all systems showed; ratios over a system that was not measured are absent."""
    ours = samples[NAME]
    peers = {name: found for name, found in samples.items() if name != NAME}
    best_total = max((found.total16 for found in peers.values()), key=statistics.median, default=[])
    best_ttft = min((found.ttft60_ms for found in peers.values()), key=statistics.median, default=[])
    ratios = {
        f"decode1_over_{name}": ratio(ours.decode1, peers[name].decode1)
        for name in (OPENVINO, LLAMACPP, LLAMACPP_Q4_0)
        if name in peers
    }
    ratios["total16_over_best"] = ratio(ours.total16, best_total)
    if OPENVINO in peers:
        ratios["prefill1000_over_openvino"] = ratio(ours.prefill1000, peers[OPENVINO].prefill1000)
    ratios["ttft60_over_best"] = ratio(ours.ttft60_ms, best_ttft)
    rows: list[Row] = [
        {
            "system": name,
            "decode_1_stream_tokens_per_s": statistics.median(found.decode1),
            f"total_{settings.num_streams}_streams_tokens_per_s": statistics.median(found.total16),
            f"ttft_{settings.short_tokens}_tokens_ms": statistics.median(found.ttft60_ms),
            f"prefill_{settings.long_tokens}_tokens_per_s": statistics.median(found.prefill1000),
        }
        for name, found in samples.items()
    ]
    absent = [name for name in PEERS if name not in peers]
    notes = (
        "Medians of one interleaved run; greedy, the same prompts, speculation off.",
        *((f"Not measured: {', '.join(absent)}.",) if absent else ()),
    )
    return BenchReport("compare", settings.as_json(), rows, present(ratios), charts=_charts(rows), notes=notes)


def _charts(rows: Sequence[Row]) -> tuple[BarChart, ...]:
    labels = tuple(str(row["system"]) for row in rows)
    names = [name for name in rows[0] if name != "system"] if rows else []
    return tuple(
        BarChart(
            name.replace("_", " "),
            "ms" if name.endswith("_ms") else "tokens/s",
            labels,
            {name: [float(str(row[name])) for row in rows]},
        )
        for name in names
    )


def main(
    model: Annotated[
        str, typer.Option("--model", help="smollm2 or a .gguf file; peers read the same file.")
    ] = "smollm2",
    peer: Annotated[
        list[str] | None, typer.Option("--peer", help=f"One of {', '.join(PEERS)}; default: all that are here.")
    ] = None,
    install_peer: Annotated[
        list[str] | None, typer.Option("--install", help="Install this peer into an environment of its own, and end.")
    ] = None,
    worker_arg: Annotated[list[str] | None, typer.Option("--worker-arg", help="A flag for kvrelay's workers.")] = None,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens of each answer.")] = 64,
    streams: Annotated[int, typer.Option("--streams", min=1, help="Streams that run together.")] = NUM_STREAMS,
    long_tokens: Annotated[int, typer.Option("--long-tokens", min=1, help="Tokens of the long prompt.")] = LONG_TOKENS,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Single-stream requests in a round.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often the systems take turns.")] = 5,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="One JSON object; - = stdout.")
    ] = None,
    plot_file: Annotated[str | None, typer.Option("--plot", metavar="FILE.png", help="Draw the figures.")] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table in Markdown.")
    ] = None,
    record: Annotated[bool, typer.Option("--record", help="Append the figures to benchmarks/results.csv.")] = False,
) -> None:
    """Measure kvrelay and other systems on this machine, by turns, with the same prompts."""
    with readable_errors():
        if install_peer:
            for name in install_peer:
                install(name)
            return
        chosen = chosen_peers(peer or ())
        for name in PEERS:
            if name not in chosen and (why := missing(name)):
                err.print(f"without {name}: {why}", markup=False, soft_wrap=True)
        plan = ClusterPlan(model, worker_args=("--speculation", "none", *(worker_arg or ())))
        settings = CompareSettings(
            cluster=plan,
            peers=tuple(chosen),
            output_tokens=output_tokens,
            repeats=repeats,
            rounds=rounds,
            num_streams=streams,
            long_tokens=long_tokens,
        )
        outputs = Outputs(json_file, plot_file, record)
        report = run_and_deliver("compare", lambda progress: run_compare(settings, progress), outputs, out, err)
        if markdown_file is not None:
            try:
                markdown_file.write_text(markdown_table(report.rows), encoding="utf-8")
            except OSError as error:
                raise InvalidRequest("markdown", f"cannot write {markdown_file}: {error.strerror}") from error


if __name__ == "__main__":
    typer.run(main)
