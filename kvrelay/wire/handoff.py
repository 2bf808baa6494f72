"""HandoffRecord: what COMMIT carries besides the KV, as a proto and back.

The KV handle is not converted here: workers convert it beside its value, and the gateway relays its bytes unread.
"""

from engine.types import HandoffRecord
from kvrelay.v1 import handoff_pb2
from kvrelay.wire.logprobs import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)


def handoff_record_to_proto(record: HandoffRecord) -> handoff_pb2.HandoffRecord:
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
    return message


def handoff_record_from_proto(message: handoff_pb2.HandoffRecord) -> HandoffRecord:
    """Return the record as decode takes it over."""
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
