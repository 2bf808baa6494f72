"""How many tokens to draft: as many as raise tokens per second, from the chances of guesses and the cost of steps.

A draft row adds the chance that it is accepted to a step's tokens, and its cost to the step's time. A token is worth
the time that one takes at present, speculation included (`gain.py`): that is the price at which taking whatever gains
gives the most tokens per second in the long run. Rows are taken in order of chance, over all sequences of a step
together, as long as they gain: drafting fades out by itself as the batch fills up or guesses get worse. Owns no clock;
decides only. What chances are is in `acceptance.py`, what steps cost in `cost.py`.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.scheduler.plan import StepPlan
from engine.sequence import Sequence
from engine.spec.drafter import Evidence, Proposal
from engine.spec.pace.acceptance import Acceptance
from engine.spec.pace.cost import ASSUMED_SHAPE, CostShape, StepCost, StepLoad
from engine.spec.pace.gain import Gain
from engine.spec.pace.starts import Starts
from engine.types import RequestId

EXPLORE_EVERY = 32
"""When nothing is worth a row, the best guess gets one every so many steps, or it would never be known to be better."""
TRIAL_SHARE = 0.02
"""Of the time, for tries of a drafter that does not seem to pay."""
TRIAL_STEPS = 4
"""In a row: a drafter that has paused finds nothing in the caches and takes twice as long at first."""
_START_MARGIN = 1.05
"""What drafting must promise over its cost to begin: a draft that hardly pays is lost where chances turn out worse."""
_NUM_PASSES = 9
_NUM_LOOKED_AHEAD = 8
_LEAST_CHANCE_EVERY = 8
_PLAIN_STEPS_OBSERVED_EVERY = 4
"""Steps without drafts are the most, and all alike."""
_LEAST_CHANCES = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class StartChoice:
    """For which sequences to begin drafting in a step."""

    sequences: tuple[Sequence, ...]
    is_try: bool
    """It does not seem to pay; what comes of it will tell."""


class _Trials:
    """Decides in which steps something that does not seem to pay is tried all the same."""

    def __init__(self) -> None:
        self._saved_seconds = 0.0
        self._num_left = 0

    def earn(self, step_seconds: float) -> None:
        self._saved_seconds += TRIAL_SHARE * step_seconds

    def is_due(self, seconds: float) -> bool:
        """Return whether to try in this step, which takes so many seconds."""
        if self._num_left == 0 and self._saved_seconds >= TRIAL_STEPS * seconds:
            self._num_left = TRIAL_STEPS
            self._saved_seconds = 0.0
        if self._num_left == 0:
            return False
        self._num_left -= 1
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
        self._gain = Gain()
        self.starts = Starts()
        self._started: dict[RequestId, str] = {}
        """Source of those sequences that drafting was begun for in the coming step."""
        self._trials: dict[str, _Trials] = {}
        self._first_passes: deque[float] = deque(maxlen=_NUM_PASSES)
        self._passes: deque[float] = deque(maxlen=_NUM_PASSES)
        self._starts_seconds: deque[float] = deque(maxlen=_NUM_PASSES)
        """What all passes of a step took that began drafting."""
        self._drafting_seconds = 0.0
        """What the passes before the coming step took."""

    def observe(self, request_id: RequestId, num_drafted: int, num_accepted: int) -> None:
        """Take in one verification of a sequence: of the first `num_drafted` tokens last chosen for it."""
        evidence = self._chosen.pop(request_id, ())
        source = self._started.pop(request_id, None)
        if source is not None and (not evidence or evidence[0].source == source):
            self.starts.observe(request_id, source, num_drafted, num_accepted)
        if num_drafted:
            self.acceptance.observe(request_id, evidence[:num_drafted], num_accepted)

    def observe_step(self, plan: StepPlan, seconds: float, num_tokens: int) -> None:
        """Take in what a step took and how many tokens came of it; steps with prefill chunks say nothing about rows."""
        drafting, self._drafting_seconds = self._drafting_seconds, 0.0
        if drafting:
            self._starts_seconds.append(drafting)
        if any(chunk.num_tokens > 1 for chunk in plan.chunks):
            return
        num_sequences = len(plan.chunks)
        plain = self.cost.seconds(StepLoad(num_sequences, sum(chunk.start for chunk in plan.chunks)))
        self._gain.observe(plain * num_tokens / num_sequences, seconds + drafting)
        for trials in self._trials.values():
            trials.earn(seconds)
        has_drafts = any(chunk.draft_token_ids for chunk in plan.chunks)
        if has_drafts or self._num_steps % _PLAIN_STEPS_OBSERVED_EVERY == 0:
            self.cost.observe(StepLoad.of_plan(plan), seconds)

    def observe_pass(self, seconds: float, *, num_passes: int = 1, is_first: bool = False) -> None:
        """Take in what passes of a drafter's own model took; drafters without one never call this.

        Args:
            seconds: All of them together.
            num_passes: How many they were.
            is_first: Whether it was a step's first one, with all that comes before it.
        """
        (self._first_passes if is_first else self._passes).append(seconds / num_passes)
        self._drafting_seconds += seconds

    def choose_starts(self, source: str, sequences: SequenceOf[Sequence]) -> StartChoice:
        """Choose for which sequences to begin drafting; now and then all of them, though it does not seem to pay.

        Such tries take a fixed share of the time, so that a drafter that never pays costs next to nothing. Which of
        them it did draft for, a drafter says with `begin`.
        """
        num_sequences, context = len(sequences), sum(sequence.num_tokens for sequence in sequences)
        load, length = StepLoad(num_sequences, context), context // max(num_sequences, 1)
        expected = [self.starts.expected(sequence.request_id, source) for sequence in sequences]
        num_rows = max(math.ceil(sum(each.drafted for each in expected)), 1)
        row_seconds = self._rows_seconds(load, num_rows, length) / num_rows
        known = self._starts_seconds or self._first_passes
        drafting = statistics.median(known) if known else 0.0
        worth = self._worth_of_token(load)
        gains = [each.accepted * worth - each.drafted * row_seconds * _START_MARGIN for each in expected]
        if sum(gain for gain in gains if gain > 0) > drafting * _START_MARGIN:
            chosen = tuple(sequence for sequence, gain in zip(sequences, gains, strict=True) if gain > 0)
            return StartChoice(chosen, is_try=False)
        is_due = self._trials.setdefault(source, _Trials()).is_due(drafting + row_seconds * num_rows)
        return StartChoice(tuple(sequences) if is_due else (), is_try=is_due)

    def begin(self, source: str, sequences: Iterable[Sequence]) -> None:
        """Note that a drafter drafts for these sequences in the coming step."""
        self._started.update((sequence.request_id, source) for sequence in sequences)

    def is_worth_a_pass(self, source: str, reached: SequenceOf[tuple[Sequence, float]], num_drafted: int = 0) -> bool:
        """Return whether one more token for each of these sequences would bring more than drafting it takes.

        Args:
            source: Whose guesses they are.
            reached: The sequences, and the chance that all that was drafted for each so far is accepted.
            num_drafted: Tokens drafted for them so far, whose rows come before these.
        """
        gained, taken = self._weigh(source, reached, num_drafted)
        return gained > taken

    def _weigh(self, source: str, reached: SequenceOf[tuple[Sequence, float]], num_drafted: int) -> tuple[float, float]:
        """Return the seconds that one more token for each sequence is worth, and those that it takes."""
        tokens = sum(chance * self.acceptance.typical(sequence.request_id, source) for sequence, chance in reached)
        num_sequences, context = len(reached), sum(sequence.num_tokens for sequence, _ in reached)
        length = context // max(num_sequences, 1)
        load = StepLoad(num_sequences + num_drafted, context, num_drafted * length)
        rows = self._rows_seconds(load, num_sequences, length)
        worth = self._worth_of_token(StepLoad(num_sequences, context))
        return tokens * worth, self._pass_seconds(is_first=num_drafted == 0) + rows

    def _rows_seconds(self, load: StepLoad, num_more: int, length: int) -> float:
        """Return what more rows of the same sequences, so long on average, add to a step."""
        more = StepLoad(load.num_rows + num_more, load.num_context_tokens, load.num_extra_pairs + num_more * length)
        return self.cost.seconds(more) - self.cost.seconds(load)

    def _pass_seconds(self, *, is_first: bool) -> float:
        passes = (self._first_passes if is_first else self._passes) or self._first_passes
        return statistics.median(passes) if passes else 0.0

    def _worth_of_token(self, load: StepLoad) -> float:
        """Return how many seconds one token more is worth, in a step with these rows before drafts."""
        return self._gain.factor * self.cost.seconds(load) / max(load.num_rows, 1)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self.acceptance.forget(request_id)
        self.starts.forget(request_id)
        self._started.pop(request_id, None)
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
        """Return how many of the rows to take, best first, for the most that tokens are worth over what rows cost."""
        worth, alone = self._worth_of_token(load), self.cost.seconds(load)
        tokens = 0.0
        best_count, most = 0, 0.0
        times = self.cost.growth(load, (lengths[index] for _, index in rows))
        for count, ((chance, _), seconds) in enumerate(zip(rows, times, strict=True), start=1):
            tokens += chance
            gained = tokens * worth - (seconds - alone)
            if gained > most:
                best_count, most = count, gained
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
