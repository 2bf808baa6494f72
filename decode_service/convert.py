"""Decode session events: values to protos. No decisions."""

from engine.types import Incarnation, WorkerId
from kv_transfer.handoff.handle import KvHandle, TransferStats
from kvrelay.v1 import decode_service_pb2 as pb
from kvrelay.v1 import session_pb2
from worker.kv_handle import kv_handle_to_proto, transfer_stats_to_proto

Event = pb.DecodeServiceSessionResponse


def ready_event(worker_id: WorkerId, incarnation: Incarnation, lease_ttl_s: float) -> Event:
    """Return a session's first event."""
    return Event(
        ready=session_pb2.SessionReady(
            worker_id=worker_id, incarnation=incarnation, lease_ttl_ms=max(1, round(1000 * lease_ttl_s))
        )
    )


def step_event(step: session_pb2.StepOutput) -> Event:
    """Return the event that carries a step's outputs."""
    return Event(step=step)


def error_event(error: session_pb2.RequestError) -> Event:
    """Return the event that ends one request."""
    return Event(error=error)


def load_event(load: session_pb2.WorkerLoad) -> Event:
    """Return the event that tells the load."""
    return Event(load=load)


def reserved_event(request_id: int, attempt: int, handle: KvHandle) -> Event:
    """Return the event that grants blocks."""
    return Event(
        reserved=pb.ReservedEvent(
            request_id=request_id,
            attempt=attempt,
            kv_handle=kv_handle_to_proto(handle),
            num_cached_tokens=handle.start_token,
        )
    )


def committed_event(request_id: int, attempt: int, stats: TransferStats) -> Event:
    """Return the event that says a hand-off was verified."""
    return Event(
        committed=pb.CommittedEvent(request_id=request_id, attempt=attempt, transfer=transfer_stats_to_proto(stats))
    )


def ending_event(reason: str) -> Event:
    """Return a session's last event."""
    return Event(ending=session_pb2.SessionEnding(reason=reason))
