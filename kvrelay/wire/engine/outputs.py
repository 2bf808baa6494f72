"""SequenceOutput: one sequence's part of a step, to its proto and back. Errors and draft states stay on the worker."""

from engine.types import PrefillTiming, RequestId, SequenceOutput
from kvrelay.v1 import session_pb2
from kvrelay.wire.logprobs import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)


def output_to_proto(output: SequenceOutput, attempt: int) -> session_pb2.TokenOutput:
    """Return one sequence's part of a step."""
    message = session_pb2.TokenOutput(
        request_id=output.request_id,
        attempt=attempt,
        token_index=output.token_index,
        token_ids=output.token_ids,
        logprobs=[logprobs_to_proto(entry) for entry in output.logprobs],
        finish_reason=finish_reason_to_proto(output.finish_reason),
        num_cached_tokens=output.num_cached_tokens,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
    )
    if output.matched_stop_token_id is not None:
        message.matched_stop_token_id = output.matched_stop_token_id
    if output.prefill_timing is not None:
        timing = output.prefill_timing
        message.prefill_timing.CopyFrom(
            session_pb2.PrefillTiming(queue_ns=timing.queue_ns, prefill_ns=timing.prefill_ns)
        )
    return message


def output_from_proto(message: session_pb2.TokenOutput) -> SequenceOutput:
    """Return one sequence's part of a step."""
    return SequenceOutput(
        request_id=RequestId(message.request_id),
        token_index=message.token_index,
        token_ids=tuple(message.token_ids),
        logprobs=tuple(logprobs_from_proto(entry) for entry in message.logprobs),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        matched_stop_token_id=message.matched_stop_token_id if message.HasField("matched_stop_token_id") else None,
        num_cached_tokens=message.num_cached_tokens,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
        prefill_timing=(
            PrefillTiming(message.prefill_timing.queue_ns, message.prefill_timing.prefill_ns)
            if message.HasField("prefill_timing")
            else None
        ),
    )
