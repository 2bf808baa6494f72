"""Values that clients see and every process shares: why a request ended, and logprobs. Torch-free and frozen."""

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended."""

    LENGTH = "length"
    """max_tokens or the context limit was reached."""
    STOP = "stop"
    """A stop string, a stop token or the model's end-of-sequence token was produced."""
    ABORT = "abort"
    """The client or an operator ended it."""


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
