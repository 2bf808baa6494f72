"""Drafter: the port behind which tokens are guessed. A guess costs rows, never correctness."""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from engine.sequence import Sequence
from engine.types import RequestId


class Drafter(Protocol):
    """Proposes the next tokens of running sequences. Lives on the engine's thread."""

    @property
    def name(self) -> str:
        """What metrics and benchmarks call it."""
        ...

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[tuple[int, ...]]:
        """Return a guess for each sequence, at most `max_tokens[i]` long; empty = none.

        Called once before each step, with the sequences whose next step is a plain decode.
        """
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended. Unknown ids are ignored."""
        ...
