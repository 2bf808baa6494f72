"""What a completion hears of: workers' events about it, ends of sessions, and what the gateway itself does to it."""

from dataclasses import dataclass
from typing import TypeAlias

from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.wire.engine.events import Committed, Exported, Failed, Output, Reserved


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The stream to the worker ended; all it did for the request is void."""

    error: WorkerUnavailable


@dataclass(frozen=True, slots=True)
class Stalled:
    """The worker's engine hangs, or nothing is heard of it. It may come back; told again while it lasts."""

    error: WorkerUnavailable


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """The client called Abort."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The gateway itself ends the request with an error, e.g. at the end of a drain."""

    error: EngineError


Event: TypeAlias = (
    Reserved | Committed | Exported | Output | Failed | SessionLost | Stalled | AbortRequested | Interrupted
)
