"""The transports of one worker process, as its settings allow them."""

from pathlib import Path

from kv_transfer.device import DeviceMemory
from kv_transfer.transports.grpc.transport import GrpcTransport
from kv_transfer.transports.port import Transport
from kv_transfer.transports.registry import TransportRegistry
from kv_transfer.transports.shm.transport import ShmTransport
from kv_transfer.transports.ucx.transport import UcxTransport, is_available
from kvrelay.errors import InvalidRequest
from worker.advertise import advertised_host
from worker.settings import WorkerSettings


def make_transports(settings: WorkerSettings, device_memory: DeviceMemory | None = None) -> TransportRegistry:
    """Return every transport that this process can use to reach other processes.

    Args:
        settings: The worker's settings.
        device_memory: Of the device that the KV cache is on, for transports that send from there; None = the host.
    """
    run_dir = Path(settings.run_dir) if settings.run_dir else None
    transports: list[Transport] = [ShmTransport(run_dir), GrpcTransport(settings.host)]
    # UCX listens on every interface and knows no peers' identity, so it is there only for those who ask for it.
    if settings.transport == "ucx":
        if not is_available():
            raise InvalidRequest("transport", "ucx needs the extra `ucx` (package ucxx)")
        host = advertised_host(settings.advertise_host, settings.host, settings.gateway)
        transports.append(UcxTransport(host, device=device_memory))
    return TransportRegistry(transports)


def required_scheme(choice: str) -> str | None:
    """Return the one scheme that may be used, or None for the best common one."""
    return None if choice == "auto" else choice
