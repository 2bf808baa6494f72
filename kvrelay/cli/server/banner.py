"""What a running cluster looks like: model, KV blocks, transport, processes.

Owns the questions to the workers and the table that answers them. Used by serve, demo and status.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from rich.table import Table
from rich.text import Text

from kvrelay.channel import channel_options
from kvrelay.cli.status import kernel_names
from kvrelay.cluster.process import ManagedProcess
from kvrelay.errors import EngineError
from kvrelay.results import ModelSummary, ServerInfo
from kvrelay.v1 import layout_pb2, worker_service_pb2, worker_service_pb2_grpc
from kvrelay.wire.status import from_rpc_error

_RPC_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerDetails:
    """What a worker says of itself, beyond what the gateway knows."""

    worker_id: str
    block_size: int
    """Tokens in a KV block."""
    kv_dtype: str
    device: str


async def ask_workers(info: ServerInfo) -> dict[str, WorkerDetails]:
    """Return the details of the workers that can be reached, by worker id."""
    found: dict[str, WorkerDetails] = {}
    for worker in info.workers:
        try:
            details = await _ask(worker.address)
        except EngineError:
            # On another network than the gateway, or just gone: the table shows what is known.
            continue
        dtype = layout_pb2.KvDtype.Name(details.layout.dtype).removeprefix("KV_DTYPE_").lower()
        found[worker.worker_id] = WorkerDetails(worker.worker_id, details.layout.block_size, dtype, details.device)
    return found


async def _ask(address: str) -> worker_service_pb2.GetModelInfoResponse:
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(channel)
        try:
            response: worker_service_pb2.GetModelInfoResponse = await stub.GetModelInfo(
                worker_service_pb2.GetModelInfoRequest(), timeout=_RPC_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response


def common_transport(info: ServerInfo) -> str:
    """Return the transport that KV takes: the best that both tiers have; empty where there is only one tier."""
    prefill = {name for worker in info.workers if worker.role == "prefill" for name in worker.transports}
    decode = [name for worker in info.workers if worker.role == "decode" for name in worker.transports]
    return next((name for name in decode if name in prefill), "")


def ready_banner(
    target: str,
    models: Sequence[ModelSummary],
    info: ServerInfo,
    details: dict[str, WorkerDetails],
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
            str(own.block_size) if own else "?",
            own.kv_dtype if own else "?",
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
