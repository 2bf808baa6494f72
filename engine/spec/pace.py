"""How many tokens to draft: as many as raise tokens per second, from the chances of guesses and the cost of steps.

A draft row adds the chance that it is accepted to a step's tokens, and its cost to the step's time. Rows are taken in
order of chance, over all sequences of a step together, up to the number at which tokens / time is largest: drafting
fades out by itself as the batch fills up or guesses get worse. Owns no clock; decides only. What chances are is in
`acceptance.py`, what steps cost in `cost.py`.
"""

import statistics
from collections import deque
from collections.abc import Sequence as SequenceOf

from engine.scheduler.plan import StepPlan
from engine.sequence import Sequence
from engine.spec.acceptance import Acceptance
from engine.spec.cost import ASSUMED_SHAPE, CostShape, StepCost, StepLoad
from engine.spec.drafter import Evidence, Proposal
from engine.types import RequestId

EXPLORE_EVERY = 32
"""When nothing is worth a row, the best guess gets one every so many steps, or it would never be known to be better."""
MAX_WAIT = 1024
"""Longest wait, in steps, between two tries of a drafter that did not pay."""
_START_MARGIN = 1.2
"""What drafting must promise over its cost to begin: a draft that hardly pays is lost where chances turn out worse."""
_NUM_PASSES = 9
_NUM_LOOKED_AHEAD = 8
_LEAST_CHANCE_EVERY = 8
_PLAIN_STEPS_OBSERVED_EVERY = 4
"""Steps without drafts are the most, and all alike."""
_LEAST_CHANCES = 0.02, 0.5


class _Wait:
    """Steps until something that did not pay is tried again."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._length = EXPLORE_EVERY
        self._num_left = EXPLORE_EVERY

    def is_over(self) -> bool:
        self._num_left -= 1
        if self._num_left > 0:
            return False
        self._length = min(2 * self._length, MAX_WAIT)
        self._num_left = self._length
        return True


class DraftPacer:
    """Chooses draft lengths for the sequences of a step."""

    def __init__(self, max_draft_tokens: int, shape: CostShape = ASSUMED_SHAPE) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.cost = StepCost(shape)
        self.acceptance = Acceptance()
        self._chosen: dict[RequestId, tuple[Evidence, ...]] = {}
        self._num_idle_steps = 0
        self.least_chance = _LEAST_CHANCES[0]
        """A token that is reached with less is not worth a row, at the load of the last steps."""
        self._num_steps = 0
        self._num_sequences = 0
        self._seconds_per_token = 0.0
        self._waits: dict[str, _Wait] = {}
        self._passes: deque[float] = deque(maxlen=_NUM_PASSES)

    def observe(self, request_id: RequestId, num_drafted: int, num_accepted: int) -> None:
        """Take in one verification of a sequence: of the first `num_drafted` tokens last chosen for it."""
        evidence = self._chosen.pop(request_id, ())
        if num_drafted:
            self.acceptance.observe(request_id, evidence[:num_drafted], num_accepted)

    def observe_step(self, plan: StepPlan, seconds: float) -> None:
        """Take in what a step took; steps with prefill chunks say nothing about draft rows."""
        has_drafts = any(chunk.draft_token_ids for chunk in plan.chunks)
        if not has_drafts and self._num_steps % _PLAIN_STEPS_OBSERVED_EVERY:
            return
        if all(chunk.num_tokens == 1 for chunk in plan.chunks):
            self.cost.observe(StepLoad.of_plan(plan), seconds)

    def observe_pass(self, seconds: float) -> None:
        """Take in what one pass of a drafter's own model took; drafters without one never call this."""
        self._passes.append(seconds)

    def is_worth_a_start(self, source: str, sequences: SequenceOf[Sequence]) -> bool:
        """Return whether to draft at all in this step; now and then also when it does not seem to pay.

        The waits between such tries double while they fail, so that a drafter that never pays costs nothing.
        """
        wait = self._waits.setdefault(source, _Wait())
        if self.is_worth_a_pass(source, [(sequence, 1.0) for sequence in sequences], margin=_START_MARGIN):
            wait.reset()
            return True
        return wait.is_over()

    def is_worth_a_pass(
        self, source: str, reached: SequenceOf[tuple[Sequence, float]], num_drafted: int = 0, margin: float = 1.0
    ) -> bool:
        """Return whether one more token for each of these sequences would bring more than drafting it takes.

        Args:
            source: Whose guesses they are.
            reached: The sequences, and the chance that all that was drafted for each so far is accepted.
            num_drafted: Tokens drafted for them so far, whose rows come before these.
            margin: How many times as much it must bring.
        """
        tokens = sum(chance * self.acceptance.typical(sequence.request_id, source) for sequence, chance in reached)
        context = sum(sequence.num_tokens for sequence, _ in reached)
        before = len(reached) + num_drafted
        pairs = context * num_drafted // max(len(reached), 1)
        alone = self.cost.seconds(StepLoad(before, context, pairs))
        rows = self.cost.seconds(StepLoad(before + len(reached), context, pairs + context)) - alone
        passes = statistics.median(self._passes) if self._passes else 0.0
        per_token = self._seconds_per_token or alone / max(len(reached), 1)
        return tokens * per_token > margin * (passes + rows)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self.acceptance.forget(request_id)
        self._chosen.pop(request_id, None)

    def promise(self, request_id: RequestId, proposal: Proposal) -> float:
        """Return how many of a proposal's tokens are expected to be accepted."""
        return sum(self.acceptance.chances(request_id, proposal.evidence))

    def choose(self, sequences: SequenceOf[Sequence], proposals: SequenceOf[Proposal]) -> list[int]:
        """Return how many of each sequence's proposed tokens to verify.

        Args:
            sequences: The sequences of the step; each has one row of its own.
            proposals: What is proposed for each.
        """
        if not sequences:
            return []
        is_time_to_look = self._num_steps % _LEAST_CHANCE_EVERY == 0 or len(sequences) != self._num_sequences
        self._num_steps += 1
        if not is_time_to_look and not any(proposal.evidence for proposal in proposals):
            return [0] * len(sequences)
        lengths = [sequence.num_tokens for sequence in sequences]
        load = StepLoad(len(sequences), sum(lengths))
        if is_time_to_look:
            self._set_least_chance(load)
        self._num_sequences = load.num_rows
        rows: list[tuple[float, int]] = []
        best: tuple[float, int] | None = None
        for index, (sequence, proposal) in enumerate(zip(sequences, proposals, strict=True)):
            chances = self.acceptance.chances(
                sequence.request_id, proposal.evidence[: self.max_draft_tokens], self.least_chance
            )
            if chances and (best is None or chances[0] > best[0]):
                best = chances[0], index
            rows += [(chance, index) for chance in chances if chance >= self.least_chance]
        # Chances never rise within a sequence, and sorting is stable: whatever is cut off is each proposal's end.
        rows.sort(key=lambda row: -row[0])
        counts = [0] * len(sequences)
        for _, index in rows[: self._best_count(load, lengths, rows)]:
            counts[index] += 1
        self._num_idle_steps = 0 if any(counts) or best is None else self._num_idle_steps + 1
        if best is not None and self._num_idle_steps >= EXPLORE_EVERY:
            self._num_idle_steps = 0
            counts[best[1]] = 1
        for sequence, proposal, count in zip(sequences, proposals, counts, strict=True):
            if count:
                self._chosen[sequence.request_id] = proposal.evidence[:count]
        return counts

    def _best_count(self, load: StepLoad, lengths: SequenceOf[int], rows: SequenceOf[tuple[float, int]]) -> int:
        """Return how many of the rows to take, best first, for the most tokens per second."""
        tokens = float(load.num_rows)
        best_count, best_speed = 0, tokens / self.cost.seconds(load)
        times = self.cost.growth(load, (lengths[index] for _, index in rows))
        for count, ((chance, _), seconds) in enumerate(zip(rows, times, strict=True), start=1):
            tokens += chance
            if tokens > best_speed * seconds:
                best_count, best_speed = count, tokens / seconds
        self._seconds_per_token = 1.0 / best_speed
        return best_count

    def _set_least_chance(self, load: StepLoad) -> None:
        """Find what rows must promise on average, and allow less of single ones, which a good start may carry."""
        length = load.num_context_tokens // load.num_rows
        alone = self.cost.seconds(load)
        needed = min(
            (seconds / alone - 1.0) * load.num_rows / count
            for count, seconds in enumerate(self.cost.growth(load, [length] * _NUM_LOOKED_AHEAD), start=1)
        )
        self.least_chance = min(max(needed / 2, _LEAST_CHANCES[0]), _LEAST_CHANCES[1])
