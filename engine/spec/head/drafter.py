"""EagleDrafter: a draft head on the target's hidden states proposes, all sequences of a step together.

Each pass drafts one token more for every sequence that still takes part; passes stop where the pacer finds that one
more would not pay. A draft is drawn by the target's own rule, all sampling fields and the position's noise included,
from the head's distribution over its part of the vocabulary. Nothing is rolled back: what a rejected draft wrote into
the head's layer is written anew when its position is computed.
"""

import time
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.batch import SequenceRows, StepBatch, build_batch
from engine.sampling.distribution import is_plain_greedy, needs_processing, process_logits
from engine.sampling.rows import Draw, NumpyRows, RowSampler
from engine.sequence import Sequence
from engine.spec.draft import Draft
from engine.spec.drafter import NO_PROPOSAL, Proposal, evidence_by_grade, evidence_of_probability
from engine.spec.head.follower import HeadFollower
from engine.spec.head.port import HeadRows, RunLimits
from engine.spec.pace.pacer import DraftPacer
from engine.types import RequestId

SOURCE = "head"
_GRADES = evidence_by_grade(SOURCE)
_REACH_EVERY = 4
"""Runs between two looks at how far drafting pays, each at one length."""
_REACH_HALVINGS = 6
GIVE_UP_AFTER = 256
"""So many more steps without drafts than with, divided by the sequences of a step: what follows a sequence costs a
twentieth of its steps, and the more there are the less likely it is that drafting ever pays."""


@dataclass(slots=True, kw_only=True)
class _Line(Draft):
    state: Tensor
    """[state_size] fp32, the head's before the newest token."""


class EagleDrafter:
    """See the module."""

    name = "eagle"

    def __init__(
        self,
        follower: HeadFollower,
        pacer: DraftPacer,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        rows: RowSampler | None = None,
    ) -> None:
        """Draft with a follower's head.

        Args:
            follower: Of the same engine.
            pacer: Says when one more token is not worth a pass.
            vocab_size: The target's.
            eos_token_ids: The target's.
            rows: What draws for requests that are not greedy; `NumpyRows` by default.
        """
        self._follower = follower
        self._pacer = pacer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sampler = rows or NumpyRows()
        self._vocab_ids = follower.head.vocab_ids
        self._num_runs = 0
        self._reaches: list[float] = []
        self._num_idle: dict[RequestId, int] = {}
        """Of each sequence, steps without drafts less those with."""

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        """See `Drafter.propose`."""
        started = time.perf_counter()
        proposals = [NO_PROPOSAL] * len(sequences)
        limits = {
            index: limit
            for index, (sequence, most) in enumerate(zip(sequences, max_tokens, strict=True))
            if (limit := self._limit(sequence, most)) > 0
        }
        if not limits:
            return proposals
        followed = [sequences[index] for index in limits]
        wanted = self._pacer.choose_starts(SOURCE, followed).sequences
        chosen = {sequence.request_id for sequence in wanted}
        self._count_idle(followed, chosen)
        if not wanted:
            return proposals
        if self._follower.catch_up(wanted) > 1:
            started = time.perf_counter()  # it caught up after a pause; drafting in each step, it has one to absorb
        lines: list[_Line] = []
        for index, limit in limits.items():
            sequence = sequences[index]
            state = self._follower.state_before(sequence.request_id, sequence.num_tokens - 1)
            if state is not None and sequence.request_id in chosen:
                lines.append(_Line(index, sequence, limit, state=state))
        self._pacer.begin(SOURCE, (line.sequence for line in lines))
        if lines:
            self._draft(lines, started)
        for line in lines:
            if line.token_ids:
                proposals[line.index] = line.proposal()
        return proposals

    def forget(self, request_id: RequestId) -> None:
        """See `Drafter.forget`; the follower is told by the engine."""
        self._num_idle.pop(request_id, None)

    def _count_idle(self, sequences: SequenceOf[Sequence], chosen: Collection[RequestId]) -> None:
        """Count steps without drafts less those with, and give up the sequences that had too many."""
        for sequence in sequences:
            request_id = sequence.request_id
            count = self._num_idle.get(request_id, 0)
            if request_id in chosen:
                self._num_idle[request_id] = max(count - 1, 0)
                continue
            count = self._num_idle[request_id] = count + len(sequences)
            if count >= GIVE_UP_AFTER:
                self._follower.give_up(request_id)
                self.forget(request_id)

    def _limit(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens may be drafted for a sequence."""
        if most < 1 or not self._follower.can_draft(sequence.request_id):
            return 0
        # The first row is the newest token's, whose slot the coming step needs anyway; others need slots behind it.
        num_slots = len(sequence.block_table) * self._follower.kv_cache.layout.block_size
        return min(most, num_slots - (sequence.num_tokens - 1))

    def _draft(self, lines: list[_Line], started: float) -> None:
        follower = self._follower
        if len(lines) == 1 and is_plain_greedy(lines[0].sequence.sampling_params, lines[0].history()):
            self._run(lines[0], started)
            return
        previous = torch.stack([line.state for line in lines])
        is_first = True
        while True:
            found = follower.head.draft(self._rows(lines), previous, follower.kv_cache)
            self._add(lines, found)
            now = time.perf_counter()
            self._pacer.observe_pass(now - started, is_first=is_first)
            started, is_first = now, False
            going_on = [row for row, line in enumerate(lines) if len(line.token_ids) < line.limit]
            reached = [(lines[row].sequence, lines[row].reach) for row in going_on]
            num_drafted = sum(len(line.token_ids) for line in lines)
            if not going_on or not self._pacer.is_worth_a_pass(SOURCE, reached, num_drafted):
                return
            previous = found.states if len(going_on) == len(lines) else found.states[going_on].contiguous()
            lines = [lines[row] for row in going_on]

    def _rows(self, lines: SequenceOf[_Line]) -> StepBatch:
        """The pass that computes each draft's newest token."""
        parts = [
            SequenceRows(
                line.token_ids[-1:] or line.sequence.token_ids[-1:],
                line.sequence.num_tokens - 1 + len(line.token_ids),
                line.sequence.block_table,
                num_logit_rows=1,
                num_more=line.limit - 1 - len(line.token_ids),
            )
            for line in lines
        ]
        return build_batch(parts, self._follower.kv_cache.layout.block_size)

    def _run(self, line: _Line, started: float) -> None:
        """Draft the likeliest tokens of the only sequence, in one call."""
        sequence, follower = line.sequence, self._follower
        chances = tuple(self._pacer.acceptance.chance(sequence.request_id, grade) for grade in _GRADES)
        limits = RunLimits(self._least_reach(sequence, line.limit), chances, self._stop_ids(sequence))
        run_started = time.perf_counter()
        found = follower.head.run(self._rows([line]), line.state[None].clone(), follower.kv_cache, limits)
        seconds = time.perf_counter() - run_started
        self._pacer.observe_pass(run_started - started + found.first_s, is_first=True)
        if len(found.drafts) > 1:
            self._pacer.observe_pass(seconds - found.first_s, num_passes=len(found.drafts) - 1)
        for token_id, share in found.drafts:
            self._extend(line, token_id, share)

    def _least_reach(self, sequence: Sequence, limit: int) -> tuple[float, ...]:
        """Return, by tokens drafted, the chance that all are accepted below which one more is not worth a pass."""
        known = self._reaches
        while len(known) < limit:
            known.append(self._find_least_reach(sequence, len(known)))
        self._num_runs += 1
        if self._num_runs % _REACH_EVERY == 0:
            place = self._num_runs // _REACH_EVERY % limit
            known[place] = self._find_least_reach(sequence, place)
        return tuple(known[:limit])

    def _find_least_reach(self, sequence: Sequence, num_drafted: int) -> float:
        low, high = 0.0, 1.0
        for _ in range(_REACH_HALVINGS):
            middle = (low + high) / 2
            if self._pacer.is_worth_a_pass(SOURCE, [(sequence, middle)], num_drafted):
                high = middle
            else:
                low = middle
        return high

    def _add(self, lines: SequenceOf[_Line], found: HeadRows) -> None:
        """Add to each draft the token that its row gives, if it gives one."""
        draws: list[tuple[_Line, NDArray[np.float32], Draw]] = []
        best, shares = self._vocab_ids[found.best].tolist(), found.shares.tolist()
        for line, row, token_id, share in zip(lines, found.logits, best, shares, strict=True):
            params = line.sequence.sampling_params
            history = line.history()
            if is_plain_greedy(params, history):
                self._extend(line, token_id, share)
                continue
            full = np.full(self._vocab_size, -np.inf, dtype=np.float32)
            full[self._vocab_ids] = row
            if needs_processing(params, history):
                full = process_logits(full, params, history, self._stop_ids(line.sequence))
            if params.is_greedy:
                likeliest = int(full.argmax())
                weight = full[likeliest]
                is_allowed = bool(np.isfinite(weight))
                self._extend(line, likeliest if is_allowed else None, _share(full[self._vocab_ids], weight, 1.0))
            else:
                draws.append((line, full, Draw(full, params, len(history.token_ids))))
        tokens = self._sampler.draw([draw for _, _, draw in draws])
        for (line, full, draw), token in zip(draws, tokens, strict=True):
            share = 0.0 if token is None else _share(full[self._vocab_ids], full[token], draw.params.temperature)
            self._extend(line, token, share)

    def _extend(self, line: _Line, token_id: int | None, share: float) -> None:
        if token_id is None:
            line.limit = 0  # nothing is allowed that the head knows
            return
        line.add(token_id, evidence_of_probability(SOURCE, share), self._pacer.acceptance)
        if token_id in self._stop_ids(line.sequence):
            line.limit = 0  # nothing comes behind it

    def _stop_ids(self, sequence: Sequence) -> frozenset[int]:
        return sequence.sampling_params.all_stop_ids(self._eos_token_ids)


def _share(row: NDArray[np.float32], weight: np.float32, temperature: float) -> float:
    """The share of e^(weight / temperature) among those of a row that may hold -inf."""
    if not np.isfinite(weight):
        return 0.0
    # A drawn token may be far below the best one; beyond e^80 its share is nothing.
    return float(1.0 / np.exp(np.minimum((row - weight) / np.float32(temperature), 80.0)).sum(dtype=np.float64))
