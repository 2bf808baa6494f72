"""How well a head foresees its target on text that it was not trained on.

Greedy drafting from every row of the held-out answers: a draft counts when it is the target's most likely token and all
drafts before it were. Rows where the text itself leaves the target's most likely tokens end a run, since what the
target would say behind them is not known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.features import Features
from engine.training.head import DraftHead, HeadBatch, StepRows

NUM_POSITIONS = 6
_CONVERSATIONS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Figures of one evaluation."""

    acceptance: tuple[float, ...]
    """By draft position: share of drafts accepted among those whose predecessors were."""
    acceptance_by_kind: dict[str, float]
    """Of the first draft, by kind of task."""

    def accepted_drafts(self, num_drafts: int) -> float:
        """Mean number of accepted drafts when `num_drafts` are proposed from every position."""
        reached, total = 1.0, 0.0
        for share in self.acceptance[:num_drafts]:
            reached *= share
            total += reached
        return total


@dataclass(frozen=True, slots=True)
class _Batch:
    rows: HeadBatch
    best: Tensor
    """[num_rows] int64, the target's most likely token behind each row; -1 outside answers."""
    kinds: tuple[str, ...]
    """Of each segment."""


class Evaluator:
    """Held-out conversations with the target's own choices, computed once."""

    def __init__(self, head: DraftHead, features: Features, numbers: Sequence[int]) -> None:
        """Take conversations by their numbers in `features`."""
        self._batches: list[_Batch] = []
        for start in range(0, len(numbers), _CONVERSATIONS_AT_ONCE):
            chosen = numbers[start : start + _CONVERSATIONS_AT_ONCE]
            batch = features.batch(chosen)
            rows = answer_rows(batch)
            best = torch.full((len(batch.token_ids),), -1)
            best[rows] = target_logits(head, batch, rows).argmax(1)
            kinds = tuple(kind for number in chosen for kind in features.kinds_of_answers(number))
            self._batches.append(_Batch(batch, best, kinds))

    @torch.no_grad()
    def evaluate(self, head: DraftHead) -> HeldOut:
        """Measure a head; it must have the target and taps of the first."""
        tried, accepted = [0] * NUM_POSITIONS, [0] * NUM_POSITIONS
        by_kind: dict[str, list[int]] = {}
        for batch in self._batches:
            steps = head.unroll(batch.rows, NUM_POSITIONS)
            hits = [_hits(head, step, batch.best) for step in steps]
            for segment, kind in zip(batch.rows.segments, batch.kinds, strict=True):
                counts = by_kind.setdefault(kind, [0, 0])
                counts[0] += int(hits[0][segment.first : segment.end].sum())
                counts[1] += segment.end - segment.first
            # alive[i]: everything up to the draft whose row is i was accepted, in the run that is at row i now.
            alive = torch.ones(len(batch.best), dtype=torch.bool)
            for position, (step, hit) in enumerate(zip(steps, hits, strict=True)):
                now = alive[step.rows]
                tried[position] += int(now.sum())
                accepted[position] += int((now & hit[step.rows]).sum())
                goes_on = alive & hit & _follows_best(batch)
                alive = torch.cat([torch.zeros(1, dtype=torch.bool), goes_on[:-1]])
        acceptance = tuple(hit / max(1, count) for hit, count in zip(accepted, tried, strict=True))
        return HeldOut(acceptance, {kind: hit / max(1, count) for kind, (hit, count) in sorted(by_kind.items())})


def answer_rows(batch: HeadBatch) -> Tensor:
    """Return the rows that predict answer tokens, [n] int64."""
    return torch.cat([torch.arange(segment.first, segment.end) for segment in batch.segments])


@torch.no_grad()
def target_logits(head: DraftHead, batch: HeadBatch, rows: Tensor) -> Tensor:
    """Return the target's logits [n, vocab_size] at some rows, from the last tap."""
    last = batch.taps[rows, -head.target.config.hidden_size :]
    return head.target.output_features(last) @ head.target.lm_head.T


def _hits(head: DraftHead, step: StepRows, best: Tensor) -> Tensor:
    """[num_rows] bool: whether the head's first choice at a row is the target's."""
    hits = torch.zeros(len(best), dtype=torch.bool)
    choice = head.vocab_ids[(step.hidden @ head.output_rows.T).argmax(1)]
    hits[step.rows] = choice == best[step.rows]
    return hits


def _follows_best(batch: _Batch) -> Tensor:
    """[num_rows] bool: whether the text goes on with the target's most likely token behind a row."""
    return batch.rows.following == batch.best
