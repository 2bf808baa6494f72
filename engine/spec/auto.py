"""AutoDrafter: n-gram lookup or a draft head, for each sequence and step whichever promises more.

What is promised is the number of tokens expected to be accepted, from measured acceptance. Looking up costs nothing, so
it goes first; the head drafts where it usually gets further than what was found.
"""

from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence
from engine.spec.drafter import Drafter, Proposal
from engine.spec.pace.pacer import DraftPacer
from engine.types import RequestId


class AutoDrafter:
    """See the module."""

    name = "auto"

    def __init__(self, lookup: Drafter, head: Drafter, head_source: str, pacer: DraftPacer) -> None:
        """Choose between two drafters.

        Args:
            lookup: Proposes without cost.
            head: Proposes at the cost of passes of its own.
            head_source: What the head's evidence calls it.
            pacer: Knows how often guesses come true.
        """
        self._lookup = lookup
        self._head = head
        self._head_source = head_source
        self._pacer = pacer

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        """See `Drafter.propose`."""
        found = self._lookup.propose(sequences, max_tokens)
        promised = [
            self._pacer.promise(sequence.request_id, proposal)
            for sequence, proposal in zip(sequences, found, strict=True)
        ]
        limits = [
            0 if promise >= self._usual_promise(sequence, limit) else limit
            for sequence, promise, limit in zip(sequences, promised, max_tokens, strict=True)
        ]
        if not any(limit > 0 for limit in limits):
            return found
        drafted = self._head.propose(sequences, limits)
        return [
            other if self._pacer.promise(sequence.request_id, other) > promise else proposal
            for sequence, proposal, promise, other in zip(sequences, found, promised, drafted, strict=True)
        ]

    def forget(self, request_id: RequestId) -> None:
        """See `Drafter.forget`."""
        self._lookup.forget(request_id)
        self._head.forget(request_id)

    def _usual_promise(self, sequence: Sequence, limit: int) -> float:
        """How many tokens of a head's proposal are usually accepted."""
        return min(self._pacer.starts.expected(sequence.request_id, self._head_source).accepted, float(limit))
