"""The transports of one worker process, as its settings allow them."""

from pathlib import Path

from kv_transfer.grpc_transport import GrpcTransport
from kv_transfer.registry import TransportRegistry
from kv_transfer.shm import ShmTransport
from worker.settings import WorkerSettings


def make_transports(settings: WorkerSettings) -> TransportRegistry:
    """Return every transport that this process can use to reach other processes."""
    run_dir = Path(settings.run_dir) if settings.run_dir else None
    return TransportRegistry([ShmTransport(run_dir), GrpcTransport(settings.host)])


def required_scheme(choice: str) -> str | None:
    """Return the one scheme that may be used, or None for the best common one."""
    return None if choice == "auto" else choice
