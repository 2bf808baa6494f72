"""From a client's arguments to request protos, with errors that name the field before anything is sent.

Owns what the Python client accepts: prompts in three forms, chat messages as pairs or mappings, sampling fields as
keywords. Ranges are the server's business; here only forms are checked.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from kvrelay.errors import InvalidRequest
from kvrelay.unicode_text import check_unicode
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import sampling_pb2

Message: TypeAlias = tuple[str, str] | Mapping[str, str]
"""One turn of a chat: `("user", "Hi")` or `{"role": "user", "content": "Hi"}`."""


class SamplingOptions(TypedDict, total=False):
    """Keywords that say how tokens are chosen; see `protos/kvrelay/v1/sampling.proto`. Absent or None: the default."""

    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str: bool | None
    ignore_eos: bool | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: str | Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    priority: int | None
    cache_salt: str | None
    num_draft_tokens: int | None
    json_schema: str | None
    regex: str | None
    grammar: str | None


_CONSTRAINTS = frozenset({"json_schema", "regex", "grammar"})
_TEXT_LISTS = frozenset({"stop", "bad_words"})
_INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_OTHERS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_FLOAT: "number",
    FieldDescriptor.CPPTYPE_BOOL: "truth value",
    FieldDescriptor.CPPTYPE_STRING: "text",
}


def generate_request(
    prompt: str | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    model: str,
    client_request_id: str,
    options: SamplingOptions,
) -> pb.GenerateRequest:
    """Return the request for one generation.

    Raises:
        InvalidRequest: Not exactly one form of the prompt is given, or a value has the wrong type.
    """
    if [prompt, messages, token_ids].count(None) != 2:
        raise InvalidRequest("prompt", "give exactly one of prompt, messages and token_ids")
    request = pb.GenerateRequest()
    fill(request, "model", model)
    fill(request, "client_request_id", client_request_id)
    if prompt is not None:
        fill(request, "text", prompt, "prompt")
    elif messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
    else:
        fill(request.token_ids, "ids", token_ids, "token_ids")
    request.sampling_params.CopyFrom(sampling_params(options))
    return request


def tokenize_request(text: str | None, messages: Sequence[Message] | None, model: str) -> pb.TokenizeRequest:
    """Return the request for the token ids of a text or a chat.

    Raises:
        InvalidRequest: A value has the wrong type.
    """
    request = pb.TokenizeRequest()
    fill(request, "model", model)
    if messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
    else:
        fill(request, "text", text or "")
    return request


def detokenize_request(token_ids: Sequence[int], model: str, *, skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Return the request for the text of token ids.

    Raises:
        InvalidRequest: A value has the wrong type or is out of range.
    """
    request = pb.DetokenizeRequest()
    fill(request, "model", model)
    fill(request, "token_ids", token_ids)
    fill(request, "skip_special_tokens", skip_special_tokens)
    return request


def abort_request(request_ids: Sequence[int]) -> pb.AbortRequest:
    """Return the request to end others.

    Raises:
        InvalidRequest: A value has the wrong type or is out of range.
    """
    request = pb.AbortRequest()
    fill(request, "request_ids", request_ids)
    return request


def chat_prompt(messages: Sequence[Message], add_generation_prompt: bool | None = None) -> pb.ChatPrompt:
    """Return the proto of a conversation."""
    turns = []
    given: Sequence[object] = messages
    for index, message in enumerate(given):
        role: object = None
        content: object = None
        if isinstance(message, Mapping):
            role, content = message.get("role"), message.get("content")
        elif isinstance(message, tuple | list) and len(message) == 2:
            role, content = message
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}]", "must have a role and a content, both text")
        turn = pb.ChatMessage()
        fill(turn, "role", role, f"messages[{index}].role")
        fill(turn, "content", content, f"messages[{index}].content")
        turns.append(turn)
    return pb.ChatPrompt(messages=turns, add_generation_prompt=add_generation_prompt)


def sampling_params(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Return the proto with exactly the fields that were given."""
    params = sampling_pb2.SamplingParams()
    for name, value in options.items():
        if value is None:
            continue
        if name in _TEXT_LISTS and isinstance(value, str):
            value = [value]
        _set(params, name, value)
    return params


def _set(params: sampling_pb2.SamplingParams, name: str, value: Any) -> None:
    field = f"sampling_params.{name}"
    if name in _CONSTRAINTS:
        fill(params.constraint, name, value, field)
    elif name not in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name or name == "constraint":
        raise InvalidRequest(field, "is not a sampling field")
    else:
        fill(params, name, value, field)


def fill(message: ProtoMessage, name: str, value: object, field: str = "") -> None:
    """Set one field of a message: a scalar, a list or a map.

    Args:
        message: Changed.
        name: The field in the message.
        value: What the caller gave.
        field: What the caller knows the field as; default: `name`.

    Raises:
        InvalidRequest: The value has the wrong type, is out of range or is no Unicode; says what is allowed.
    """
    field = field or name
    if isinstance(value, str):
        check_unicode(field, value)
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            if isinstance(each, str):
                check_unicode(f"{field}[{index}]", each)
    try:
        # A message of its own takes lists, maps and scalars alike.
        message.MergeFrom(type(message)(**{name: value}))
    except (TypeError, ValueError, AttributeError) as error:
        allowed = _allowed(cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[name]))
        raise InvalidRequest(field, f"must be {allowed}, not {reprlib.repr(value)}") from error


def _allowed(field: FieldDescriptor) -> str:
    kind = field.message_type
    if kind is not None:
        key, value = (kind.fields_by_name[name] for name in ("key", "value"))
        return f"a mapping from {_noun(key, is_many=True)} to {_noun(value, is_many=True)}"
    return f"a list of {_noun(field, is_many=True)}" if field.is_repeated else f"a {_noun(field)}"


def _noun(field: FieldDescriptor, *, is_many: bool = False) -> str:
    plural = "s" if is_many else ""
    if field.cpp_type in _INTEGERS:
        low, high = _INTEGERS[field.cpp_type]
        return f"whole number{plural} from {low} to {high}"
    return _OTHERS[field.cpp_type] + plural
