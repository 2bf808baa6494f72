"""What beginning to draft brings: how many tokens a start leads to, and how many of them are accepted.

A start is worth more than its first token: a confident drafter goes on, an unsure one stops, and which it will be is
not known before. So whole starts are counted, of each sequence by itself, the last ones most, and the first ones of all
sequences together: a new sequence is like others were at their beginning, and many become easier as they go on.
"""

from dataclasses import dataclass

from engine.types import RequestId

_DECAY = 0.85
"""Weight of a sequence's start per later one: about its last 6 count."""
_SHARED_DECAY = 0.98
_NUM_FIRST = 8
"""So many starts are a sequence's beginning."""
_PRIOR_WEIGHT = 2.0
"""So many starts of a sequence are assumed to have been like others' at their beginning."""
_FIRST_GUESS = 1.2, 2.0
"""Tokens accepted and drafted by a start before any was seen."""


@dataclass(slots=True)
class _Record:
    num_starts: int = 0
    weight: float = 0.0
    accepted: float = 0.0
    drafted: float = 0.0

    def add(self, accepted: int, drafted: int, decay: float) -> None:
        self.num_starts += 1
        self.weight = self.weight * decay + 1.0
        self.accepted = self.accepted * decay + accepted
        self.drafted = self.drafted * decay + drafted


@dataclass(frozen=True, slots=True)
class Expected:
    """Means of one start."""

    accepted: float
    drafted: float
    """Tokens that were verified, accepted or not."""


class Starts:
    """Counts starts of every source and sequence."""

    def __init__(self) -> None:
        self._shared: dict[str, _Record] = {}
        self._own: dict[tuple[RequestId, str], _Record] = {}

    def observe(self, request_id: RequestId, source: str, num_drafted: int, num_accepted: int) -> None:
        """Take in what came of a start."""
        own = self._own.setdefault((request_id, source), _Record())
        if own.num_starts < _NUM_FIRST:
            self._shared.setdefault(source, _Record()).add(num_accepted, num_drafted, _SHARED_DECAY)
        own.add(num_accepted, num_drafted, _DECAY)

    def expected(self, request_id: RequestId, source: str) -> Expected:
        """Return what a sequence's next start is likely to bring."""
        accepted, drafted = _FIRST_GUESS
        if (shared := self._shared.get(source)) is not None:
            weight = shared.weight + 1.0
            accepted, drafted = (shared.accepted + accepted) / weight, (shared.drafted + drafted) / weight
        if (own := self._own.get((request_id, source))) is not None:
            weight = own.weight + _PRIOR_WEIGHT
            accepted = (own.accepted + accepted * _PRIOR_WEIGHT) / weight
            drafted = (own.drafted + drafted * _PRIOR_WEIGHT) / weight
        return Expected(accepted, drafted)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        for key in [key for key in self._own if key[0] == request_id]:
            del self._own[key]
