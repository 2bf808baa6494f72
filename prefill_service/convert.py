"""Prefill session events and peers: values to protos and back. No decisions."""

from collections.abc import Iterable

from engine.types import Incarnation, WorkerId
from kv_transfer.handoff.handle import Peer, TransferStats
from kvrelay.v1 import prefill_service_pb2 as pb
from kvrelay.v1 import session_pb2
from kvrelay.wire.layout import layout_from_proto
from worker.kv_handle import transfer_stats_to_proto

Event = pb.PrefillServiceSessionResponse


def ready_event(worker_id: WorkerId, incarnation: Incarnation) -> Event:
    """Return a session's first event."""
    return Event(ready=session_pb2.SessionReady(worker_id=worker_id, incarnation=incarnation))


def step_event(step: session_pb2.StepOutput) -> Event:
    """Return the event that carries a step's outputs."""
    return Event(step=step)


def error_event(error: session_pb2.RequestError) -> Event:
    """Return the event that ends one request."""
    return Event(error=error)


def load_event(load: session_pb2.WorkerLoad) -> Event:
    """Return the event that tells the load."""
    return Event(load=load)


def exported_event(request_id: int, attempt: int, stats: TransferStats) -> Event:
    """Return the event that says decode has taken over a request's KV."""
    return Event(
        exported=pb.ExportedEvent(request_id=request_id, attempt=attempt, transfer=transfer_stats_to_proto(stats))
    )


def peers_from_proto(messages: Iterable[pb.TransferPeer]) -> list[Peer]:
    """Return the decode workers that KV may be sent to.

    Raises:
        LayoutMismatch: A layout is not one this build knows.
    """
    return [
        Peer(
            worker_id=WorkerId(message.worker_id),
            incarnation=Incarnation(message.incarnation),
            addresses=tuple(message.addresses),
            layout=layout_from_proto(message.layout),
        )
        for message in messages
    ]


def ending_event(reason: str) -> Event:
    """Return a session's last event."""
    return Event(ending=session_pb2.SessionEnding(reason=reason))
