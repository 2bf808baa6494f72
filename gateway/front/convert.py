"""The public API's protos to validated values and back.

Every field of a request is read and checked here, or refused by name; what reaches `gateway/relay/generation.py` is in
range. The prompt is tokenized and fitted to the context by `gateway/relay/prompt.py`.
"""

from dataclasses import replace

from engine.request_checks import (
    INT32_MAX,
    SAMPLING_BOUNDS,
    Bounds,
    check_count,
    check_number,
    check_sampling_params,
    check_token_ids,
)
from engine.types import RequestId, SamplingParams
from gateway.relay.request import ChatMessage, ChatPrompt, GenerateCall, ModelLimits, Prompt, TextPrompt, TokenPrompt
from gateway.relay.response import Completion, Started, TokenChunk
from gateway.relay.validation import (
    check_prompt_messages,
    check_prompt_text,
    check_prompt_tokens,
    check_text_bytes,
    check_texts,
)
from kvrelay.errors import ContextTooLong, InvalidRequest
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import sampling_pb2
from kvrelay.wire.engine.sampling import plain_fields_from_proto
from kvrelay.wire.logprobs import finish_reason_to_proto, logprobs_to_proto

MAX_COMPLETIONS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 4_096
MAX_BAD_WORDS = 1_024
MAX_BAD_WORD_BYTES = 1_024
MAX_TOKEN_ENTRIES = 1_024
"""Most stop tokens, and most biased ones: each is written and read again for every completion of a call."""
MAX_ALLOWED_TOKENS = 4_096
MAX_SALT_BYTES = 256
MAX_CLIENT_ID_BYTES = 128

_PARAMS = "sampling_params"
_UNBUILT = ("prompt_logprobs", "constraint")
_OF_THE_CALL = ("max_tokens", "seed")
"""Fields that are settled when the prompt is known; until then they are the call's."""


def to_call(message: inference_pb2.GenerateRequest, limits: ModelLimits) -> GenerateCall:
    """Return a Generate call with every field checked.

    Raises:
        InvalidRequest: a field is wrong; names its proto path.
        ContextTooLong: the prompt can be seen not to fit without tokenizing it.
    """
    check_text_bytes("client_request_id", message.client_request_id, MAX_CLIENT_ID_BYTES)
    params = message.sampling_params
    sampling_params = _to_sampling_params(params, limits)
    n = params.n if params.HasField("n") else 1
    check_number(f"{_PARAMS}.n", n, Bounds(1, MAX_COMPLETIONS))
    if n > 1 and sampling_params.is_greedy:
        raise InvalidRequest(f"{_PARAMS}.n", f"{n} greedy completions would be equal; raise temperature, or ask for 1")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else None
    if max_tokens is not None:
        check_number(f"{_PARAMS}.max_tokens", max_tokens, SAMPLING_BOUNDS["max_tokens"])
        if limits.max_sequence_tokens is not None and max_tokens >= limits.max_sequence_tokens:
            raise ContextTooLong(
                f"{_PARAMS}.max_tokens",
                f"{max_tokens} tokens and a prompt do not fit {limits.room}",
            )
        if params.min_tokens > max_tokens:
            raise InvalidRequest(
                f"{_PARAMS}.min_tokens", f"must be at most max_tokens ({max_tokens}), not {params.min_tokens}"
            )
    check_count(f"{_PARAMS}.bad_words", params.bad_words, MAX_BAD_WORDS)
    check_texts(f"{_PARAMS}.bad_words", params.bad_words, MAX_BAD_WORD_BYTES)
    check_text_bytes(f"{_PARAMS}.cache_salt", params.cache_salt, MAX_SALT_BYTES)
    return GenerateCall(
        model=message.model,
        prompt=_to_prompt(message, limits),
        sampling_params=sampling_params,
        max_tokens=max_tokens,
        seed=params.seed if params.HasField("seed") else None,
        n=n,
        bad_words=tuple(params.bad_words),
        priority=params.priority,
        cache_salt=params.cache_salt,
        client_request_id=message.client_request_id,
    )


def to_tokenize_prompt(message: inference_pb2.TokenizeRequest, limits: ModelLimits) -> Prompt:
    """Return what to tokenize.

    Raises:
        InvalidRequest: there is nothing, or too much of it.
    """
    match message.WhichOneof("input"):
        case "text":
            return _to_text_prompt(message.text, limits)
        case "chat":
            return _to_chat_prompt(message.chat, limits)
        case _:
            raise InvalidRequest("input", "give text or chat")


def _to_prompt(message: inference_pb2.GenerateRequest, limits: ModelLimits) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return _to_text_prompt(message.text, limits)
        case "token_ids":
            field = "token_ids.ids"
            check_prompt_tokens(field, len(message.token_ids.ids), limits)
            check_token_ids(field, message.token_ids.ids, limits.vocab_size)
            return TokenPrompt(tuple(message.token_ids.ids))
        case "chat":
            return _to_chat_prompt(message.chat, limits)
        case _:
            raise InvalidRequest("prompt", "give text, token_ids or chat")


def _to_text_prompt(text: str, limits: ModelLimits) -> TextPrompt:
    check_prompt_text("text", text, limits)
    return TextPrompt(text)


def _to_chat_prompt(chat: inference_pb2.ChatPrompt, limits: ModelLimits) -> ChatPrompt:
    field = "chat.messages"
    # Each message is at least one token, so that this many cannot fit; reading millions of them would take seconds.
    if len(chat.messages) > (limits.max_sequence_tokens or limits.max_prompt_bytes):
        raise ContextTooLong(field, f"{len(chat.messages)} messages cannot fit the context")
    messages = tuple(ChatMessage(message.role, message.content) for message in chat.messages)
    check_prompt_messages(field, messages, limits)
    return ChatPrompt(messages, chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True)


def _to_sampling_params(params: sampling_pb2.SamplingParams, limits: ModelLimits) -> SamplingParams:
    for name in _UNBUILT:
        if params.HasField(name):
            raise InvalidRequest(f"{_PARAMS}.{name}", "is not served by this build")
    # Counted first: what would take long to look through is refused unread.
    check_count(f"{_PARAMS}.stop", params.stop, MAX_STOP_STRINGS)
    check_texts(f"{_PARAMS}.stop", params.stop, MAX_STOP_BYTES)
    most_tokens = min(limits.vocab_size, MAX_TOKEN_ENTRIES)
    check_count(f"{_PARAMS}.stop_token_ids", params.stop_token_ids, most_tokens)
    check_count(f"{_PARAMS}.logit_bias", params.logit_bias, most_tokens)
    check_count(f"{_PARAMS}.allowed_token_ids", params.allowed_token_ids, min(limits.vocab_size, MAX_ALLOWED_TOKENS))
    given = {name: value for name, value in plain_fields_from_proto(params).items() if name not in _OF_THE_CALL}
    result = SamplingParams(
        **given,
        stop=tuple(dict.fromkeys(params.stop)),
        stop_token_ids=frozenset(params.stop_token_ids),
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=frozenset(params.allowed_token_ids) or None,
    )
    # How many tokens there may be is known when the prompt is; until then it bounds nothing.
    check_sampling_params(replace(result, max_tokens=INT32_MAX), limits.vocab_size)
    return result


def started_to_proto(started: Started) -> inference_pb2.GenerateResponse:
    """Return the stream's first message."""
    return inference_pb2.GenerateResponse(
        started=inference_pb2.GenerateStarted(
            request_id=started.request_id,
            seed=started.seed,
            model=started.model,
            prompt_tokens=started.prompt_tokens,
        )
    )


def chunk_to_proto(index: int, chunk: TokenChunk) -> inference_pb2.GenerateResponse:
    """Return a chunk of completion `index`."""
    return inference_pb2.GenerateResponse(
        chunk=inference_pb2.GenerateChunk(
            index=index,
            token_index=chunk.token_index,
            token_ids=chunk.token_ids,
            text=chunk.text,
            logprobs=[logprobs_to_proto(entry) for entry in chunk.logprobs],
        )
    )


def completion_to_proto(index: int, completion: Completion) -> inference_pb2.GenerateResponse:
    """Return the last message of completion `index`."""
    ending, usage, timings = completion.ending, completion.usage, completion.timings
    message = inference_pb2.GenerateComplete(
        index=index,
        finish_reason=finish_reason_to_proto(ending.finish_reason),
        usage=inference_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            draft_tokens=usage.draft_tokens,
            accepted_tokens=usage.accepted_tokens,
        ),
        timings=inference_pb2.Timings(
            queue_ns=timings.queue_ns,
            prefill_ns=timings.prefill_ns,
            transfer_ns=timings.transfer_ns,
            transfer_exposed_ns=timings.transfer_exposed_ns,
            transfer_bytes=timings.transfer_bytes,
            first_token_ns=timings.first_token_ns,
            decode_ns=timings.decode_ns,
            total_ns=timings.total_ns,
            transport=timings.transport,
        ),
        prefill_worker=completion.prefill_worker or "",
        decode_worker=completion.decode_worker or "",
        num_attempts=completion.num_attempts,
    )
    if ending.matched_stop_str is not None:
        message.matched_stop_str = ending.matched_stop_str
    elif ending.matched_stop_token_id is not None:
        message.matched_stop_token_id = ending.matched_stop_token_id
    return inference_pb2.GenerateResponse(complete=message)


def to_request_ids(message: inference_pb2.AbortRequest) -> list[RequestId]:
    """Return the ids that an Abort names."""
    return [RequestId(request_id) for request_id in message.request_ids]
