"""Commands: what a gateway tells a worker over their session, as values, to protos and back.

Both tiers' sessions carry them in a message of their own with one field for each command that the tier knows. A
deadline is a time of the own clock on either side; what travels is what is left of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from engine.types import EngineRequest, RequestId
from engine.worker_types import TransferPeer
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import handoff_pb2, session_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from kvrelay.wire.engine.requests import engine_request_from_proto, engine_request_to_proto
from kvrelay.wire.engine.workers import peer_from_proto, peer_to_proto

MIN_TIMEOUT_MS = 1
"""A deadline that has just passed is sent as this: 0 would mean none."""


@dataclass(frozen=True, slots=True)
class Reserve:
    """Ask a decode worker for blocks."""

    request: EngineRequest
    attempt: int
    deadline: float | None
    """Clock seconds; None = none."""
    traceparent: str = ""
    ttl_ms: int = 0
    """How long the lease lives without news; 0 = as long as the worker says."""


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
    """Serialized KvHandle as decode issued it; opaque to gateways."""
    deadline: float | None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests, whatever their phase."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class Renew:
    """Keep reservations whose prefill waits for its turn (decode only)."""

    request_ids: tuple[RequestId, ...]


@dataclass(frozen=True, slots=True)
class UpdatePeers:
    """Name all decode workers that KV may be sent to (prefill only)."""

    peers: tuple[TransferPeer, ...]


RequestCommand: TypeAlias = Reserve | PrefillLocally | Supersede | Prefill
"""What is said about one request on its way to its tokens."""
Command: TypeAlias = RequestCommand | Abort | Renew | UpdatePeers
CommandMessage = TypeVar(
    "CommandMessage", decode_pb2.DecodeServiceSessionRequest, prefill_pb2.PrefillServiceSessionRequest
)


def command_to_proto(command: Command, now: float, kind: Callable[..., CommandMessage]) -> CommandMessage:
    """Return a command's message.

    Args:
        command: What to tell.
        now: The clock that its deadline is measured by.
        kind: The tier's message; it has a field for each that the tier knows.

    Raises:
        ValueError: The tier has no such command.
    """
    match command:
        case Reserve():
            request = _request_to_proto(command, now)
            return kind(reserve=decode_pb2.ReserveCommand(request=request, ttl_ms=command.ttl_ms))
        case PrefillLocally(request_id):
            return kind(prefill_locally=decode_pb2.PrefillLocallyCommand(request_id=request_id))
        case Supersede(request_id, attempt):
            return kind(supersede=decode_pb2.SupersedeCommand(request_id=request_id, attempt=attempt))
        case Prefill():
            request = _request_to_proto(command, now)
            handle = handoff_pb2.KvHandle.FromString(command.kv_handle)
            return kind(prefill=prefill_pb2.PrefillCommand(request=request, kv_handle=handle))
        case Abort(request_ids):
            return kind(abort=session_pb2.AbortCommand(request_ids=request_ids))
        case Renew(request_ids):
            return kind(renew=decode_pb2.RenewCommand(request_ids=request_ids))
        case UpdatePeers(peers):
            return kind(update_peers=prefill_pb2.UpdatePeersCommand(peers=[peer_to_proto(peer) for peer in peers]))


def command_from_proto(message: CommandMessage, now: float) -> Command | None:
    """Return what a message tells; None: a command that this build does not know.

    Raises:
        LayoutMismatch: A peer's layout is not one this build knows.
    """
    name = message.WhichOneof("command")
    command: Any = None if name is None else getattr(message, name)
    match name:
        case "reserve":
            request = command.request
            return Reserve(
                engine_request_from_proto(request),
                request.attempt,
                _deadline(request.timeout_ms, now),
                request.traceparent,
                command.ttl_ms,
            )
        case "prefill_locally":
            return PrefillLocally(RequestId(command.request_id))
        case "supersede":
            return Supersede(RequestId(command.request_id), command.attempt)
        case "prefill":
            request = command.request
            return Prefill(
                engine_request_from_proto(request),
                request.attempt,
                command.kv_handle.SerializeToString(),
                _deadline(request.timeout_ms, now),
                request.traceparent,
            )
        case "abort":
            return Abort(tuple(map(RequestId, command.request_ids)))
        case "renew":
            return Renew(tuple(map(RequestId, command.request_ids)))
        case "update_peers":
            return UpdatePeers(tuple(map(peer_from_proto, command.peers)))
        case _:
            return None


def _request_to_proto(command: Reserve | Prefill, now: float) -> session_pb2.EngineRequest:
    deadline = command.deadline
    return engine_request_to_proto(
        command.request,
        attempt=command.attempt,
        timeout_ms=0 if deadline is None else max(MIN_TIMEOUT_MS, round((deadline - now) * 1000)),
        traceparent=command.traceparent,
    )


def _deadline(timeout_ms: int, now: float) -> float | None:
    return now + timeout_ms / 1000 if timeout_ms else None


def addressee_of(message: CommandMessage) -> tuple[RequestId, int] | None:
    """Return id and attempt of the request that a message is about; None: it is about several, or none.

    For whoever has to tell that request that its command could not be carried out. Attempt 0 stands for any.
    """
    name = message.WhichOneof("command")
    command: Any = None if name is None else getattr(message, name)
    match name:
        case "reserve" | "prefill":
            return RequestId(command.request.request_id), command.request.attempt
        case "supersede":
            return RequestId(command.request_id), command.attempt
        case "prefill_locally":
            return RequestId(command.request_id), 0
        case _:
            return None
