"""Session messages: commands to protos, protos to events, one codec per tier.

A request's broken event becomes that request's failure, never the session's. `session.py` uses these; nobody
else needs to know that the two tiers have different messages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import grpc.aio
import structlog

from engine.types import Incarnation, RequestId, WorkerId
from gateway.workers.messages import (
    Command,
    Committed,
    Event,
    Exported,
    Failed,
    Output,
    Prefill,
    PrefillLocally,
    Reserve,
    Reserved,
    Supersede,
    TransferPeer,
    TransferStats,
    WorkerLoad,
)
from kvrelay.errors import EngineError
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import decode_service_pb2_grpc, handoff_pb2, prefill_service_pb2_grpc, session_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from kvrelay.wire.layout import layout_to_proto
from kvrelay.wire.requests import engine_request_to_proto, output_from_proto
from kvrelay.wire.status import from_status

_log = structlog.get_logger(__name__)

OutMessage: TypeAlias = decode_pb2.DecodeServiceSessionRequest | prefill_pb2.PrefillServiceSessionRequest
InMessage: TypeAlias = decode_pb2.DecodeServiceSessionResponse | prefill_pb2.PrefillServiceSessionResponse
# The generated stubs are untyped: which message a call takes is known by the codec alone.
SessionCall: TypeAlias = grpc.aio.StreamStreamCall[Any, Any]

MIN_TIMEOUT_MS = 1
"""A deadline that has just passed is sent as this: 0 would mean none."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker's greeting."""

    worker_id: WorkerId
    incarnation: Incarnation
    lease_ttl_s: float = 0.0
    """How long a reservation lives there without news; 0 = no decode worker."""


@dataclass(frozen=True, slots=True)
class RequestEvents:
    """Events of some requests, in order."""

    events: tuple[tuple[RequestId, Event], ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """The worker cannot go on: nothing comes behind this."""

    reason: str


Incoming: TypeAlias = Ready | WorkerLoad | RequestEvents | Ending


class SessionCodec(Protocol):
    """What differs between the sessions of the two tiers. Stateless; called on the event loop."""

    def open(self, channel: grpc.aio.Channel) -> SessionCall:
        """Start the stream."""
        ...

    def encode(self, command: Command, now: float) -> OutMessage:
        """Return a command's message; deadlines become what is left of them at clock time `now`."""
        ...

    def encode_abort(self, request_ids: Iterable[RequestId]) -> OutMessage:
        """Return the message that ends requests."""
        ...

    def encode_renew(self, request_ids: Iterable[RequestId]) -> OutMessage | None:
        """Return the message that keeps reservations; None where the tier has none."""
        ...

    def encode_peers(self, peers: Sequence[TransferPeer]) -> OutMessage | None:
        """Return the message that names the decode workers; None where the tier has no use for it."""
        ...

    def decode(self, message: Any) -> Incoming:
        """Return what a message says."""
        ...


class DecodeCodec:
    """Sessions to decode workers."""

    def open(self, channel: grpc.aio.Channel) -> SessionCall:
        """Start the stream."""
        call: SessionCall = decode_service_pb2_grpc.DecodeServiceStub(channel).Session()
        return call

    def encode(self, command: Command, now: float) -> OutMessage:
        """Return a command's message."""
        match command:
            case Reserve():
                request = engine_request_to_proto(
                    command.request,
                    attempt=command.attempt,
                    timeout_ms=_timeout_ms(command.deadline, now),
                    traceparent=command.traceparent,
                )
                return decode_pb2.DecodeServiceSessionRequest(reserve=decode_pb2.ReserveCommand(request=request))
            case PrefillLocally(request_id):
                local = decode_pb2.PrefillLocallyCommand(request_id=request_id)
                return decode_pb2.DecodeServiceSessionRequest(prefill_locally=local)
            case Supersede(request_id, attempt):
                supersede = decode_pb2.SupersedeCommand(request_id=request_id, attempt=attempt)
                return decode_pb2.DecodeServiceSessionRequest(supersede=supersede)
            case Prefill():
                raise TypeError("a decode worker takes no Prefill")

    def encode_abort(self, request_ids: Iterable[RequestId]) -> OutMessage:
        """Return the message that ends requests."""
        return decode_pb2.DecodeServiceSessionRequest(abort=session_pb2.AbortCommand(request_ids=request_ids))

    def encode_renew(self, request_ids: Iterable[RequestId]) -> OutMessage | None:
        """Return the message that keeps reservations."""
        return decode_pb2.DecodeServiceSessionRequest(renew=decode_pb2.RenewCommand(request_ids=request_ids))

    def encode_peers(self, peers: Sequence[TransferPeer]) -> OutMessage | None:
        """Return None: decode sends KV to nobody."""
        return None

    def decode(self, message: decode_pb2.DecodeServiceSessionResponse) -> Incoming:
        """Return what a message says."""
        match message.WhichOneof("event"):
            case "step":
                return _outputs(message.step)
            case "reserved":
                reserved = message.reserved
                return _one(
                    reserved.request_id,
                    Reserved(reserved.attempt, reserved.kv_handle.SerializeToString(), reserved.num_cached_tokens),
                )
            case "committed":
                committed = message.committed
                return _one(committed.request_id, Committed(committed.attempt, _transfer(committed.transfer)))
            case "error":
                return _failed(message.error)
            case "load":
                return _load(message.load)
            case "ready":
                return _ready(message.ready)
            case "ending":
                return Ending(message.ending.reason)
            case _:
                return RequestEvents(())


class PrefillCodec:
    """Sessions to prefill workers."""

    def open(self, channel: grpc.aio.Channel) -> SessionCall:
        """Start the stream."""
        call: SessionCall = prefill_service_pb2_grpc.PrefillServiceStub(channel).Session()
        return call

    def encode(self, command: Command, now: float) -> OutMessage:
        """Return a command's message."""
        if not isinstance(command, Prefill):
            raise TypeError(f"a prefill worker takes no {type(command).__name__}")
        request = engine_request_to_proto(
            command.request,
            attempt=command.attempt,
            timeout_ms=_timeout_ms(command.deadline, now),
            traceparent=command.traceparent,
        )
        handle = handoff_pb2.KvHandle.FromString(command.kv_handle)
        prefill = prefill_pb2.PrefillCommand(request=request, kv_handle=handle)
        return prefill_pb2.PrefillServiceSessionRequest(prefill=prefill)

    def encode_abort(self, request_ids: Iterable[RequestId]) -> OutMessage:
        """Return the message that ends requests."""
        return prefill_pb2.PrefillServiceSessionRequest(abort=session_pb2.AbortCommand(request_ids=request_ids))

    def encode_renew(self, request_ids: Iterable[RequestId]) -> OutMessage | None:
        """Return None: nothing is reserved on this tier."""
        return None

    def encode_peers(self, peers: Sequence[TransferPeer]) -> OutMessage | None:
        """Return the list of decode workers that KV may be sent to."""
        entries = [
            prefill_pb2.TransferPeer(
                worker_id=peer.worker_id,
                incarnation=peer.incarnation,
                addresses=peer.addresses,
                layout=layout_to_proto(peer.layout),
            )
            for peer in peers
        ]
        return prefill_pb2.PrefillServiceSessionRequest(update_peers=prefill_pb2.UpdatePeersCommand(peers=entries))

    def decode(self, message: prefill_pb2.PrefillServiceSessionResponse) -> Incoming:
        """Return what a message says."""
        match message.WhichOneof("event"):
            case "step":
                return _outputs(message.step)
            case "exported":
                exported = message.exported
                return _one(exported.request_id, Exported(exported.attempt, _transfer(exported.transfer)))
            case "error":
                return _failed(message.error)
            case "load":
                return _load(message.load)
            case "ready":
                return _ready(message.ready)
            case "ending":
                return Ending(message.ending.reason)
            case _:
                return RequestEvents(())


def _ready(message: session_pb2.SessionReady) -> Ready:
    return Ready(WorkerId(message.worker_id), Incarnation(message.incarnation), message.lease_ttl_ms / 1000)


def _timeout_ms(deadline: float | None, now: float) -> int:
    return 0 if deadline is None else max(MIN_TIMEOUT_MS, int((deadline - now) * 1000))


def _one(request_id: int, event: Event) -> RequestEvents:
    return RequestEvents(((RequestId(request_id), event),))


def _outputs(step: session_pb2.StepOutput) -> RequestEvents:
    return RequestEvents(tuple((RequestId(message.request_id), _output(message)) for message in step.outputs))


def _output(message: session_pb2.TokenOutput) -> Event:
    try:
        return Output(message.attempt, output_from_proto(message))
    except (ValueError, TypeError, KeyError) as error:
        _log.error("session.output_unreadable", request_id=message.request_id, exc_info=error)
        return Failed(message.attempt, EngineError("a worker sent an output that cannot be read"))


def _failed(message: session_pb2.RequestError) -> RequestEvents:
    return _one(message.request_id, Failed(message.attempt, from_status(message.status)))


def _transfer(message: session_pb2.TransferStats) -> TransferStats:
    return TransferStats(
        num_bytes=message.num_bytes,
        num_frames=message.num_frames,
        total_ns=message.total_ns,
        exposed_ns=message.exposed_ns,
        transport=message.transport,
    )


def _load(message: session_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        num_free_blocks=message.num_free_blocks,
        num_blocks=message.num_blocks,
        num_leases=message.num_leases,
        num_waiting_tokens=message.num_waiting_tokens,
        is_draining=message.is_draining,
        is_stalled=message.is_stalled,
    )
