"""StepPlan and StepResult: the only values that scheduler and runner exchange."""

from dataclasses import dataclass

from engine.sequence import Sequence
from engine.types import PositionLogprobs, RequestId


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The part of one sequence that a step computes: tokens [start, start + num_tokens)."""

    sequence: Sequence
    """Read-only for the runner; its block table covers the chunk."""
    start: int
    """Position of the first token; everything before it is computed."""
    num_tokens: int
    samples: bool
    """Whether the chunk reaches the sequence's end, so that a token is sampled after it."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Decodes come first."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token sampled after one chunk."""

    request_id: RequestId
    token_id: int
    logprobs: PositionLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back: one entry per chunk that samples, in plan order."""

    sampled: tuple[SampledToken, ...]
