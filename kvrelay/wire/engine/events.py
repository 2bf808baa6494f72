"""Events: what a worker tells a gateway over their session, as values, to protos and back.

`Step` brings the new tokens of all of the gateway's sequences, `ForRequest` what else happened to one request, the
others are about the worker. Both tiers' sessions carry them in a message of their own with one field for each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from engine.types import Incarnation, RequestId, SequenceOutput, WorkerId
from engine.worker_types import TransferStats, WorkerLoad
from kvrelay.errors import EngineError
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import handoff_pb2, session_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from kvrelay.wire.engine.handoff import transfer_stats_from_proto, transfer_stats_to_proto
from kvrelay.wire.engine.outputs import output_from_proto, output_to_proto
from kvrelay.wire.engine.workers import load_from_proto, load_to_proto
from kvrelay.wire.status import from_status, to_status


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's greeting, the first event of a session."""

    worker_id: WorkerId
    incarnation: Incarnation
    lease_ttl_ms: int = 0
    """How long a reservation lives there without news; 0 = no decode worker."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request."""

    attempt: int
    output: SequenceOutput


@dataclass(frozen=True, slots=True)
class Step:
    """The outputs of one step, or of several where the gateway reads slowly."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks were granted to an attempt."""

    attempt: int
    kv_handle: bytes
    """Serialized KvHandle; opaque to gateways."""
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
class Failed:
    """The worker ended the attempt with an error."""

    attempt: int
    """0 stands for any."""
    error: EngineError


@dataclass(frozen=True, slots=True)
class ForRequest:
    """What happened to one request."""

    request_id: RequestId
    event: Reserved | Committed | Exported | Failed


@dataclass(frozen=True, slots=True)
class Ending:
    """The worker cannot go on: nothing comes behind this."""

    reason: str


Event: TypeAlias = Ready | Step | ForRequest | WorkerLoad | Ending
EventMessage = TypeVar(
    "EventMessage", decode_pb2.DecodeServiceSessionResponse, prefill_pb2.PrefillServiceSessionResponse
)


def event_to_proto(event: Event, kind: Callable[..., EventMessage]) -> EventMessage:
    """Return an event's message.

    Args:
        event: What to tell.
        kind: The tier's message; it has a field for each that the tier knows.

    Raises:
        ValueError: The tier has no such event.
    """
    match event:
        case Step(outputs):
            return kind(step=session_pb2.StepOutput(outputs=[output_to_proto(o.output, o.attempt) for o in outputs]))
        case ForRequest(request_id, happened):
            return _request_event_to_proto(request_id, happened, kind)
        case WorkerLoad():
            return kind(load=load_to_proto(event))
        case Ready():
            return kind(
                ready=session_pb2.SessionReady(
                    worker_id=event.worker_id, incarnation=event.incarnation, lease_ttl_ms=event.lease_ttl_ms
                )
            )
        case Ending(reason):
            return kind(ending=session_pb2.SessionEnding(reason=reason))


def _request_event_to_proto(
    request_id: RequestId, event: Reserved | Committed | Exported | Failed, kind: Callable[..., EventMessage]
) -> EventMessage:
    match event:
        case Reserved():
            return kind(
                reserved=decode_pb2.ReservedEvent(
                    request_id=request_id,
                    attempt=event.attempt,
                    kv_handle=handoff_pb2.KvHandle.FromString(event.kv_handle),
                    num_cached_tokens=event.num_cached_tokens,
                )
            )
        case Committed(attempt, transfer):
            stats = transfer_stats_to_proto(transfer)
            return kind(committed=decode_pb2.CommittedEvent(request_id=request_id, attempt=attempt, transfer=stats))
        case Exported(attempt, transfer):
            stats = transfer_stats_to_proto(transfer)
            return kind(exported=prefill_pb2.ExportedEvent(request_id=request_id, attempt=attempt, transfer=stats))
        case Failed(attempt, error):
            status = to_status(error).SerializeToString()
            return kind(error=session_pb2.RequestError(request_id=request_id, attempt=attempt, status=status))


def event_from_proto(message: EventMessage) -> Event | None:
    """Return what a message tells; None: an event that this build does not know."""
    name = message.WhichOneof("event")
    event: Any = None if name is None else getattr(message, name)
    match name:
        case "step":
            return Step(tuple(Output(output.attempt, output_from_proto(output)) for output in event.outputs))
        case "reserved":
            handle = event.kv_handle.SerializeToString()
            return ForRequest(RequestId(event.request_id), Reserved(event.attempt, handle, event.num_cached_tokens))
        case "committed":
            stats = transfer_stats_from_proto(event.transfer)
            return ForRequest(RequestId(event.request_id), Committed(event.attempt, stats))
        case "exported":
            stats = transfer_stats_from_proto(event.transfer)
            return ForRequest(RequestId(event.request_id), Exported(event.attempt, stats))
        case "error":
            return ForRequest(RequestId(event.request_id), Failed(event.attempt, from_status(event.status)))
        case "load":
            return load_from_proto(event)
        case "ready":
            return Ready(WorkerId(event.worker_id), Incarnation(event.incarnation), event.lease_ttl_ms)
        case "ending":
            return Ending(event.reason)
        case _:
            return None
