"""EngineRequest: a tokenized request as session commands carry it, and back. What travels here is resolved."""

from engine.types import EngineRequest, RequestId
from kvrelay.v1 import session_pb2
from kvrelay.wire.engine.sampling import sampling_params_from_proto, sampling_params_to_proto

TEXT_FIELDS = ("stop", "include_stop_str", "skip_special_tokens")
"""Those that shape text, which is the gateway's: workers see tokens only."""


def engine_request_to_proto(
    request: EngineRequest, *, attempt: int, timeout_ms: int, traceparent: str
) -> session_pb2.EngineRequest:
    """Return the request as a session command carries it.

    Args:
        request: The request.
        attempt: Number of the attempt.
        timeout_ms: What is left of its deadline; 0 = none.
        traceparent: W3C trace context; empty = none.
    """
    params = sampling_params_to_proto(request.sampling_params)
    for name in TEXT_FIELDS:
        params.ClearField(name)
    params.priority = request.priority
    params.cache_salt = request.cache_salt
    return session_pb2.EngineRequest(
        request_id=request.request_id,
        attempt=attempt,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=params,
        bad_words_token_ids=[session_pb2.TokenSequence(token_ids=word) for word in request.sampling_params.bad_words],
        timeout_ms=timeout_ms,
        traceparent=traceparent,
        is_suspect=request.is_suspect,
    )


def engine_request_from_proto(message: session_pb2.EngineRequest) -> EngineRequest:
    """Return the request as the engine takes it. The engine validates it."""
    bad_words = tuple(tuple(word.token_ids) for word in message.bad_words_token_ids)
    return EngineRequest(
        request_id=RequestId(message.request_id),
        token_ids=tuple(message.token_ids),
        sampling_params=sampling_params_from_proto(message.sampling_params, bad_words),
        num_prompt_tokens=message.num_prompt_tokens,
        cache_salt=message.sampling_params.cache_salt,
        priority=message.sampling_params.priority,
        is_suspect=message.is_suspect,
    )
