"""`kvrelay serve`: a local cluster that stays up until Ctrl-C or SIGTERM."""

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from kvrelay.cli.console import Progress, err, readable_errors
from kvrelay.serving.start_up import stops_at_once

if TYPE_CHECKING:
    from kvrelay.cluster.local import ClusterConfig, ClusterEvent, LocalCluster


def serve(context: typer.Context) -> None:
    """Run a local cluster: a gateway, prefill and decode workers."""
    from engine.model.files.source import resolve_model
    from kvrelay.cli.server.serve_settings import ServeSettings, check_keys
    from kvrelay.serving.settings import parse_settings

    settings = parse_settings(ServeSettings, context.args, "kvrelay serve")
    with readable_errors(), stops_at_once("kvrelay serve", (signal.SIGTERM,)):
        config = config_path(context.args)
        if config is not None:
            check_keys(config)
        # Once and here: a download shows its progress, and a name that leads nowhere starts nothing.
        resolve_model(settings.model)
        asyncio.run(_serve(settings.to_cluster(config)))


def config_path(argv: list[str]) -> Path | None:
    """Return the file that `--config` or KVRELAY_CONFIG names."""
    value = os.environ.get("KVRELAY_CONFIG", "")
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            value = argv[index + 1]
        elif word.startswith("--config="):
            value = word.partition("=")[2]
    return Path(value) if value else None


async def _serve(config: "ClusterConfig") -> None:
    from kvrelay.cluster.local import LocalCluster

    progress = Progress("starting")

    def show(event: "ClusterEvent") -> None:
        if event.process == "cluster":
            progress.update(event.text)
        else:
            err.print(Text(event.text, style="yellow"), soft_wrap=True)

    cluster = LocalCluster(config, on_event=show)
    stop_requested = asyncio.Event()

    def on_signal() -> None:
        if stop_requested.is_set():
            err.print("cutting running requests off")
            cluster.cut()
        stop_requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(_run(cluster, progress))
    stopping = asyncio.create_task(stop_requested.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        progress.stop()
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        if stop_requested.is_set():
            err.print("draining: running requests may finish; press Ctrl-C again to cut them off")
        await cluster.stop()
        if stop_requested.is_set():
            err.print("stopped")


async def _run(cluster: "LocalCluster", progress: Progress) -> None:
    """Start the cluster, show that it is ready, and raise what ends it."""
    from kvrelay.cli.server.banner import ask_workers, ready_banner
    from kvrelay.cli.status import kernel_notes
    from kvrelay.client import AsyncClient

    progress.start()
    await cluster.start()
    info = await cluster.wait_ready()
    async with AsyncClient(cluster.target) as client:
        models = await client.list_models()
    banner = ready_banner(cluster.target, models, info, await ask_workers(info), cluster.processes)
    progress.stop()
    err.print(banner)
    for note in kernel_notes(info):
        err.print(Text(note, style="yellow"), soft_wrap=True)
    if cluster.http_port is not None:
        err.print(Text(f"OpenAI-compatible HTTP: http://{cluster.http_target}/v1"), soft_wrap=True)
    err.print(Text(f'try: kvrelay generate "The capital of France is" --target {cluster.target}'), soft_wrap=True)
    raise await cluster.wait_failed()
