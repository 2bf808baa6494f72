"""Runs one gateway: `python -m gateway`, or `kvrelay gateway`."""

import asyncio
import sys
from collections.abc import Sequence

import structlog

from gateway.app import serve
from gateway.settings import GatewaySettings
from kvrelay.errors import EngineError
from kvrelay.serving.settings import parse_settings
from kvrelay.serving.start_up import stops_at_once
from kvrelay.serving.telemetry import configure_logging, configure_tracing, shutdown_tracing

_log = structlog.get_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a gateway until SIGTERM or SIGINT and return the process's exit code.

    Args:
        argv: Arguments without the program's name; None: the process's.
    """
    settings = parse_settings(GatewaySettings, sys.argv[1:] if argv is None else argv, "kvrelay gateway")
    configure_logging("gateway", json=settings.log_json, level=settings.log_level)
    configure_tracing("kvrelay-gateway", settings.otlp_endpoint)
    try:
        with stops_at_once("kvrelay gateway"):
            return asyncio.run(serve(settings))
    except EngineError as error:
        _log.error("gateway.failed", reason=error.reason, error=str(error))
        return 2
    finally:
        shutdown_tracing()


if __name__ == "__main__":
    sys.exit(main())
