"""What a client asked for, as values: the prompt in one of three forms, the call, and one completion of it.

Built by `gateway/front/convert.py` from protos; tokenized and resolved by `prompt.py`; run by `generation.py` and
`relay.py`.
"""

from dataclasses import dataclass
from typing import TypeAlias

from engine.types import EngineRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt to be tokenized as it is."""

    text: str

    @property
    def field(self) -> str:
        """Proto path of the prompt, for error messages."""
        return "text"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt that is tokenized already."""

    token_ids: tuple[int, ...]

    @property
    def field(self) -> str:
        """Proto path of the prompt, for error messages."""
        return "token_ids.ids"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be rendered with the model's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True

    @property
    def field(self) -> str:
        """Proto path of the prompt, for error messages."""
        return "chat.messages"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request may ask of the model served."""

    vocab_size: int
    """Token ids are below this."""
    max_token_bytes: int
    """Length of the longest token: n bytes of text are at least n / max_token_bytes tokens."""
    max_prompt_bytes: int
    """Longest prompt text in bytes, whatever the context."""
    max_sequence_tokens: int | None
    """Most tokens of prompt and output together; None while no decode worker is known."""
    context_length: int | None = None
    """The model's own limit, which a small KV cache may not reach; None: `max_sequence_tokens` is it."""

    @property
    def room(self) -> str:
        """What holds `max_sequence_tokens`, in the words of an error."""
        if self.context_length is None or self.max_sequence_tokens == self.context_length:
            return f"the context of {self.max_sequence_tokens} tokens"
        return (
            f"the {self.max_sequence_tokens} tokens that a decode worker's KV cache holds"
            f" (the model's context is {self.context_length})"
        )

    @property
    def max_text_bytes(self) -> int:
        """Bytes beyond which a text cannot be a prompt here, so that it need not be tokenized to be refused."""
        if self.max_sequence_tokens is None:
            return self.max_prompt_bytes
        return min(self.max_prompt_bytes, self.max_sequence_tokens * self.max_token_bytes)


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A Generate call whose fields are each in range; the prompt is not tokenized yet."""

    model: str
    """Empty: the only one served."""
    prompt: Prompt
    sampling_params: SamplingParams
    """All fields but max_tokens, seed and bad_words, which `resolve` fills in."""
    max_tokens: int | None
    """None: what is left of the context, at most the default."""
    seed: int | None
    """None: the gateway draws one."""
    n: int = 1
    """Number of completions."""
    bad_words: tuple[str, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    client_request_id: str = ""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion to run: what the engine gets, and what only the gateway needs."""

    engine_request: EngineRequest
    """`token_ids` is the prompt alone; stop strings stay in its sampling parameters for the gateway."""
    index: int = 0
    """The completion's number within its call."""
    arrival: float = 0.0
    """Clock seconds at which the call arrived."""
    deadline: float | None = None
    """Clock seconds at which the client stops waiting; None: never."""
