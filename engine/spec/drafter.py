"""Drafter: the port behind which tokens are guessed. A guess costs rows, never correctness.

A proposal says for each token why it is proposed. How often guesses of that class come true is counted in
`engine/spec/pace/pacer.py`, which decides how many of them are worth a row; a drafter need not know how good it is.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from engine.sequence import Sequence
from engine.types import RequestId

_NUM_GRADES = 10


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """A class of guesses whose acceptance is counted together. One object stands for it: compared by identity."""

    source: str
    """Who guesses: `ngram`, `shared`, `draft`, `head`."""
    grade: int
    """How good the guess looks to its source: length of the match, or a step of its own probability."""
    prior: float
    """Share of such guesses that come true, given that those before them did, until some were counted; (0, 1)."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is proposed for one sequence."""

    token_ids: tuple[int, ...] = ()
    """The next tokens; empty = none."""
    evidence: tuple[Evidence, ...] = ()
    """One per token."""


NO_PROPOSAL = Proposal()


@cache
def _graded(source: str, grade: int) -> Evidence:
    return Evidence(source, grade, (grade + 0.5) / _NUM_GRADES)


def evidence_of_probability(source: str, probability: float) -> Evidence:
    """Return the class of a guess to which its source itself gives a probability; guesses of a tenth count together."""
    return _graded(source, min(int(probability * _NUM_GRADES), _NUM_GRADES - 1))


def evidence_by_grade(source: str) -> tuple[Evidence, ...]:
    """Return the classes of `evidence_of_probability`, by equal steps of the probability."""
    return tuple(_graded(source, grade) for grade in range(_NUM_GRADES))


class Drafter(Protocol):
    """Proposes the next tokens of running sequences. Lives on the engine's thread."""

    @property
    def name(self) -> str:
        """What metrics and benchmarks call it."""
        ...

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        """Return a guess for each sequence, at most `max_tokens[i]` long.

        Called once before each step, with the sequences whose next step is a plain decode.
        """
        ...

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended. Unknown ids are ignored."""
        ...
