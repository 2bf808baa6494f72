"""ModelDrafter: a smaller model with the target's tokenizer drafts, as the target itself would sample.

It owns its model's KV blocks, a pool of its own with bounded memory, and computes a prompt's KV a few tokens a step, so
that running streams do not wait for it. Rejected drafts are rolled back by going on from the last token that both agree
on. Each draft is drawn by the target's own rule, all sampling fields and the position's noise included: the target as
its own drafter is accepted always. Loads nothing; `worker/compute/bootstrap.py` does.
"""

import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cache.block_pool import BlockPool
from engine.model.batch import SequenceRows, build_batch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.sampling.rows import LogprobQuery, NumpyRows, RowSampler
from engine.sampling.sampler import SampleRequest
from engine.sequence import Sequence
from engine.spec.draft import Draft
from engine.spec.drafter import NO_PROPOSAL, Proposal, evidence_of_probability
from engine.spec.pace.cost import StepLoad
from engine.spec.pace.pacer import DraftPacer
from engine.spec.verify import VerifyItem, target_tokens
from engine.types import BlockId, RequestId

MIN_CATCH_UP_TOKENS, MAX_CATCH_UP_TOKENS = 16, 128
"""Bounds of the prompt tokens that one step computes for drafting, over all sequences."""
MAX_LAG = 8
"""More new tokens of a sequence are a prompt that is caught up with, within the budget."""
_SOURCE = "draft"


@dataclass(slots=True)
class _State:
    """What the cache holds of one sequence."""

    block_table: list[BlockId] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    """The tokens whose KV is in the blocks, drafts included."""
    num_agreed: int = 0
    """So many of them are known to be the sequence's own."""


@dataclass(slots=True, kw_only=True)
class _Draft(Draft):
    state: _State


class ModelDrafter:
    """See the module."""

    name = "draft"

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KvCache,
        pacer: DraftPacer,
        eos_token_ids: frozenset[int],
        rows: RowSampler | None = None,
    ) -> None:
        """Take over a loaded model and its cache.

        Args:
            model: Drafts; its vocabulary is the target's.
            kv_cache: Of the model, for its use alone.
            pacer: Says when one more token is not worth a pass.
            eos_token_ids: The target's.
            rows: What draws from its logits; `NumpyRows` by default.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._pacer = pacer
        self._eos_token_ids = eos_token_ids
        self._rows = rows or NumpyRows()
        self._block_size = kv_cache.layout.block_size
        self.pool = BlockPool(kv_cache.num_blocks, self._block_size, enable_prefix_cache=False)
        """The cache's blocks; every one is free or in the table of a sequence kept here."""
        self._row_seconds: deque[float] = deque(maxlen=9)
        # From the least recently drafted for to the most recently.
        self._states: OrderedDict[RequestId, _State] = OrderedDict()

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        """See `Drafter.propose`."""
        proposals = [NO_PROPOSAL] * len(sequences)
        wanted = [
            (index, sequence, self._fitting(sequence, limit))
            for index, (sequence, limit) in enumerate(zip(sequences, max_tokens, strict=True))
        ]
        wanted = [each for each in wanted if each[2] > 0]
        if not wanted:
            return proposals
        choice = self._pacer.choose_starts(_SOURCE, [sequence for _, sequence, _ in wanted])
        if not choice.sequences:
            return proposals
        chosen = {sequence.request_id for sequence in choice.sequences}
        drafts = [self._open(*each) for each in wanted if each[1].request_id in chosen]
        # A mere try is for those whose KV is nearly there; it is not worth computing a prompt for.
        active = self._first_pass(drafts, self._catch_up_budget(choice.sequences), is_try=choice.is_try)
        self._pacer.begin(_SOURCE, (draft.sequence for draft in active))
        while active:
            active = [draft for draft in active if len(draft.token_ids) < draft.limit]
            if not active or not self._pacer.is_worth_a_pass(
                _SOURCE,
                [(draft.sequence, draft.reach) for draft in active],
                sum(len(draft.token_ids) for draft in active),
            ):
                break
            active = self._next_pass(active)
        for draft in drafts:
            if draft.token_ids:
                proposals[draft.index] = draft.proposal()
        return proposals

    def forget(self, request_id: RequestId) -> None:
        """See `Drafter.forget`."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self.pool.free(state.block_table)

    # --- passes ---------------------------------------------------------------------------------------------------

    def _catch_up_budget(self, sequences: SequenceOf[Sequence]) -> int:
        """Return how many tokens take about as long as the step itself, so that it takes twice as long at most."""
        if not self._row_seconds:
            return MIN_CATCH_UP_TOKENS
        load = StepLoad(len(sequences), sum(sequence.num_tokens for sequence in sequences))
        count = int(self._pacer.cost.seconds(load) / statistics.median(self._row_seconds))
        return min(max(count, MIN_CATCH_UP_TOKENS), MAX_CATCH_UP_TOKENS)

    def _first_pass(self, drafts: SequenceOf[_Draft], budget: int, *, is_try: bool) -> list[_Draft]:
        """Compute what is missing of each sequence within the budget; draft one token where nothing is left."""
        parts: list[SequenceRows] = []
        ready: list[_Draft] = []
        longest = 0
        # Those that are nearly there first: they draft in this step.
        for draft in sorted(drafts, key=lambda draft: draft.sequence.num_tokens - len(draft.state.computed)):
            start, end = len(draft.state.computed), draft.sequence.num_tokens
            count = end - start if end - start <= MAX_LAG else min(end - start, budget)
            is_ready = start + count == end
            if count <= 0 or (is_try and not is_ready) or not self._grow(draft.state, start + count, drafts):
                continue
            token_ids = draft.sequence.token_ids[start : start + count]
            parts.append(SequenceRows(token_ids, start, draft.state.block_table, int(is_ready)))
            draft.state.computed += token_ids
            budget = max(budget - count, 0)
            longest = max(longest, count)
            if is_ready:
                ready.append(draft)
        if parts:
            self._draw(ready, self._run(parts, is_first=True, is_catch_up=longest > MAX_LAG))
        return ready

    def _next_pass(self, drafts: SequenceOf[_Draft]) -> list[_Draft]:
        """Draft one token more for each; returns those for which there was room."""
        parts: list[SequenceRows] = []
        active: list[_Draft] = []
        for draft in drafts:
            state = draft.state
            start = len(state.computed)
            if not self._grow(state, start + 1, drafts):
                continue
            parts.append(SequenceRows(draft.token_ids[-1:], start, state.block_table, 1))
            state.computed.append(draft.token_ids[-1])
            active.append(draft)
        if parts:
            self._draw(active, self._run(parts))
        return active

    def _run(
        self, parts: SequenceOf[SequenceRows], *, is_first: bool = False, is_catch_up: bool = False
    ) -> NDArray[np.float32]:
        started = time.perf_counter()
        logits = self._model.forward(build_batch(parts, self._block_size), self._kv_cache)
        rows: NDArray[np.float32] = logits.detach().to(torch.float32).cpu().numpy()
        seconds = time.perf_counter() - started
        if is_catch_up:
            self._row_seconds.append(seconds / sum(len(part.token_ids) for part in parts))
        else:
            self._pacer.observe_pass(seconds, is_first=is_first)
        return rows

    def _draw(self, drafts: SequenceOf[_Draft], rows: NDArray[np.float32]) -> None:
        """Add to each draft the token that the target would draw from its row."""
        items = [VerifyItem(row, (), self._request(draft)) for row, draft in enumerate(drafts)]
        drawn = target_tokens(rows, items, self._rows)
        queries = [
            LogprobQuery(row, token_id, 0) for row, token_id in zip(rows, drawn, strict=True) if token_id is not None
        ]
        logprobs = iter(self._rows.logprobs(queries))
        for draft, token_id in zip(drafts, drawn, strict=True):
            if token_id is None:
                draft.limit = 0  # nothing may follow these drafts; whether they come true is the verifier's matter
                continue
            evidence = evidence_of_probability(_SOURCE, math.exp(next(logprobs).sampled.logprob))
            draft.add(token_id, evidence, self._pacer.acceptance)

    def _request(self, draft: _Draft) -> SampleRequest:
        params = draft.sequence.sampling_params
        return SampleRequest(params, draft.history(), params.all_stop_ids(self._eos_token_ids))

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _fitting(self, sequence: Sequence, limit: int) -> int:
        """Cut a limit to the context that the model has."""
        return min(limit, self._model.config.max_position - sequence.num_tokens)

    def _open(self, index: int, sequence: Sequence, limit: int) -> _Draft:
        """Return a new draft on the sequence's state, rolled back to what still holds."""
        state = self._states.pop(sequence.request_id, None) or _State()
        self._states[sequence.request_id] = state
        tokens, computed = sequence.token_ids, state.computed
        agreed = state.num_agreed
        most = min(len(computed), len(tokens) - 1)  # the last token's logits are wanted anew
        while agreed < most and computed[agreed] == tokens[agreed]:
            agreed += 1
        del computed[agreed:]
        state.num_agreed = agreed
        return _Draft(index, sequence, limit, state=state)

    def _grow(self, state: _State, num_tokens: int, drafts: SequenceOf[_Draft]) -> bool:
        """Give a state blocks up to `num_tokens`, taking those of sequences that have not been drafted for longest."""
        missing = self._kv_cache.layout.num_blocks(num_tokens) - len(state.block_table)
        if missing <= 0:
            return True
        in_use = {draft.sequence.request_id for draft in drafts}
        while (fresh := self.pool.allocate(missing)) is None:
            victim = next((request_id for request_id in self._states if request_id not in in_use), None)
            if victim is None:
                return False
            self.forget(victim)
        state.block_table += fresh
        return True
