"""HandoffRecord to its proto and back."""

from dataclasses import fields, replace

import pytest

from engine.types import HandoffRecord
from kvrelay.v1 import handoff_pb2
from kvrelay.values import FinishReason, PositionLogprobs, TokenLogprob
from kvrelay.wire.handoff import handoff_record_from_proto, handoff_record_to_proto

RECORD = HandoffRecord(
    first_token_id=17,
    first_logprobs=PositionLogprobs(TokenLogprob(17, -0.5, 2), (TokenLogprob(3, -0.25, 1), TokenLogprob(17, -0.5, 2))),
    finish_reason=FinishReason.STOP,
    matched_stop_token_id=0,
    num_cached_tokens=32,
    prefill_ns=1_000_000,
    queue_ns=2_000,
    traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
)


@pytest.mark.parametrize(
    "record",
    [
        RECORD,
        replace(RECORD, first_logprobs=None, finish_reason=None, matched_stop_token_id=None, traceparent=""),
        replace(RECORD, finish_reason=FinishReason.LENGTH, matched_stop_token_id=None),
        replace(RECORD, first_logprobs=PositionLogprobs(TokenLogprob(17, -0.5, 2), ())),
    ],
)
def test_round_trip_over_the_wire_keeps_every_field(record: HandoffRecord) -> None:
    wire = handoff_record_to_proto(record).SerializeToString()
    assert handoff_record_from_proto(handoff_pb2.HandoffRecord.FromString(wire)) == record


def test_every_proto_field_is_converted() -> None:
    names = {field.name for field in fields(HandoffRecord)}
    assert set(handoff_pb2.HandoffRecord.DESCRIPTOR.fields_by_name) == names
