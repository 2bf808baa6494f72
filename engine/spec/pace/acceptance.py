"""How often guesses come true: by class of evidence over all sequences, shifted by how each sequence does.

The chance that a token is accepted, given that those before it were, is that of its class with a sequence's own shift
in log-odds. Only tokens that were verified teach anything: the accepted ones and the first that was not.
"""

import math
from collections.abc import Sequence as SequenceOf

from engine.spec.drafter import Evidence
from engine.types import RequestId

PRIOR_WEIGHT = 6.0
"""So many guesses of a class are assumed to have come true as often as its prior says."""
MAX_WEIGHT = 400.0
"""A class's counts are halved here, so that it follows what is served now."""
SHIFT_RATE = 0.2
"""How far one surprise moves a sequence's log-odds."""
SHIFT_DECAY = 0.995
"""What is left of a shift after each verified token, so that no verdict is for ever."""
MAX_SHIFT = 2.0
TYPICAL_PRIOR = 0.6
"""Chance of a source's next token before any was verified."""
_MAX_CHANCE = 0.995
_MIN_CHANCE = 0.002


class _Class:
    __slots__ = ("_accepted", "_tried", "share")

    def __init__(self, prior: float) -> None:
        self.share = prior
        self._accepted = prior * PRIOR_WEIGHT
        self._tried = PRIOR_WEIGHT

    def add(self, outcome: float) -> None:
        self._accepted += outcome
        self._tried += 1.0
        if self._tried > MAX_WEIGHT:
            self._accepted /= 2.0
            self._tried /= 2.0
        self.share = self._accepted / self._tried


class Acceptance:
    """Counts of every class, and the shift of every running sequence."""

    def __init__(self) -> None:
        self._classes: dict[Evidence, _Class] = {}
        self._sources: dict[str, _Class] = {}
        # What a sequence's odds are multiplied with: e to its shift.
        self._factors: dict[RequestId, float] = {}

    def chance(self, request_id: RequestId, evidence: Evidence) -> float:
        """Return the chance of one token, given that those before it are accepted."""
        return _shifted(self._share(evidence), self._factors.get(request_id, 1.0))

    def chances(self, request_id: RequestId, evidence: SequenceOf[Evidence], least: float = 0.0) -> list[float]:
        """Return for each token of a proposal the chance that it and all before it are accepted; never rising.

        Args:
            request_id: The sequence.
            evidence: Of each token.
            least: Ends the list with the first chance below it.
        """
        factor = self._factors.get(request_id, 1.0)
        reach = 1.0
        found: list[float] = []
        for each in evidence:
            reach *= _shifted(self._share(each), factor)
            found.append(reach)
            if reach < least:
                break
        return found

    def typical(self, request_id: RequestId, source: str) -> float:
        """Return the chance of a source's next token when its evidence is not known yet."""
        counts = self._sources.get(source)
        share = TYPICAL_PRIOR if counts is None else counts.share
        return _shifted(share, self._factors.get(request_id, 1.0))

    def observe(self, request_id: RequestId, evidence: SequenceOf[Evidence], num_accepted: int) -> None:
        """Take in one verification.

        Args:
            request_id: The sequence.
            evidence: Of the tokens that were verified.
            num_accepted: How many of them the target agreed with.
        """
        factor = self._factors.get(request_id, 1.0)
        shift = math.log(factor)
        for place, each in enumerate(evidence[: num_accepted + 1]):
            outcome = 1.0 if place < num_accepted else 0.0
            counts = self._counts(each)
            shift = shift * SHIFT_DECAY + SHIFT_RATE * (outcome - _shifted(counts.share, factor))
            counts.add(outcome)
            self._source(each.source).add(outcome)
        self._factors[request_id] = math.exp(min(max(shift, -MAX_SHIFT), MAX_SHIFT))

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._factors.pop(request_id, None)

    def _share(self, evidence: Evidence) -> float:
        counts = self._classes.get(evidence)
        return evidence.prior if counts is None else counts.share

    def _counts(self, evidence: Evidence) -> _Class:
        counts = self._classes.get(evidence)
        if counts is None:
            counts = self._classes[evidence] = _Class(evidence.prior)
        return counts

    def _source(self, source: str) -> _Class:
        counts = self._sources.get(source)
        if counts is None:
            counts = self._sources[source] = _Class(TYPICAL_PRIOR)
        return counts


def _shifted(share: float, factor: float) -> float:
    """Return a share whose odds are multiplied with a factor."""
    odds = share * factor
    shifted = odds / (1.0 - share + odds)
    return shifted if _MIN_CHANCE < shifted < _MAX_CHANCE else min(max(shifted, _MIN_CHANCE), _MAX_CHANCE)
