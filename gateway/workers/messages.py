"""What gateway and workers say to each other, as values: commands out, events in.

`session.py` is the only place that turns them into session messages and back; `gateway/relay/relay.py` decides on them.
"""

from dataclasses import dataclass
from typing import TypeAlias

from engine.cache.layout import KvLayout
from engine.types import EngineRequest, Incarnation, RequestId, SequenceOutput, WorkerId
from kvrelay.errors import EngineError, WorkerUnavailable


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask a decode worker for blocks."""

    request: EngineRequest
    attempt: int
    deadline: float | None
    """Clock seconds; travels as what is left of it."""
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class PrefillLocally:
    """Let the decode worker compute a reserved request's prompt itself."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Supersede:
    """Fence the reservation's writer and ask for a handle of the next epoch."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Prefill:
    """Let a prefill worker compute a prompt and send its KV to a reservation."""

    request: EngineRequest
    attempt: int
    kv_handle: bytes
    """Serialized KvHandle as decode issued it; opaque here."""
    deadline: float | None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class TransferPeer:
    """A decode worker as prefill workers may send KV to it."""

    worker_id: WorkerId
    incarnation: Incarnation
    addresses: tuple[str, ...]
    layout: KvLayout


Command: TypeAlias = Reserve | PrefillLocally | Supersede | Prefill


@dataclass(frozen=True, slots=True)
class TransferStats:
    """How one request's KV travelled."""

    num_bytes: int
    num_frames: int
    total_ns: int
    exposed_ns: int
    transport: str


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load as it last reported it."""

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_leases: int = 0
    num_waiting_tokens: int = 0
    is_draining: bool = False
    is_stalled: bool = False
    """Its engine step takes longer than it can explain."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks were granted to an attempt."""

    attempt: int
    kv_handle: bytes
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Decode verified a hand-off and scheduled the sequence."""

    attempt: int
    transfer: TransferStats


@dataclass(frozen=True, slots=True)
class Exported:
    """Prefill was told that decode has taken over."""

    attempt: int
    transfer: TransferStats


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request."""

    attempt: int
    output: SequenceOutput


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker ended the attempt with an error."""

    attempt: int
    error: EngineError


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
