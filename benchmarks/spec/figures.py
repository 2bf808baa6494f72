"""Sums over tasks: tokens, seconds, steps, and what became of the drafts."""

from collections import Counter
from dataclasses import dataclass, field

from benchmarks.common.stream import RequestTrace

SHOWN_POSITIONS = 8


@dataclass(slots=True)
class Tally:
    """What one variant did in one category in one round."""

    num_tasks: int = 0
    num_tokens: int = 0
    """Tokens after each answer's first message."""
    seconds: float = 0.0
    """From each answer's first message to its last."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    steps: Counter[int] = field(default_factory=Counter)
    """How many messages brought so many tokens; a message is a step's outcome."""
    num_different: int = 0
    """Answers that were not those of plain decoding."""

    def add(self, trace: RequestTrace, *, is_same: bool) -> None:
        """Take in one answer."""
        self.num_tasks += 1
        self.num_tokens += trace.num_decode_tokens
        self.seconds += trace.decode_s
        self.num_draft_tokens += trace.usage.draft_tokens
        self.num_accepted_tokens += trace.usage.accepted_tokens
        self.steps.update(trace.step_tokens)
        self.num_different += not is_same

    def merge(self, other: "Tally") -> None:
        """Take in another tally."""
        self.num_tasks += other.num_tasks
        self.num_tokens += other.num_tokens
        self.seconds += other.seconds
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self.steps.update(other.steps)
        self.num_different += other.num_different

    @property
    def tokens_per_s(self) -> float:
        """Decode speed; 0 when nothing was decoded."""
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts and the token that every step gives: Spec-Bench's mean accepted length."""
        # From the server's own counts: messages may have been put together on their way.
        num_steps = self.num_tokens - self.num_accepted_tokens
        return self.num_tokens / num_steps if num_steps > 0 else 0.0

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted; None when none were drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def accepted_by_position(self) -> list[float]:
        """Return, for i = 1, 2, ..., the share of steps in which at least i drafts were accepted."""
        total = sum(self.steps.values())
        return [
            round(sum(count for tokens, count in self.steps.items() if tokens > position) / total, 4) if total else 0.0
            for position in range(1, SHOWN_POSITIONS + 1)
        ]


def merged(tallies: list[Tally]) -> Tally:
    """Return one tally of several."""
    total = Tally()
    for tally in tallies:
        total.merge(tally)
    return total
