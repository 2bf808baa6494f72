"""One step's decisions: who runs, how many tokens of each, whose blocks are taken back.

Decodes go first, then prefill chunks share what is left of the token budget, so that a long prompt never stalls a
running stream; drafts take what then remains. When blocks run out a sequence is preempted. Who goes first and who gives
way: `order.py`; blocks for drafts: `draft_room.py`. Torch-free; lives on the engine's thread.
"""

import bisect
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.draft_room import DraftRoom
from engine.scheduler.limits import check_fits
from engine.scheduler.order import goes_first, victim_of
from engine.scheduler.plan import SampledTokens, ScheduledChunk, StepPlan, StepResult
from engine.scheduler.trial import without_suspects_together
from engine.sequence import Sequence, SequenceStatus
from engine.types import BlockId, PrefillTiming, RequestId, SequenceOutput
from kvrelay.errors import CapacityError, EngineError
from kvrelay.values import FinishReason


class Scheduler:
    """Holds every sequence of one engine.

    Invariants:
        - A sequence is in exactly one of `_waiting`, `_running`, `_parked` (reserved or held), or gone.
        - Every block of the pool is free or in the tables of sequences held here; nobody else allocates.
        - A running sequence's block table covers its computed tokens.
        - Sequences with a seat (running, reserved, waiting with blocks) are at most `max_num_seqs`, so that each of
          them can have a token in every step.
    """

    def __init__(
        self, config: SchedulerConfig, pool: BlockPool, *, max_position: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._config = config
        self._pool = pool
        self._draft_room = DraftRoom(pool, max_position)
        self._max_position = max_position
        self._eos_token_ids = eos_token_ids
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._parked: dict[RequestId, Sequence] = {}
        self._by_id: dict[RequestId, Sequence] = {}
        self._num_arrivals = 0
        self.num_preemptions = 0
        """Preemptions since start."""
        self.num_cache_query_tokens = 0
        """Tokens looked up in the prefix cache since start."""
        self.num_cache_hit_tokens = 0
        """Tokens found in the prefix cache since start."""

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences waiting for their first step."""
        return len(self._waiting)

    @property
    def num_parked(self) -> int:
        """Sequences reserved or held for a hand-off."""
        return len(self._parked)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that waiting and running sequences still have to prefill."""
        return sum(s.num_uncomputed_tokens for s in self._waiting) + sum(
            s.num_uncomputed_tokens - 1 for s in self._running
        )

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return bool(self._waiting or self._running)

    def get(self, request_id: RequestId) -> Sequence | None:
        """Return a sequence held here, or None."""
        return self._by_id.get(request_id)

    # --- arrivals -------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence for its first step.

        Raises:
            ContextTooLong: It can never fit.
            CapacityError: Too many are waiting.
        """
        check_fits(sequence, self._pool, self._max_position)
        if len(self._waiting) >= self._config.max_waiting:
            raise CapacityError(f"{len(self._waiting)} requests are waiting already")
        self._register(sequence)
        self._enqueue(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Grant blocks for the prompt and the first step, or return False for "not now".

        The sequence is parked until `activate`, `queue_reserved` or `remove`. Refused while somebody at least as urgent
        waits for blocks: reservations would take what a preempted sequence needs as soon as it is free.

        Raises:
            ContextTooLong: It can never fit.
        """
        check_fits(sequence, self._pool, self._max_position)
        if self._num_seats_taken >= self._config.max_num_seqs or not goes_first(self._waiting, sequence):
            return False
        if not self._allocate_first(sequence, sequence.num_tokens + 1):
            return False
        self._register(sequence)
        sequence.status = SequenceStatus.RESERVED
        self._parked[sequence.request_id] = sequence
        return True

    def activate(self, sequence: Sequence, first_token_id: int, now_ns: int) -> SequenceOutput:
        """Schedule a reserved sequence whose KV has been imported and verified; returns the first token's verdict.

        The output is what a local prefill would have given; the caller decides whom to tell.
        """
        self._unpark(sequence, SequenceStatus.RESERVED)
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        imported = ScheduledChunk(sequence, 0, sequence.num_tokens, samples=True)
        return self._append(imported, SampledTokens(sequence.request_id, (first_token_id,)), now_ns)

    def queue_reserved(self, sequence: Sequence) -> None:
        """Prefill a reserved sequence here instead of waiting for its hand-off; it keeps its blocks."""
        self._unpark(sequence, SequenceStatus.RESERVED)
        self._enqueue(sequence)

    def remove(self, request_id: RequestId) -> Sequence | None:
        """End a sequence at whatever phase and free its blocks; returns it, or None when it is not here."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._finish(sequence, sequence.finish_reason or FinishReason.ABORT)
        return sequence

    # --- steps ----------------------------------------------------------------------------------------------------

    def decodes(self) -> list[Sequence]:
        """Return the sequences whose next step is a plain decode, those for which drafts may be proposed."""
        return [sequence for sequence in self._running if sequence.num_uncomputed_tokens == 1]

    def look_ahead(self, num_draft_tokens: int) -> None:
        """Give decodes the blocks that drafting so many tokens before the next plan writes into.

        Only as far as nobody misses them; `plan` takes them back before anybody is preempted.
        """
        for sequence in self.decodes():
            self._draft_room.make(sequence, num_draft_tokens, self._num_blocks_missed)

    def plan(self, now_ns: int, drafts: Mapping[RequestId, tuple[int, ...]] | None = None) -> StepPlan:
        """Choose the next step's chunks and allocate their blocks.

        Args:
            now_ns: Monotonic time, for timings.
            drafts: Proposed tokens by sequence; cut to what budget, limits and free blocks allow.
        """
        self._grow_decodes()
        decodes = self.decodes()
        chunks = [ScheduledChunk(sequence, sequence.num_computed_tokens, 1, samples=True) for sequence in decodes]
        budget = self._config.max_num_batched_tokens - len(chunks)
        for sequence in self._running:
            if budget > 0 and sequence.num_uncomputed_tokens > 1:
                budget -= self._add_prefill_chunk(sequence, budget, chunks)
        while budget > 0 and self._waiting:
            sequence = self._waiting[0]
            if not self._admit(sequence):
                break
            if sequence.first_scheduled_ns is None:
                sequence.first_scheduled_ns = now_ns
            budget -= self._add_prefill_chunk(sequence, budget, chunks)
        if drafts:
            num_left = self._num_blocks_missed
            chunks[: len(decodes)] = self._draft_room.fill(chunks[: len(decodes)], drafts, budget, num_left)
        return StepPlan(without_suspects_together(chunks))

    def apply(self, plan: StepPlan, result: StepResult, now_ns: int) -> list[SequenceOutput]:
        """Take over a step's result: advance counts, publish blocks, append tokens, finish sequences."""
        sampled = iter(result.sampled)
        outputs: list[SequenceOutput] = []
        for chunk in plan.chunks:
            if chunk.samples:
                outputs.append(self._append(chunk, next(sampled), now_ns))
                chunk.sequence.is_on_trial = False
            else:
                chunk.sequence.num_computed_tokens = chunk.end
                self._publish_computed(chunk.sequence)
        return outputs

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        groups = [*self._waiting, *self._running, *self._parked.values()]
        if len(groups) != len(self._by_id) or {s.request_id for s in groups} != set(self._by_id):
            raise AssertionError("scheduler: a sequence is in two places or in none")
        for sequence in self._running:
            if len(sequence.block_table) * self._pool.block_size < sequence.num_computed_tokens:
                raise AssertionError(f"scheduler: blocks of request {sequence.request_id} do not cover its KV")
        if self._num_seats_taken > self._config.max_num_seqs:
            raise AssertionError("scheduler: more sequences have a seat than a step may have")
        held = {block_id for sequence in groups for block_id in sequence.block_table}
        if len(held) + self._pool.num_free_blocks != self._pool.num_blocks:
            raise AssertionError("scheduler: free + held is not the pool's size")
        self._pool.check_invariants()

    # --- details --------------------------------------------------------------------------------------------------

    @property
    def _num_seats_taken(self) -> int:
        """Sequences that take part in steps, or will without being asked for blocks again."""
        num_reserved = sum(s.status is SequenceStatus.RESERVED for s in self._parked.values())
        return len(self._running) + num_reserved + sum(bool(s.block_table) for s in self._waiting)

    def _register(self, sequence: Sequence) -> None:
        if sequence.request_id in self._by_id:
            raise ValueError(f"request {sequence.request_id} is here already")
        self._by_id[sequence.request_id] = sequence
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=lambda s: s.order)

    def _unpark(self, sequence: Sequence, expected: SequenceStatus) -> None:
        if sequence.status is not expected:
            raise ValueError(f"request {sequence.request_id} is {sequence.status}, not {expected}")
        del self._parked[sequence.request_id]

    def _admit(self, sequence: Sequence) -> bool:
        """Move the head of the waiting line to the running ones if there is a seat and its blocks are there."""
        if not sequence.block_table:
            has_seat = self._num_seats_taken < self._config.max_num_seqs
            if not has_seat or not self._allocate_first(sequence, sequence.num_tokens):
                return False
        del self._waiting[0]
        sequence.status = SequenceStatus.RUNNING
        self._running.append(sequence)
        return True

    def _allocate_first(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence without blocks its cached prefix and fresh blocks up to `num_tokens`, all or nothing."""
        prefix = self._pool.match_prefix(sequence.token_ids, sequence.request.cache_salt)
        fresh = self._allocate(self._pool.blocks_for(num_tokens) - len(prefix), prefix)
        if fresh is None:
            return False
        sequence.block_table = [*prefix, *fresh]
        num_cached = len(prefix) * self._pool.block_size
        sequence.num_computed_tokens = num_cached
        self._publish_computed(sequence)
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = num_cached
            self.num_cache_query_tokens += sequence.num_tokens
            self.num_cache_hit_tokens += num_cached
        return True

    def _allocate(self, num_blocks: int, prefix: SequenceOf[BlockId] = ()) -> list[BlockId] | None:
        """Like `BlockPool.allocate`, but blocks that others have for drafts only are taken back first."""
        while (fresh := self._pool.allocate(num_blocks, prefix)) is None:
            if not self._draft_room.take_back(self._running):
                return None
        return fresh

    def _add_prefill_chunk(self, sequence: Sequence, budget: int, chunks: list[ScheduledChunk]) -> int:
        """Append the next chunk of a prefilling sequence; returns its tokens. Its blocks were granted at admission."""
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        samples = num_tokens == sequence.num_uncomputed_tokens
        chunks.append(ScheduledChunk(sequence, sequence.num_computed_tokens, num_tokens, samples))
        return num_tokens

    def _grow_decodes(self) -> None:
        """Make room for one more token of every decode, preempting whoever must give way."""
        for sequence in self.decodes():
            # An earlier sequence's growth may have preempted this one, and this one's may preempt an earlier one.
            while sequence.status is SequenceStatus.RUNNING:
                missing = self._pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
                fresh = self._allocate(missing) if missing > 0 else []
                if fresh is not None:
                    sequence.block_table.extend(fresh)
                    break
                self._preempt(victim_of(self._running, sequence))

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._release_blocks(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._enqueue(sequence)

    def _publish_computed(self, sequence: Sequence) -> None:
        """Make every block that is complete by now findable by later requests."""
        block_size = self._pool.block_size
        for index in range(len(sequence.block_hashes), sequence.num_computed_tokens // block_size):
            tokens = sequence.token_ids[index * block_size : (index + 1) * block_size]
            block_hash = self._pool.publish(
                sequence.block_table[index], sequence.last_block_hash, tokens, sequence.request.cache_salt
            )
            sequence.block_hashes.append(block_hash)

    @property
    def _num_blocks_missed(self) -> int:
        """Free blocks that drafts leave to others: one per running sequence for its next token, all if one waits."""
        return self._pool.num_blocks if self._waiting else len(self._running)

    def _append(self, chunk: ScheduledChunk, sampled: SampledTokens, now_ns: int) -> SequenceOutput:
        """Take over the tokens after a chunk up to the one that ends the request, and drop KV of rejected drafts."""
        sequence = chunk.sequence
        if sampled.error is not None:
            return self._fail(sequence, sampled.error)
        first_index = sequence.num_output_tokens
        timing = None
        if sequence.first_scheduled_ns is not None and sequence.num_tokens == len(sequence.request.token_ids):
            started = sequence.first_scheduled_ns
            timing = PrefillTiming(queue_ns=started - sequence.arrived_ns, prefill_ns=now_ns - started)
        reason: FinishReason | None = None
        matched: int | None = None
        num_new = 0
        for token_id in sampled.token_ids:
            sequence.token_ids.append(token_id)
            num_new += 1
            reason, matched = self._verdict(sequence, token_id)
            if reason is not None:
                break
        # The last new token has no KV yet. Slots of rejected drafts are written anew by the steps to come.
        sequence.num_computed_tokens = chunk.end + num_new - 1
        self._publish_computed(sequence)
        output = SequenceOutput(
            request_id=sequence.request_id,
            token_index=first_index,
            token_ids=sampled.token_ids[:num_new],
            logprobs=sampled.logprobs[:num_new],
            finish_reason=reason,
            matched_stop_token_id=matched,
            num_cached_tokens=sequence.num_cached_tokens,
            num_draft_tokens=len(chunk.draft_token_ids),
            num_accepted_tokens=len(sampled.token_ids) - 1,
            prefill_timing=timing,
        )
        if sequence.is_handoff:
            sequence.finish_reason = reason
            self._hold(sequence)
        elif reason is not None:
            self._finish(sequence, reason)
        return output

    def _fail(self, sequence: Sequence, error: EngineError) -> SequenceOutput:
        """End a sequence that got no token; the step's others go on."""
        output = SequenceOutput(sequence.request_id, sequence.num_output_tokens, (), error=error)
        if sequence.is_handoff:
            self._hold(sequence)
        else:
            self._finish(sequence, FinishReason.ABORT)
        return output

    def _hold(self, sequence: Sequence) -> None:
        """Keep a hand-off's blocks for the export, whatever became of its first token; `remove` frees them."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.HELD
        self._parked[sequence.request_id] = sequence

    def _verdict(self, sequence: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = sequence.sampling_params
        is_stop = token_id in params.all_stop_ids(self._eos_token_ids)
        if is_stop and sequence.num_output_tokens > params.min_tokens:
            return FinishReason.STOP, token_id
        if sequence.num_output_tokens >= params.max_tokens or sequence.num_tokens >= self._max_position:
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        match sequence.status:
            case SequenceStatus.WAITING:
                self._waiting.remove(sequence)
            case SequenceStatus.RUNNING:
                self._running.remove(sequence)
            case SequenceStatus.RESERVED | SequenceStatus.HELD:
                del self._parked[sequence.request_id]
            case SequenceStatus.FINISHED:
                raise ValueError(f"request {sequence.request_id} ended already")
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        self._release_blocks(sequence)
        del self._by_id[sequence.request_id]

    def _release_blocks(self, sequence: Sequence) -> None:
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.block_hashes = []
