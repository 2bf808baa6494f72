"""`kvrelay demo`: a local cluster with a real model, a few prompts, and where the time went."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from kvrelay.cli import options
from kvrelay.cli.console import Progress, err, out, print_json, readable_errors

if TYPE_CHECKING:
    from kvrelay.cli.report import RequestReport
    from kvrelay.client import AsyncClient
    from kvrelay.cluster.local import ClusterConfig, ClusterEvent, LocalCluster
    from kvrelay.requests import SamplingOptions

FIRST_PROMPT = "What is the capital of France? Answer in one sentence."
CONCURRENT_PROMPTS = (
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "What do bees make?",
    "Give me one tip for sleeping well.",
)

Transport = Literal["auto", "shm", "grpc", "ucx"]


def demo(
    prompt: Annotated[str, typer.Option("--prompt", help="First message to the model.")] = FIRST_PROMPT,
    model: Annotated[
        str, typer.Option("--model", help="smollm2, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2",
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=64, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option("--decode", min=1, max=64, help="Number of decode workers.")] = 1,
    transport: Annotated[Transport, typer.Option("--transport", help="How KV travels.")] = "auto",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of each answer.")] = 64,
    as_json: options.Json = False,
) -> None:
    """Start a local cluster, ask a real model a few things, show where the time went, and stop."""
    from engine.model.files.source import resolve_model
    from kvrelay.cluster.local import ClusterConfig

    with readable_errors():
        resolve_model(model)
        config = ClusterConfig(
            model=model,
            num_prefill=prefill,
            num_decode=decode,
            worker_args=("--transport", transport),
        )
        asyncio.run(_demo(config, prompt, max_tokens, as_json=as_json))


async def _demo(config: "ClusterConfig", prompt: str, max_tokens: int, *, as_json: bool) -> None:
    from kvrelay.client import AsyncClient

    task = asyncio.current_task()
    if task is not None:
        # As Ctrl-C does: the cluster is drained, not left to the kernel.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    # Greedy, so that the demo says the same each time.
    sampling: SamplingOptions = {"temperature": 0.0, "max_tokens": max_tokens}
    async with _started(config) as cluster, AsyncClient(cluster.target) as client:
        await _show_banner(client, cluster)
        first = await _ask_aloud(client, prompt, sampling, is_silent=as_json)
        with Progress(f"{len(CONCURRENT_PROMPTS)} requests at once"):
            others = await asyncio.gather(*(_ask(client, each, sampling) for each in CONCURRENT_PROMPTS))
    reports = [first, *others]
    if as_json:
        shown = {"name": "demo", "model": config.model, "requests": [report.as_json() for report in reports]}
        print_json(shown)
    else:
        _show(others, reports)


@contextlib.asynccontextmanager
async def _started(config: "ClusterConfig") -> AsyncIterator["LocalCluster"]:
    """Run a cluster around the block, with a progress display while it starts."""
    from kvrelay.cluster.local import LocalCluster

    progress = Progress("starting")

    def show(event: "ClusterEvent") -> None:
        progress.update(event.text)

    cluster = LocalCluster(config, on_event=show)
    with progress:
        await cluster.__aenter__()
    try:
        yield cluster
    finally:
        with Progress("draining"):
            await cluster.stop()
    err.print("all processes have drained and ended" if cluster.is_clean else "some processes ended badly")


async def _show_banner(client: "AsyncClient", cluster: "LocalCluster") -> None:
    from kvrelay.cli.server.banner import ask_workers, ready_banner
    from kvrelay.cli.status import kernel_notes

    info, models = await client.server_info(), await client.list_models()
    err.print(ready_banner(cluster.target, models, info, await ask_workers(info), cluster.processes))
    for note in kernel_notes(info):
        err.print(Text(note, style="yellow"), soft_wrap=True)


async def _ask(client: "AsyncClient", prompt: str, sampling: "SamplingOptions") -> "RequestReport":
    from kvrelay.cli.report import RequestRecorder

    recorder = RequestRecorder(prompt)
    async for event in client.generate(messages=[("user", prompt)], **sampling):
        recorder.add(event)
    return recorder.report()


async def _ask_aloud(
    client: "AsyncClient", prompt: str, sampling: "SamplingOptions", *, is_silent: bool
) -> "RequestReport":
    """Ask and stream the answer to the terminal as it comes."""
    from kvrelay.cli.report import RequestRecorder
    from kvrelay.results import Chunk

    recorder = RequestRecorder(prompt)
    if not is_silent:
        out.print(Text.assemble(("\n> ", "bold"), (prompt, "bold")))
    async for event in client.generate(messages=[("user", prompt)], **sampling):
        recorder.add(event)
        if isinstance(event, Chunk) and not is_silent:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    if not is_silent:
        sys.stdout.write("\n")
    return recorder.report()


def _show(others: Sequence["RequestReport"], reports: Sequence["RequestReport"]) -> None:
    from kvrelay.cli.report import phase_table

    for report in others:
        out.print(Text.assemble(("\n> ", "bold"), (report.prompt, "bold")))
        out.print(Text(report.text.strip()))
    out.print()
    out.print(phase_table(reports, f"where the time went (the last {len(others)} ran at once)"))
