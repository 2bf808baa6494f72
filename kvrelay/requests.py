"""From a client's arguments to request protos, with errors that name the field before anything is sent.

Owns what the Python client accepts: prompts in three forms, chat messages as pairs or mappings, sampling fields as
keywords. Ranges are the server's business; here only forms are checked.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar

from engine.errors import InvalidRequest
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import sampling_pb2

Built = TypeVar("Built")
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
    request = pb.GenerateRequest(model=model, client_request_id=client_request_id)
    if [prompt, messages, token_ids].count(None) != 2:
        raise InvalidRequest("prompt", "give exactly one of prompt, messages and token_ids")
    if prompt is not None:
        request.text = prompt
    elif messages is not None:
        request.chat.CopyFrom(chat_prompt(messages))
    else:
        request.token_ids.CopyFrom(_checked("token_ids", lambda: pb.TokenIds(ids=token_ids)))
    request.sampling_params.CopyFrom(sampling_params(options))
    return request


def chat_prompt(messages: Sequence[Message], add_generation_prompt: bool | None = None) -> pb.ChatPrompt:
    """Return the proto of a conversation."""
    turns = []
    for index, message in enumerate(messages):
        if isinstance(message, Mapping):
            role, content = message.get("role"), message.get("content")
        else:
            role, content = message
        if not isinstance(role, str) or not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}]", "must have a role and a content, both text")
        turns.append(pb.ChatMessage(role=role, content=content))
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
        _checked(field, lambda: setattr(params.constraint, name, value))
    elif name not in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name or name == "constraint":
        raise InvalidRequest(field, "is not a sampling field")
    else:
        # A message of its own takes lists, maps and scalars alike.
        params.MergeFrom(_checked(field, lambda: sampling_pb2.SamplingParams(**{name: value})))


def _checked(field: str, build: Callable[[], Built]) -> Built:
    try:
        return build()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(field, str(error)) from error
