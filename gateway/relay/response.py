"""What a completion gives back, as values: chunks of tokens and text, and its end with usage and timings.

Made by `output.py` and `relay.py`, turned into protos by `gateway/front/convert.py`.
"""

from dataclasses import dataclass, field

from engine.types import RequestId, WorkerId
from kvrelay.values import FinishReason, PositionLogprobs


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted."""

    request_id: RequestId
    seed: int
    """The first completion's; the next ones count up from it."""
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one completion. Text may lag behind while a character or a possible stop string is incomplete."""

    token_index: int
    """Index of the first of `token_ids` among the completion's tokens."""
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Empty, or one per token."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a completion ended."""

    finish_reason: FinishReason
    matched_stop_token_id: int | None = None
    matched_stop_str: str | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of one completion, filled in while it runs."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Where one completion's time went, in nanoseconds, filled in while it runs; 0 = did not happen."""

    queue_ns: int = 0
    prefill_ns: int = 0
    transfer_ns: int = 0
    transfer_exposed_ns: int = 0
    transfer_bytes: int = 0
    first_token_ns: int = 0
    decode_ns: int = 0
    total_ns: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one completion."""

    ending: Ending
    usage: Usage
    timings: Timings = field(default_factory=Timings)
    prefill_worker: WorkerId | None = None
    """None: no prompt was computed."""
    decode_worker: WorkerId | None = None
    num_attempts: int = 1


def to_ns(seconds: float) -> int:
    """Return a span of clock seconds as timings have it."""
    return max(0, int(seconds * 1e9))
