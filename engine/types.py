"""Values that cross module borders: ids, sampling parameters, token outputs, the hand-off record.

Torch-free and frozen. Protos are converted to these at the edge (`*/convert.py`) and never travel further in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from engine.errors import EngineError

RequestId = NewType("RequestId", int)
"""64-bit id minted by the gateway, unique while the request lives."""
BlockId = NewType("BlockId", int)
"""Index of a block in one worker's pool."""
BlockHash = NewType("BlockHash", bytes)
"""32 bytes: the chained hash of salt and tokens up to a block's end. KV events carry the first 8, big-endian."""
ROOT_HASH = BlockHash(b"\0" * 32)
"""The parent of a first block."""
LeaseId = NewType("LeaseId", int)
"""64-bit id of one reservation, minted by the decode worker."""
Epoch = NewType("Epoch", int)
"""Number of the attempt that may write under a lease; writers with a smaller one are fenced."""
WorkerId = NewType("WorkerId", str)
"""Name of a worker, stable over restarts."""
Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn at process start, so that a restart under the same name is noticed."""


MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy: no noise could outweigh a logit divided by less, and the division would overflow."""


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    """max_tokens or the context limit was reached."""
    STOP = "stop"
    """A stop string, a stop token or the model's end-of-sequence token was produced."""
    ABORT = "abort"
    """The client or an operator ended it."""


class LogprobsMode(StrEnum):
    """Which distribution the reported logprobs describe."""

    RAW = "raw"
    """The model's own log-softmax, before any sampling field is applied."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Defaults are those of an absent field. Ranges: `engine/request_checks.py`."""

    max_tokens: int = 256
    """Most tokens to generate, >= 1."""
    min_tokens: int = 0
    """Stop tokens (eos included) are banned until this many tokens exist; 0 = no minimum."""
    temperature: float = 1.0
    """Below `MIN_TEMPERATURE` = greedy; otherwise logits are divided by it."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches it; (0, 1], 1 = off."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = off."""
    min_p: float = 0.0
    """Keep tokens with at least this share of the best token's probability; [0, 1], 0 = off."""
    seed: int = 0
    """64-bit key of the noise. The gateway draws one when the client gives none and returns it."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; > 0, 1 = off."""
    presence_penalty: float = 0.0
    """Subtracted once from logits of tokens in the output; [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; [-2, 2]."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; matched by the gateway on detokenized text."""
    stop_token_ids: frozenset[int] = frozenset()
    """Token ids that end the request, besides the model's end-of-sequence ids."""
    include_stop_str: bool = False
    """Whether the matched stop string stays in the text."""
    ignore_eos: bool = False
    """Whether the model's end-of-sequence ids are ordinary tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the named tokens' logits; [-100, 100]."""
    allowed_token_ids: frozenset[int] | None = None
    """If given, every other token is banned."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear: the last token is banned where the ones before it match."""
    logprobs: int | None = None
    """None = no logprobs; k = the sampled token's and the k best tokens'."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    num_draft_tokens: int | None = None
    """Most draft tokens per step; 0 = no speculation, None = the worker decides. The tokens are the same."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely processed token is taken without noise."""
        return self.temperature < MIN_TEMPERATURE

    def all_stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """Return every token that ends the request, given the model's end-of-sequence ids."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | eos_token_ids

    @property
    def needs_token_counts(self) -> bool:
        """Whether penalties ask for counts over the tokens before a position."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability and rank under the model's own distribution."""

    token_id: int
    logprob: float
    rank: int
    """1 = the most likely token."""


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs at one generated position."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The k best tokens, best first; empty for k = 0."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A tokenized, validated request as the engine takes it."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """The prompt, or prompt + tokens generated by an earlier attempt; never empty."""
    sampling_params: SamplingParams
    num_prompt_tokens: int
    """How many of `token_ids` are the client's prompt; the rest counts as output (penalties, limits)."""
    cache_salt: str = ""
    """Requests share cached prefixes only when their salts are equal."""
    priority: int = 0
    """Lower runs first."""
    is_suspect: bool = False
    """It took part in a step that broke a worker; see `engine/scheduler/trial.py`."""


@dataclass(frozen=True, slots=True)
class PrefillTiming:
    """Where the time before the first token went, on the worker that computed it."""

    queue_ns: int
    """From arrival in the engine to the first chunk's step."""
    prefill_ns: int
    """From the first chunk's step to the first token."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step produced for one sequence."""

    request_id: RequestId
    token_index: int
    """Index of the first new token among the generated ones (0 = the first generated token)."""
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Empty, or one per token."""
    finish_reason: FinishReason | None = None
    """None = goes on."""
    matched_stop_token_id: int | None = None
    """The stop token that ended it; it is the last of `token_ids`."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from this worker's prefix cache."""
    num_draft_tokens: int = 0
    """Draft tokens verified in this step."""
    num_accepted_tokens: int = 0
    """Draft tokens accepted in this step."""
    prefill_timing: PrefillTiming | None = None
    """Set in the output that holds the first token computed here."""
    draft_state: bytes = b""
    """What decode's draft head needs to go on, see `HeadFollower.export`; empty unless a hand-off with a head."""
    error: EngineError | None = None
    """Why the sequence cannot go on, though the step did; then there are no tokens and this output is its last."""

    @property
    def has_ended(self) -> bool:
        """Whether no output follows."""
        return self.finish_reason is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """What decode must know besides the KV to go on exactly as prefill would have. Travels inside COMMIT."""

    first_token_id: int
    first_logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None
    """Not None: the request ended on its first token and decode only releases the blocks."""
    matched_stop_token_id: int | None
    num_cached_tokens: int
    """Prompt tokens that prefill took from its own prefix cache."""
    prefill_ns: int
    """From the start of the first chunk to the first token, on the prefill worker."""
    queue_ns: int
    """From arrival at the prefill worker to the start of the first chunk."""
    traceparent: str
    """W3C trace context of the prefill span; empty = none."""
    draft_state: bytes = b""
    """The state of decode's draft head behind the prompt, fp32 little-endian; empty = prefill runs no head."""
