"""EngineRequest, SamplingParams and SequenceOutput: engine values to protos and back.

The public API's SamplingParams proto is validated in `gateway/front/convert.py`; what travels here is already resolved.
"""

from engine.types import EngineRequest, PrefillTiming, RequestId, SamplingParams, SequenceOutput
from kvrelay.v1 import sampling_pb2, session_pb2
from kvrelay.wire.logprobs import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
)


def sampling_params_to_proto(params: SamplingParams) -> sampling_pb2.SamplingParams:
    """Return every resolved field; bad words and stop strings travel elsewhere or stay at the gateway."""
    message = sampling_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=sorted(params.allowed_token_ids or ()),
    )
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.num_draft_tokens is not None:
        message.num_draft_tokens = params.num_draft_tokens
    return message


def sampling_params_from_proto(
    message: sampling_pb2.SamplingParams, bad_words: tuple[tuple[int, ...], ...] = ()
) -> SamplingParams:
    """Return the resolved parameters as the engine takes them."""
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=frozenset(message.allowed_token_ids) or None,
        bad_words=bad_words,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        num_draft_tokens=message.num_draft_tokens if message.HasField("num_draft_tokens") else None,
    )


def engine_request_to_proto(
    request: EngineRequest, *, attempt: int, timeout_ms: int, traceparent: str
) -> session_pb2.EngineRequest:
    """Return the request as a session command carries it."""
    params = sampling_params_to_proto(request.sampling_params)
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
