"""FinishReason and logprobs: the parts of an output that clients see, as protos and back."""

from kvrelay.v1 import sampling_pb2
from kvrelay.values import FinishReason, PositionLogprobs, TokenLogprob

_FINISH_TO_PROTO = {
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
}
_FINISH_FROM_PROTO = {proto: reason for reason, proto in _FINISH_TO_PROTO.items()}


def finish_reason_to_proto(reason: FinishReason | None) -> sampling_pb2.FinishReason:
    """Return the enum value; None becomes UNSPECIFIED."""
    return sampling_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_PROTO[reason]


def finish_reason_from_proto(value: sampling_pb2.FinishReason) -> FinishReason | None:
    """Return the reason; UNSPECIFIED becomes None."""
    return _FINISH_FROM_PROTO.get(value)


def _token_logprob_to_proto(value: TokenLogprob) -> sampling_pb2.TokenLogprob:
    return sampling_pb2.TokenLogprob(token_id=value.token_id, logprob=value.logprob, rank=value.rank)


def _token_logprob_from_proto(message: sampling_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank)


def logprobs_to_proto(value: PositionLogprobs) -> sampling_pb2.PositionLogprobs:
    """Return one position's logprobs."""
    return sampling_pb2.PositionLogprobs(
        sampled=_token_logprob_to_proto(value.sampled), top=[_token_logprob_to_proto(entry) for entry in value.top]
    )


def logprobs_from_proto(message: sampling_pb2.PositionLogprobs) -> PositionLogprobs:
    """Return one position's logprobs."""
    return PositionLogprobs(
        _token_logprob_from_proto(message.sampled), tuple(_token_logprob_from_proto(entry) for entry in message.top)
    )
