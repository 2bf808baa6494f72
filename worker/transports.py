"""The transports of one worker process, as its settings allow them."""

from pathlib import Path

from engine.errors import InvalidRequest
from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.registry import TransportRegistry
from kv_transfer.shm import ShmTransport
from kv_transfer.transport import Transport
from kv_transfer.ucx import UcxTransport, is_available
from worker.settings import WorkerSettings


def make_transports(settings: WorkerSettings) -> TransportRegistry:
    """Return every transport that this process can use to reach other processes."""
    run_dir = Path(settings.run_dir) if settings.run_dir else None
    transports: list[Transport] = [ShmTransport(run_dir), GrpcTransport(settings.host)]
    # UCX listens on every interface and knows no peers' identity, so it is there only for those who ask for it.
    if settings.transport == "ucx":
        if not is_available():
            raise InvalidRequest("transport", "ucx needs the extra `ucx` (package ucxx)")
        transports.append(UcxTransport(settings.host))
    return TransportRegistry(transports)


def required_scheme(choice: str) -> str | None:
    """Return the one scheme that may be used, or None for the best common one."""
    return None if choice == "auto" else choice
