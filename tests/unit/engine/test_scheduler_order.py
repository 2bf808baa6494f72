"""Who goes first and who gives way: reservations behind waiting sequences, seats, victims, blocks held for drafts."""

from typing import Any

import pytest

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.order import victim_of
from engine.scheduler.plan import SampledTokens, StepPlan, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.types import EngineRequest, RequestId, SamplingParams
from kvrelay.errors import InvalidRequest

BLOCK = 8


def _scheduler(num_blocks: int, **config: Any) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK)
    return Scheduler(SchedulerConfig(**config), pool, max_position=512, eos_token_ids=frozenset())


def _sequence(request_id: int, num_tokens: int, *, priority: int = 0, max_tokens: int = 8) -> Sequence:
    tokens = tuple(range(1000 * request_id, 1000 * request_id + num_tokens))
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(EngineRequest(RequestId(request_id), tokens, params, num_tokens, priority=priority))


def _commit(scheduler: Scheduler, sequence: Sequence) -> Sequence:
    assert scheduler.reserve(sequence)
    scheduler.activate(sequence, 7, now_ns=0)
    return sequence


def _step(scheduler: Scheduler, drafts: dict[RequestId, tuple[int, ...]] | None = None) -> StepPlan:
    plan = scheduler.plan(0, drafts)
    scheduler.apply(plan, StepResult(tuple(SampledTokens(c.sequence.request_id, (7,)) for c in plan.chunks)), 0)
    scheduler.check_invariants()
    return plan


def _ids(plan: StepPlan) -> list[int]:
    return [chunk.sequence.request_id for chunk in plan.chunks]


# --- reservations and seats ---------------------------------------------------------------------------------------


def test_a_reservation_does_not_pass_one_that_waits_for_blocks() -> None:
    scheduler = _scheduler(4)
    _commit(scheduler, _sequence(1, 14))
    scheduler.add(_sequence(2, 17))
    _step(scheduler)
    assert scheduler.num_waiting == 1
    assert not scheduler.reserve(_sequence(3, 2))
    assert scheduler.reserve(_sequence(4, 2, priority=-1))
    scheduler.remove(RequestId(2))
    assert scheduler.reserve(_sequence(3, 2))


def test_who_waits_with_blocks_stands_in_no_reservations_way() -> None:
    scheduler = _scheduler(8)
    local = _sequence(1, 20)
    assert scheduler.reserve(local)
    scheduler.queue_reserved(local)
    assert scheduler.reserve(_sequence(2, 2))


def test_every_sequence_that_will_run_takes_a_seat() -> None:
    scheduler = _scheduler(32, max_num_seqs=3)
    _commit(scheduler, _sequence(1, 4))
    local, parked = _sequence(2, 4), _sequence(3, 4)
    assert scheduler.reserve(local)
    scheduler.queue_reserved(local)
    assert scheduler.reserve(parked)
    assert not scheduler.reserve(_sequence(4, 4))
    scheduler.add(_sequence(5, 4))
    assert _ids(_step(scheduler)) == [1, 2]  # the third seat is the parked one's
    scheduler.activate(parked, 7, now_ns=0)
    assert _ids(_step(scheduler)) == [1, 2, 3]
    scheduler.remove(RequestId(1))
    assert _ids(_step(scheduler)) == [2, 3, 5]


def test_more_sequences_than_tokens_in_a_step_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens, 8") as refused:
        SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8)
    assert refused.value.field == "max_num_seqs"
    assert SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8


# --- victims ------------------------------------------------------------------------------------------------------


def test_the_least_computed_of_all_is_preempted_whoever_stands_before_it_in_the_step() -> None:
    scheduler = _scheduler(5)
    small = _commit(scheduler, _sequence(1, 3))
    large = _commit(scheduler, _sequence(2, 31))
    _step(scheduler)
    assert _ids(_step(scheduler)) == [2]
    assert small.status is SequenceStatus.WAITING
    assert large.num_preemptions == 0


def _running(request_id: int, num_computed: int, num_preemptions: int = 0, priority: int = 0) -> Sequence:
    sequence = _sequence(request_id, 50, priority=priority)
    sequence.arrival, sequence.num_computed_tokens = request_id, num_computed
    sequence.num_preemptions = num_preemptions
    return sequence


def test_the_first_of_those_that_came_back_is_not_sent_away_again() -> None:
    returned, later, newcomer = _running(1, 0, 1), _running(2, 5, 1), _running(3, 40)
    assert victim_of([returned, later, newcomer], newcomer) is later
    assert victim_of([returned, newcomer], newcomer) is newcomer
    assert victim_of([returned], returned) is returned  # everybody else is parked
    assert victim_of([_running(1, 0), newcomer], newcomer).arrival == 1


def test_one_that_came_back_still_gives_way_to_more_urgent_ones() -> None:
    returned, urgent = _running(1, 20, 1, priority=5), _running(2, 10)
    assert victim_of([returned, urgent], urgent) is returned


# --- drafts -------------------------------------------------------------------------------------------------------


def test_nobody_is_preempted_for_a_draft_of_the_same_step() -> None:
    scheduler = _scheduler(3)
    first = _commit(scheduler, _sequence(1, 7))
    second = _commit(scheduler, _sequence(2, 7))
    _step(scheduler, {first.request_id: (1, 2, 3)})
    assert scheduler.num_preemptions == 0
    assert second.status is SequenceStatus.RUNNING
    assert scheduler._pool.num_free_blocks == 1


@pytest.mark.parametrize("is_ahead", [True, False])
def test_blocks_for_drafts_are_taken_back_before_anybody_is_preempted(is_ahead: bool) -> None:
    scheduler = _scheduler(4)
    drafting, other = _commit(scheduler, _sequence(1, 3, max_tokens=20)), _sequence(2, 15)
    drafts: dict[RequestId, tuple[int, ...]] = {drafting.request_id: tuple(range(8))}
    if is_ahead:
        scheduler.look_ahead(8)
    else:
        _step(scheduler, drafts)
    assert len(drafting.block_table) == 2
    _commit(scheduler, other)  # takes the last two
    _step(scheduler, drafts)
    plan = _step(scheduler, drafts)  # needs a third
    assert [len(chunk.sequence.block_table) for chunk in plan.chunks] == [1, 3]
    assert scheduler.num_preemptions == 0


def test_no_block_is_given_for_drafts_while_somebody_waits() -> None:
    scheduler = _scheduler(6)
    drafting = _commit(scheduler, _sequence(1, 6))
    scheduler.add(_sequence(2, 44, max_tokens=2))  # six blocks, five are free
    scheduler.look_ahead(8)
    plan = _step(scheduler, {drafting.request_id: tuple(range(8))})
    assert [chunk.draft_token_ids for chunk in plan.chunks] == [(0,)]
    assert len(drafting.block_table) == 1


def test_drafts_take_what_prefill_leaves_of_the_budget() -> None:
    scheduler = _scheduler(32, max_num_seqs=4, max_num_batched_tokens=16)
    drafting = _commit(scheduler, _sequence(1, 4, max_tokens=30))
    scheduler.add(_sequence(2, 22))
    drafts = {drafting.request_id: tuple(range(10))}
    sizes = [[(c.num_tokens, len(c.draft_token_ids)) for c in scheduler.plan(0, drafts).chunks]]
    scheduler = _scheduler(32, max_num_seqs=4, max_num_batched_tokens=16)
    drafting = _commit(scheduler, _sequence(1, 4, max_tokens=30))
    scheduler.add(_sequence(2, 12))
    sizes.append([(c.num_tokens, len(c.draft_token_ids)) for c in scheduler.plan(0, drafts).chunks])
    assert sizes == [[(1, 0), (15, 0)], [(1, 3), (12, 0)]]
