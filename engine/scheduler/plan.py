"""StepPlan and StepResult: the only values that scheduler and runner exchange."""

from dataclasses import dataclass

from engine.sequence import Sequence
from engine.types import RequestId
from kvrelay.errors import EngineError
from kvrelay.values import PositionLogprobs


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
    draft_token_ids: tuple[int, ...] = ()
    """Proposed tokens that are computed behind the chunk's own, to be verified in the same step."""

    @property
    def end(self) -> int:
        """Position after the last token of the sequence itself."""
        return self.start + self.num_tokens

    @property
    def num_rows(self) -> int:
        """Rows of the step: own tokens and drafts."""
        return self.num_tokens + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Decodes come first."""

    chunks: tuple[ScheduledChunk, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return sum(chunk.num_rows for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens sampled after one chunk: the accepted drafts and one more."""

    request_id: RequestId
    token_ids: tuple[int, ...]
    """At least one unless there is an `error`. All but the last equal the chunk's drafts."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """Empty, or one per token."""
    error: EngineError | None = None
    """Why nothing could be sampled: it ends this sequence and no other."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came back: one entry per chunk that samples, in plan order."""

    sampled: tuple[SampledTokens, ...]
