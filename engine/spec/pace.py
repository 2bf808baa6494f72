"""How many tokens to draft: as many as raise tokens per second, from measured acceptance and measured step cost.

A draft row adds its chance of being accepted to a step's tokens, and its cost to the step's time. Rows are taken in
order of chance while tokens / time grows, over all sequences of a step together, so drafting fades out by itself as
the batch fills up or guesses get worse. Owns no clock; decides only.
"""

import heapq
from collections.abc import Sequence as SequenceOf

from engine.types import RequestId

PRIOR_ACCEPTANCE = 0.6
PRIOR_WEIGHT = 4.0
DECAY = 0.9
"""Weight of a past step per new one in a sequence's acceptance."""
PRIOR_ROW_COST = 0.05
"""Cost of one more row relative to a step of one row, until measured."""
COST_RATE = 0.1
"""Weight of a new step in the measured cost."""
EXPLORE_EVERY = 32
"""A sequence that drafts nothing tries one token every so many steps, or it would never learn that it can."""


class StepCost:
    """Seconds of a step by its number of rows, from measurements at powers of two and between."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Take in one step without prefill chunks."""
        bucket = num_rows if num_rows <= 16 else 1 << (num_rows - 1).bit_length()
        known = self._seconds.get(bucket)
        self._seconds[bucket] = seconds if known is None else known + COST_RATE * (seconds - known)

    def seconds(self, num_rows: int) -> float:
        """Return the expected time of a step, 1.0 per unknown unit when nothing is measured yet."""
        if not self._seconds:
            return 1.0 + PRIOR_ROW_COST * (num_rows - 1)
        below = max((rows for rows in self._seconds if rows <= num_rows), default=None)
        above = min((rows for rows in self._seconds if rows >= num_rows), default=None)
        if below is not None and above is not None:
            low, high = self._seconds[below], max(self._seconds[above], self._seconds[below])
            return low if above == below else low + (high - low) * (num_rows - below) / (above - below)
        edge = below if below is not None else min(self._seconds)
        base = self._seconds[edge] / (1.0 + PRIOR_ROW_COST * (edge - 1))
        return base * (1.0 + PRIOR_ROW_COST * (num_rows - 1))


class _Acceptance:
    """How often one sequence's drafts are accepted, given that those before them were."""

    def __init__(self) -> None:
        self._accepted = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
        self._tried = PRIOR_WEIGHT
        self.num_idle_steps = 0

    @property
    def rate(self) -> float:
        return self._accepted / self._tried

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        self._accepted = self._accepted * DECAY + num_accepted
        self._tried = self._tried * DECAY + min(num_drafted, num_accepted + 1)


class DraftPacer:
    """Chooses draft lengths for the sequences of a step."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.cost = StepCost()
        self._acceptance: dict[RequestId, _Acceptance] = {}

    def observe(self, request_id: RequestId, num_drafted: int, num_accepted: int) -> None:
        """Take in one verification of a sequence."""
        if num_drafted:
            self._entry(request_id).observe(num_drafted, num_accepted)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._acceptance.pop(request_id, None)

    def choose(self, request_ids: SequenceOf[RequestId], proposed: SequenceOf[int]) -> list[int]:
        """Return how many of each sequence's proposed tokens to verify.

        Args:
            request_ids: The sequences of the step; each has one row of its own.
            proposed: Tokens proposed for each.
        """
        lengths = [0] * len(request_ids)
        rates = [self._entry(request_id).rate for request_id in request_ids]
        heap = [(-rates[index], index) for index, count in enumerate(proposed) if count > 0]
        heapq.heapify(heap)
        num_rows = len(request_ids)
        tokens = float(num_rows)
        speed = tokens / self.cost.seconds(num_rows)
        while heap:
            chance, index = heap[0]
            better = (tokens - chance) / self.cost.seconds(num_rows + 1)
            if better <= speed:
                break
            heapq.heappop(heap)
            speed, tokens, num_rows = better, tokens - chance, num_rows + 1
            lengths[index] += 1
            if lengths[index] < min(proposed[index], self.max_draft_tokens):
                heapq.heappush(heap, (chance * rates[index], index))
        self._explore(request_ids, proposed, lengths)
        return lengths

    def _explore(self, request_ids: SequenceOf[RequestId], proposed: SequenceOf[int], lengths: list[int]) -> None:
        for index, request_id in enumerate(request_ids):
            entry = self._entry(request_id)
            if lengths[index] or not proposed[index]:
                entry.num_idle_steps = 0
                continue
            entry.num_idle_steps += 1
            if entry.num_idle_steps >= EXPLORE_EVERY:
                entry.num_idle_steps = 0
                lengths[index] = 1

    def _entry(self, request_id: RequestId) -> _Acceptance:
        return self._acceptance.setdefault(request_id, _Acceptance())
