"""Bodies of the HTTP door: what clients of OpenAI's and vLLM's APIs send, checked for form and turned into our message.

Ranges are not checked here: the message goes through `gateway/front/convert.py`, like one that came over gRPC. A field
that is known and not served is refused by name; one that nobody knows is ignored, as OpenAI's own servers do.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr
from pydantic import ValidationError as FormError

from kvrelay.errors import InvalidRequest
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import sampling_pb2

Number: TypeAlias = StrictInt | StrictFloat
_UINT32 = Field(ge=0, le=2**32 - 1)
_SEED_END = 1 << 64

_UNSERVED = ("suffix", "best_of", "response_format", "tools", "functions", "guided_json", "guided_regex", "echo")
_MEANS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "functions": (None, []),
}


_BRANCH = re.compile(r"(?:int|float|str|bool|list\[.*|dict\[.*|function-.*|constrained-.*)$")
"""What stands in an error's path for a branch of a union, which is nothing that a client wrote."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """What a stream tells besides tokens."""

    model_config = ConfigDict(extra="ignore")

    include_usage: StrictBool = False


class _Body(BaseModel):
    """Fields that both kinds of completion have. Absent or null: the default of the public API."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = ""
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, _UINT32] | None = None
    seed: StrictInt | None = None
    stop: Annotated[list[StrictStr], BeforeValidator(_listed)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[StrictStr, Number] | None = None
    user: StrictStr | None = None
    # vLLM's
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Annotated[StrictInt, _UINT32] | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: list[Annotated[StrictInt, _UINT32]] | None = None
    include_stop_str_in_output: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    allowed_token_ids: list[Annotated[StrictInt, _UINT32]] | None = None
    bad_words: list[StrictStr] | None = None
    cache_salt: StrictStr | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), le=2**31 - 1)] | None = None

    def message(self) -> pb.GenerateRequest:
        """Return the public API's request, without its prompt.

        Raises:
            InvalidRequest: A field is known and not served, or its value fits no field of the message.
        """
        self._refuse_unserved()
        params = sampling_pb2.SamplingParams(
            stop=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            allowed_token_ids=self.allowed_token_ids or (),
            bad_words=self.bad_words or (),
            logit_bias=self._biases(),
        )
        for name, value in {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            # -1 is off for vLLM's clients.
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "min_tokens": self.min_tokens,
            "max_tokens": self.token_limit(),
            # Any integer is a seed for OpenAI's clients.
            "seed": None if self.seed is None else self.seed % _SEED_END,
            "ignore_eos": self.ignore_eos,
            "include_stop_str": self.include_stop_str_in_output,
            "skip_special_tokens": self.skip_special_tokens,
            "cache_salt": self.cache_salt,
            "priority": self.priority,
            "logprobs": self.num_logprobs(),
        }.items():
            if value is not None:
                _set(params, name, value)
        # More than the limit of an id would be an error about a field that says nothing here.
        user = (self.user or "").encode()[:128].decode(errors="ignore")
        return pb.GenerateRequest(model=self.model, sampling_params=params, client_request_id=user)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def token_limit(self) -> int | None:
        """Return the most tokens to generate; None: what is left of the context."""
        raise TypeError("each kind of body names its limit")

    def num_logprobs(self) -> int | None:
        """Return how many of the best tokens to report; None: no logprobs."""
        raise TypeError("each kind of body names its logprobs")

    def _biases(self) -> dict[int, float]:
        biases: dict[int, float] = {}
        for token_id, bias in (self.logit_bias or {}).items():
            if not token_id.isdecimal() or int(token_id) >= 2**32:
                raise InvalidRequest("logit_bias", f"keys must be token ids, not {token_id!r}")
            biases[int(token_id)] = bias
        return biases

    def _refuse_unserved(self) -> None:
        for name, value in (self.model_extra or {}).items():
            if name in _UNSERVED and value not in _MEANS_NOTHING.get(name, (None,)):
                raise InvalidRequest(name, "is not served by this build")


def _set(params: sampling_pb2.SamplingParams, name: str, value: Any) -> None:
    try:
        setattr(params, name, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(name, f"{value} is out of range") from error


class CompletionBody(_Body):
    """Body of POST /v1/completions."""

    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    max_tokens: Annotated[StrictInt, _UINT32] | None = 16
    logprobs: Annotated[StrictInt, _UINT32] | None = None

    def to_message(self) -> pb.GenerateRequest:
        """Return the request.

        Raises:
            InvalidRequest: As `message`, or there is not exactly one prompt.
        """
        message = self.message()
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise InvalidRequest("prompt", f"one prompt a request, not {len(prompt)}")
            (prompt,) = prompt
        if isinstance(prompt, str):
            message.text = prompt
        else:
            try:
                message.token_ids.ids.extend(prompt)
            except (ValueError, TypeError) as error:
                raise InvalidRequest("prompt", "token ids must be in [0, 4294967295]") from error
        return message

    def token_limit(self) -> int | None:
        """See `_Body.token_limit`."""
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        """See `_Body.num_logprobs`."""
        return self.logprobs


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: StrictStr


class ChatTurn(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: StrictStr
    content: StrictStr | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """Its text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(_Body):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatTurn]
    max_tokens: Annotated[StrictInt, _UINT32] | None = None
    max_completion_tokens: Annotated[StrictInt, _UINT32] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, _UINT32] | None = None
    add_generation_prompt: StrictBool = True

    def to_message(self) -> pb.GenerateRequest:
        """Return the request.

        Raises:
            InvalidRequest: As `message`, or top_logprobs stands without logprobs.
        """
        message = self.message()
        turns = [pb.ChatMessage(role=turn.role, content=turn.text) for turn in self.messages]
        message.chat.CopyFrom(pb.ChatPrompt(messages=turns, add_generation_prompt=self.add_generation_prompt))
        return message

    def token_limit(self) -> int | None:
        """See `_Body.token_limit`; the newer name wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        """See `_Body.num_logprobs`."""
        if not self.logprobs:
            if self.top_logprobs:
                raise InvalidRequest("top_logprobs", "needs logprobs to be true")
            return None
        return self.top_logprobs or 0


class TokenizeBody(BaseModel):
    """Body of POST /tokenize: a text or a conversation."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr = ""
    prompt: StrictStr | None = None
    messages: list[ChatTurn] | None = None
    add_generation_prompt: StrictBool = True

    def to_message(self) -> pb.TokenizeRequest:
        """Return the request."""
        message = pb.TokenizeRequest(model=self.model)
        if self.messages is not None:
            turns = [pb.ChatMessage(role=turn.role, content=turn.text) for turn in self.messages]
            message.chat.CopyFrom(pb.ChatPrompt(messages=turns, add_generation_prompt=self.add_generation_prompt))
        elif self.prompt is not None:
            message.text = self.prompt
        return message


def read_body(kind: type[BaseModel], content: bytes) -> Any:
    """Return a body of a kind.

    Raises:
        InvalidRequest: It is no JSON object, or a field has the wrong form; names the first one.
    """
    try:
        return kind.model_validate_json(content)
    except FormError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = [str(part) for part in first["loc"] if not _BRANCH.match(str(part))]
        field = ".".join(path) or "body"
        raise InvalidRequest(field, first["msg"].removeprefix("Value error, ")) from error
