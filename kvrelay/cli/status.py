"""`kvrelay status | health | version`: questions that a running gateway answers at once."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.cli import options
from kvrelay.cli.console import FAILURE, err, out, print_json, readable_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from kvrelay.results import ModelSummary, ServerInfo, WorkerSummary

_DEFAULT_TARGET = "127.0.0.1:50051"
_TIMEOUT_S = 5.0


def status(target: options.Target = _DEFAULT_TARGET, as_json: options.Json = False) -> None:
    """Show the workers behind a gateway and what they are doing."""
    from rich.text import Text

    from kvrelay.client import Client

    with readable_errors(target), Client(target) as client:
        info, models = client.server_info(timeout_s=_TIMEOUT_S), client.list_models()
        if as_json:
            shown = {"target": target, "models": [asdict(model) for model in models], **asdict(info)}
            print_json(shown)
        else:
            out.print(_table(target, info, models))
            for note in kernel_notes(info):
                out.print(Text(note, style="yellow"), soft_wrap=True)


def _table(target: str, info: "ServerInfo", models: "Sequence[ModelSummary]") -> "Table":
    from rich.table import Table
    from rich.text import Text

    names = ", ".join(model.name for model in models) or "no model yet"
    table = Table(
        title=Text(f"{target} · kvrelay {info.version} · {names} · up {info.uptime_ms / 1000:,.0f} s"),
        caption=Text(f"{info.num_running_requests} requests running, {info.num_queued_requests} queued"),
        title_justify="left",
        caption_justify="left",
    )
    for name in (
        "worker",
        "role",
        "address",
        "state",
        "running",
        "waiting",
        "leases",
        "free blocks",
        "kernels",
        "transports",
    ):
        table.add_column(name)
    for worker in info.workers:
        state = "draining" if worker.is_draining else "connected" if worker.is_connected else "not connected"
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.address,
            state,
            str(worker.num_running),
            str(worker.num_waiting),
            str(worker.num_leases) if worker.role == "decode" else "-",
            f"{worker.num_free_blocks:,} of {worker.num_blocks:,}",
            kernel_names(worker),
            ", ".join(worker.transports),
        )
    return table


def kernel_names(worker: "WorkerSummary") -> str:
    """Return what a worker computes with, without the reason."""
    return worker.kernels.partition(",")[0] or "?"


def kernel_notes(info: "ServerInfo") -> list[str]:
    """Return a line for each reason why workers compute with slow kernels; empty if none does."""
    notes: dict[str, list[str]] = {}
    for worker in info.workers:
        if "," in worker.kernels:
            notes.setdefault(worker.kernels, []).append(worker.worker_id)
    return [f"{', '.join(worker_ids)}: {kernels}" for kernels, worker_ids in notes.items()]


def health(
    target: options.Target = _DEFAULT_TARGET,
    service: Annotated[
        str, typer.Option("--service", help="Full name of the service; empty asks only whether the process lives.")
    ] = "kvrelay.v1.InferenceService",
    timeout: Annotated[float, typer.Option("--timeout", min=0.001, help="Longest wait for the answer in s.")] = 5.0,
) -> None:
    """Ask a gateway or worker whether a service is ready: exit code 0 if it is, 1 if not."""
    from kvrelay.client import Client

    with readable_errors(target), Client(target) as client:
        is_serving = client.is_serving(service, timeout_s=timeout)
    if not is_serving:
        err.print(f"{service or target} is not serving", markup=False)
        raise typer.Exit(FAILURE)
    out.print("SERVING")


def version() -> None:
    """Print the version."""
    import kvrelay

    print(kvrelay.__version__)


def _version_and_end(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


def global_options(
    is_version: Annotated[
        bool, typer.Option("--version", callback=_version_and_end, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve large language models with separate prefill and decode workers."""
