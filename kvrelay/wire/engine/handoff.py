"""The hand-off's values: HandoffRecord (what COMMIT carries besides the KV), KvHandle and TransferStats, and back.

Workers read and write handles; the gateway relays their bytes unread, see `commands.py` and `events.py`.
"""

from google.protobuf.message import DecodeError

from engine.types import Epoch, HandoffRecord, Incarnation, LeaseId, WorkerId
from engine.worker_types import TICKET_BYTES, KvHandle, TransferStats
from kvrelay.errors import InvalidRequest, TransferError
from kvrelay.v1 import handoff_pb2, session_pb2
from kvrelay.wire.logprobs import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)


def handoff_record_to_bytes(record: HandoffRecord) -> bytes:
    """Return the record as COMMIT carries it."""
    message = handoff_pb2.HandoffRecord(
        first_token_id=record.first_token_id,
        finish_reason=finish_reason_to_proto(record.finish_reason),
        num_cached_tokens=record.num_cached_tokens,
        prefill_ns=record.prefill_ns,
        queue_ns=record.queue_ns,
        traceparent=record.traceparent,
        draft_state=record.draft_state,
    )
    if record.first_logprobs is not None:
        message.first_logprobs.CopyFrom(logprobs_to_proto(record.first_logprobs))
    if record.matched_stop_token_id is not None:
        message.matched_stop_token_id = record.matched_stop_token_id
    return message.SerializeToString()


def handoff_record_from_bytes(serialized: bytes) -> HandoffRecord:
    """Return the record as decode takes it over.

    Raises:
        TransferError: It cannot be read.
    """
    try:
        message = handoff_pb2.HandoffRecord.FromString(serialized)
    except DecodeError as error:
        raise TransferError("the hand-off record cannot be read") from error
    return HandoffRecord(
        first_token_id=message.first_token_id,
        first_logprobs=logprobs_from_proto(message.first_logprobs) if message.HasField("first_logprobs") else None,
        finish_reason=finish_reason_from_proto(message.finish_reason),
        matched_stop_token_id=message.matched_stop_token_id if message.HasField("matched_stop_token_id") else None,
        num_cached_tokens=message.num_cached_tokens,
        prefill_ns=message.prefill_ns,
        queue_ns=message.queue_ns,
        traceparent=message.traceparent,
        draft_state=message.draft_state,
    )


def kv_handle_to_bytes(handle: KvHandle) -> bytes:
    """Return the handle as the gateway relays it."""
    return handoff_pb2.KvHandle(
        lease_id=handle.lease_id,
        epoch=handle.epoch,
        ticket=handle.ticket,
        worker_id=handle.worker_id,
        incarnation=handle.incarnation,
        start_token=handle.start_token,
        num_tokens=handle.num_tokens,
        layout_fingerprint=handle.layout_fingerprint,
    ).SerializeToString()


def kv_handle_from_bytes(serialized: bytes, num_tokens: int) -> KvHandle:
    """Return the handle.

    Args:
        serialized: As the gateway relayed it.
        num_tokens: Tokens of the request it comes with.

    Raises:
        InvalidRequest: It is not a handle for that many tokens.
    """
    try:
        message = handoff_pb2.KvHandle.FromString(serialized)
    except DecodeError as error:
        raise InvalidRequest("kv_handle", "cannot be read") from error
    if len(message.ticket) != TICKET_BYTES:
        raise InvalidRequest("kv_handle.ticket", f"must have {TICKET_BYTES} bytes")
    if message.num_tokens != num_tokens or message.start_token >= num_tokens:
        raise InvalidRequest("kv_handle.num_tokens", f"must be {num_tokens}, and start_token smaller")
    return KvHandle(
        lease_id=LeaseId(message.lease_id),
        epoch=Epoch(message.epoch),
        ticket=message.ticket,
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        start_token=message.start_token,
        num_tokens=message.num_tokens,
        layout_fingerprint=message.layout_fingerprint,
    )


def transfer_stats_to_proto(stats: TransferStats) -> session_pb2.TransferStats:
    """Return the stats as events carry them."""
    return session_pb2.TransferStats(
        num_bytes=stats.num_bytes,
        num_frames=stats.num_frames,
        total_ns=stats.total_ns,
        exposed_ns=stats.exposed_ns,
        transport=stats.transport,
    )


def transfer_stats_from_proto(message: session_pb2.TransferStats) -> TransferStats:
    """Return the stats."""
    return TransferStats(
        num_bytes=message.num_bytes,
        num_frames=message.num_frames,
        total_ns=message.total_ns,
        exposed_ns=message.exposed_ns,
        transport=message.transport,
    )
