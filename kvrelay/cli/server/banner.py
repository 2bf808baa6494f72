"""What a running cluster looks like: model, KV blocks, transport, processes.

Owns the questions to the workers and the table that answers them. Used by serve, demo and status.
"""

from collections.abc import Sequence
from contextlib import suppress

from rich.table import Table
from rich.text import Text

from kvrelay.cli.status import kernel_names
from kvrelay.cluster.process import ManagedProcess
from kvrelay.cluster.worker_client import WorkerClient
from kvrelay.errors import EngineError
from kvrelay.results import ModelSummary, ServerInfo
from kvrelay.wire.engine.workers import ModelInfo


async def ask_workers(info: ServerInfo) -> dict[str, ModelInfo]:
    """Return what the workers that can be reached say of themselves, by worker id."""
    found: dict[str, ModelInfo] = {}
    for worker in info.workers:
        # On another network than the gateway, or just gone: the table shows what is known.
        with suppress(EngineError):
            async with WorkerClient(worker.address) as client:
                found[worker.worker_id] = await client.model_info()
    return found


def common_transport(info: ServerInfo) -> str:
    """Return the transport that KV takes: the best that both tiers have; empty where there is only one tier."""
    prefill = {name for worker in info.workers if worker.role == "prefill" for name in worker.transports}
    decode = [name for worker in info.workers if worker.role == "decode" for name in worker.transports]
    return next((name for name in decode if name in prefill), "")


def ready_banner(
    target: str,
    models: Sequence[ModelSummary],
    info: ServerInfo,
    details: dict[str, ModelInfo],
    processes: Sequence[ManagedProcess],
) -> Table:
    """Return the table shown when a cluster is ready."""
    by_name = {process.name: process for process in processes}
    model = ", ".join(f"{m.name} ({m.architecture}, requests of up to {m.context_length:,} tokens)" for m in models)
    transport = common_transport(info)
    travels = f"KV over {transport}" if transport else "no KV transfer, decode workers prefill"
    table = Table(
        title=Text.assemble(("kvrelay is ready ", "bold green"), (target, "bold")),
        caption=Text(f"model {model} · {travels}"),
        title_justify="left",
        caption_justify="left",
    )
    for column in ("process", "address", "KV blocks", "block size", "KV dtype", "device", "kernels", "pid", "log"):
        table.add_column(column, overflow="fold")
    gateway = by_name.get("gateway")
    table.add_row("gateway", target, "", "", "", "", "", _pid(gateway), _log(gateway))
    for worker in sorted(info.workers, key=lambda worker: (worker.role == "decode", worker.worker_id)):
        own = details.get(worker.worker_id)
        process = by_name.get(worker.worker_id)
        table.add_row(
            worker.worker_id,
            worker.address,
            f"{worker.num_blocks:,}",
            str(own.layout.block_size) if own else "?",
            own.layout.dtype.value if own else "?",
            own.device if own else "?",
            kernel_names(worker),
            _pid(process),
            _log(process),
        )
    return table


def _pid(process: ManagedProcess | None) -> str:
    return "" if process is None else str(process.pid)


def _log(process: ManagedProcess | None) -> str:
    return "" if process is None else str(process.log_path)
