"""`python -m prefill_service`: runs one prefill worker until SIGTERM."""

import sys
from collections.abc import Sequence

from engine.worker_types import WorkerRole
from prefill_service.servicer import LayerListener, PrefillServicer
from prefill_service.settings import PrefillSettings
from worker.main import WorkerProcess, run_worker
from worker.tier import WorkerContext
from worker.transports import make_transports, required_scheme

SERVICE_NAME = "kvrelay.v1.PrefillService"


def main(argv: Sequence[str]) -> int:
    """Run a prefill worker with these flags and return its exit code."""
    settings = PrefillSettings.parse(argv, prog="kvrelay prefill")

    def make_process() -> WorkerProcess:
        listener = LayerListener()

        def make_tier(context: WorkerContext) -> PrefillServicer:
            scheme = required_scheme(settings.transport)
            transports = make_transports(settings, context.kv_cache.device_memory)
            servicer = PrefillServicer(context, transports, scheme, settings.commit_timeout_s)
            listener.attach(servicer)
            return servicer

        return WorkerProcess(settings, WorkerRole.PREFILL, SERVICE_NAME, make_tier, export_listener=listener)

    return run_worker(settings, "prefill", make_process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
