"""`python -m decode_service`: runs one decode worker until SIGTERM."""

import sys
from collections.abc import Sequence

from decode_service.servicer import DecodeServicer
from decode_service.settings import DecodeSettings
from engine.worker_types import WorkerRole
from worker.main import WorkerProcess, run_worker
from worker.tier import WorkerContext
from worker.transports import make_transports, required_scheme

SERVICE_NAME = "kvrelay.v1.DecodeService"


def main(argv: Sequence[str]) -> int:
    """Run a decode worker with these flags and return its exit code."""
    settings = DecodeSettings.parse(argv, prog="kvrelay decode")

    def make_tier(context: WorkerContext) -> DecodeServicer:
        transports = make_transports(settings, context.kv_cache.device_memory)
        return DecodeServicer(context, transports, required_scheme(settings.transport), settings)

    return run_worker(
        settings,
        "decode",
        lambda: WorkerProcess(settings, WorkerRole.DECODE, SERVICE_NAME, make_tier),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
