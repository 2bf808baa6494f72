"""What every system is asked and what it answers. Standard library only: peers import it in their own environments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """One prompt's answer. Times are seconds from the moment the prompt was handed over."""

    first_s: float
    """When the first token was there."""
    last_s: float
    """When the last token was there."""
    num_tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, in the time after the first."""
        seconds = self.last_s - self.first_s
        return (self.num_tokens - 1) / seconds if seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PeerResult:
    """Answers to prompts that were given together or one after the other."""

    answers: tuple[PeerAnswer, ...]
    seconds: float
    """From the first prompt to the last token."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)


class Peer(Protocol):
    """A system under comparison. Greedy, and every answer has exactly the tokens asked for."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: bool) -> PeerResult:
        """Generate `max_tokens` for every prompt of token ids, all at once or one after the other.

        Raises:
            EngineError: The system failed.
        """
        ...

    def pause(self) -> None:
        """Stop the system's processes, so that they take nothing from the one that is measured."""
        ...

    def resume(self) -> None:
        """Let them go on."""
        ...
