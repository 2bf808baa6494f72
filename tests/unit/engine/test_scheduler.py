"""The scheduler: budgets, chunking, admission, preemption, verdicts. Tokens come from a function of the position."""

from typing import Any

import pytest

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.plan import SampledTokens, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.types import EngineRequest, RequestId, SamplingParams, SequenceOutput
from kvrelay.errors import CapacityError, ContextTooLong
from kvrelay.values import FinishReason

BLOCK = 8
EOS = 2


def _scheduler(num_blocks: int = 32, max_position: Any = 512, **config: Any) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK)
    # As many sequences as a small budget allows.
    config = {"max_num_seqs": min(64, config.get("max_num_batched_tokens", 64))} | config
    return Scheduler(SchedulerConfig(**config), pool, max_position=max_position, eos_token_ids=frozenset({EOS}))


def _sequence(
    request_id: int,
    num_tokens: int,
    *,
    priority: int = 0,
    base: int | None = None,
    is_handoff: bool = False,
    is_suspect: bool = False,
    **params: Any,
) -> Sequence:
    base = 1000 * request_id if base is None else base
    tokens = tuple(range(base + 10, base + 10 + num_tokens))
    request = EngineRequest(
        RequestId(request_id),
        tokens,
        SamplingParams(**{"max_tokens": 8} | params),
        num_tokens,
        priority=priority,
        is_suspect=is_suspect,
    )
    return Sequence(request, is_handoff=is_handoff)


def _get(scheduler: Scheduler, request_id: int) -> Sequence:
    sequence = scheduler.get(RequestId(request_id))
    assert sequence is not None
    return sequence


def _step(scheduler: Scheduler, token: Any = lambda sequence: 50 + sequence.num_tokens) -> Any:
    plan = scheduler.plan(now_ns=1)
    result = StepResult(
        tuple(SampledTokens(c.sequence.request_id, (token(c.sequence),)) for c in plan.chunks if c.samples)
    )
    outputs = scheduler.apply(plan, result, now_ns=2)
    scheduler.check_invariants()
    return plan, outputs


def _run(scheduler: Scheduler, **kwargs: Any) -> Any:
    outputs = []
    while scheduler.has_work:
        outputs += _step(scheduler, **kwargs)[1]
    return outputs


def test_prompt_is_chunked_to_the_budget_and_sampled_once() -> None:
    scheduler = _scheduler(max_num_batched_tokens=20)
    scheduler.add(_sequence(1, 50))
    sizes = []
    outputs: list[SequenceOutput] = []
    for _ in range(3):
        plan, outputs = _step(scheduler)
        sizes.append([(c.start, c.end, c.samples) for c in plan.chunks])
    assert sizes == [[(0, 20, False)], [(20, 40, False)], [(40, 50, True)]]
    assert [o.token_index for o in outputs] == [0]


def test_decodes_come_before_prefill_chunks_and_share_the_budget() -> None:
    scheduler = _scheduler(max_num_batched_tokens=16)
    scheduler.add(_sequence(1, 4))
    _step(scheduler)
    scheduler.add(_sequence(2, 100))
    plan, _ = _step(scheduler)
    assert [(c.sequence.request_id, c.num_tokens) for c in plan.chunks] == [(1, 1), (2, 15)]


def test_running_decodes_advance_in_every_step_of_a_long_prefill() -> None:
    scheduler = _scheduler(num_blocks=64, max_num_batched_tokens=16)
    scheduler.add(_sequence(1, 4, max_tokens=100))
    _step(scheduler)
    scheduler.add(_sequence(2, 200))
    for _ in range(10):
        _, outputs = _step(scheduler)
        assert [o.request_id for o in outputs] == [1]


def test_max_tokens_ends_with_length_and_frees_everything() -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(1, 5, max_tokens=3))
    outputs = _run(scheduler)
    assert [o.token_index for o in outputs] == [0, 1, 2]
    assert [o.finish_reason for o in outputs] == [None, None, FinishReason.LENGTH]
    assert scheduler._pool.num_free_blocks == 32


@pytest.mark.parametrize(
    ("params", "num_outputs", "reason", "matched"),
    [
        ({}, 1, FinishReason.STOP, EOS),
        ({"ignore_eos": True}, 8, FinishReason.LENGTH, None),
        ({"min_tokens": 3}, 4, FinishReason.STOP, EOS),
        ({"ignore_eos": True, "stop_token_ids": frozenset({EOS})}, 1, FinishReason.STOP, EOS),
        ({"max_tokens": 1}, 1, FinishReason.STOP, EOS),
    ],
)
def test_stop_tokens(params: dict[str, Any], num_outputs: Any, reason: Any, matched: Any) -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(1, 5, **params))
    outputs = _run(scheduler, token=lambda sequence: EOS)
    assert len(outputs) == num_outputs
    assert (outputs[-1].finish_reason, outputs[-1].matched_stop_token_id) == (reason, matched)


def test_what_can_never_fit_is_refused_at_once() -> None:
    scheduler = _scheduler(num_blocks=4, max_position=64)
    with pytest.raises(ContextTooLong, match="KV cache holds 32"):
        scheduler.add(_sequence(1, 30, max_tokens=3))
    with pytest.raises(ContextTooLong, match="context holds 64"):
        scheduler.add(_sequence(1, 60, max_tokens=5))
    assert not scheduler.has_work


def test_handoff_needs_room_for_its_prompt_only() -> None:
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(_sequence(1, 30, max_tokens=100, is_handoff=True))
    assert scheduler.num_waiting == 1


def test_too_many_waiting_requests_are_shed() -> None:
    scheduler = _scheduler(max_waiting=2)
    scheduler.add(_sequence(1, 4))
    scheduler.add(_sequence(2, 4))
    with pytest.raises(CapacityError):
        scheduler.add(_sequence(3, 4))


def test_waiting_line_is_ordered_by_priority_then_arrival() -> None:
    scheduler = _scheduler(max_num_seqs=1)
    for request_id, priority in ((1, 5), (2, 0), (3, 5), (4, -1)):
        scheduler.add(_sequence(request_id, 4, priority=priority, max_tokens=1))
    assert [o.request_id for o in _run(scheduler)] == [4, 2, 1, 3]


def test_second_request_reuses_the_first_ones_blocks() -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(1, 40, base=0, max_tokens=1))
    _run(scheduler)
    scheduler.add(_sequence(2, 40, base=0, max_tokens=1))
    plan, outputs = _step(scheduler)
    assert [(c.start, c.end) for c in plan.chunks] == [(32, 40)]
    assert outputs[0].num_cached_tokens == 32
    assert (scheduler.num_cache_hit_tokens, scheduler.num_cache_query_tokens) == (32, 80)


def test_blocks_are_published_as_soon_as_they_are_complete() -> None:
    scheduler = _scheduler(max_num_batched_tokens=20)
    scheduler.add(_sequence(1, 40, base=0))
    _step(scheduler)
    assert scheduler._pool.num_cached_blocks == 2


def test_least_computed_sequence_is_preempted_and_recomputes_all_it_had() -> None:
    scheduler = _scheduler(num_blocks=6)
    scheduler.add(_sequence(1, 20, max_tokens=20))
    scheduler.add(_sequence(2, 14, max_tokens=20))
    tokens: dict[int, list[int]] = {1: [], 2: []}
    while scheduler.has_work:
        for output in _step(scheduler)[1]:
            tokens[output.request_id] += output.token_ids
    assert scheduler.num_preemptions >= 1
    assert tokens[1] == list(range(70, 90))
    assert tokens[2] == list(range(64, 84))


def test_urgent_sequence_is_preempted_last() -> None:
    scheduler = _scheduler(num_blocks=4)
    scheduler.add(_sequence(1, 15, priority=5, max_tokens=16))
    scheduler.add(_sequence(2, 14, priority=-5, max_tokens=16))
    _step(scheduler)
    while scheduler.num_preemptions == 0:
        _step(scheduler)
    assert _get(scheduler, 1).status is SequenceStatus.WAITING
    assert _get(scheduler, 2).status is SequenceStatus.RUNNING


def test_reservation_holds_blocks_for_prompt_and_first_step() -> None:
    scheduler = _scheduler()
    sequence = _sequence(1, 16)
    assert scheduler.reserve(sequence)
    assert len(sequence.block_table) == 3
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_reservation_without_room_is_not_now() -> None:
    scheduler = _scheduler(num_blocks=4)
    assert scheduler.reserve(_sequence(1, 16))
    assert not scheduler.reserve(_sequence(2, 16))
    scheduler.remove(RequestId(1))
    assert scheduler.reserve(_sequence(2, 16))


def test_reservations_count_towards_the_sequence_limit() -> None:
    scheduler = _scheduler(max_num_seqs=2)
    assert scheduler.reserve(_sequence(1, 4))
    assert scheduler.reserve(_sequence(2, 4))
    assert not scheduler.reserve(_sequence(3, 4))


def test_committed_sequence_goes_on_as_if_it_had_been_prefilled_here() -> None:
    local, remote = _scheduler(), _scheduler()
    local.add(_sequence(1, 20))
    expected = _run(local)
    sequence = _sequence(1, 20)
    remote.reserve(sequence)
    first = remote.activate(sequence, 70, now_ns=3)
    assert (first.token_index, first.token_ids) == (0, (70,))
    assert [o.token_ids for o in [first, *_run(remote)]] == [o.token_ids for o in expected]
    assert remote._pool.num_free_blocks == 32


def test_committed_sequence_that_ended_on_its_first_token_frees_its_blocks() -> None:
    scheduler = _scheduler()
    sequence = _sequence(1, 20, max_tokens=1)
    scheduler.reserve(sequence)
    assert scheduler.activate(sequence, 70, now_ns=3).finish_reason is FinishReason.LENGTH
    assert scheduler._pool.num_free_blocks == 32


def test_reserved_sequence_can_be_prefilled_here_in_its_own_blocks() -> None:
    scheduler = _scheduler()
    sequence = _sequence(1, 20)
    scheduler.reserve(sequence)
    blocks = list(sequence.block_table)
    scheduler.queue_reserved(sequence)
    plan, _ = _step(scheduler)
    assert plan.chunks[0].num_tokens == 20
    assert sequence.block_table == blocks


def test_handoff_keeps_its_blocks_after_its_token_until_removed() -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(1, 20, is_handoff=True))
    outputs = _run(scheduler)
    assert [o.finish_reason for o in outputs] == [None]
    assert scheduler.num_parked == 1
    assert scheduler._pool.num_free_blocks == 29
    scheduler.remove(RequestId(1))
    assert scheduler._pool.num_free_blocks == 32


@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding", "reserved", "held"])
def test_removal_at_any_phase_frees_everything(phase: Any) -> None:
    scheduler = _scheduler(max_num_batched_tokens=8)
    sequence = _sequence(1, 20, is_handoff=phase == "held")
    if phase == "reserved":
        scheduler.reserve(sequence)
    else:
        scheduler.add(sequence)
    for _ in range({"waiting": 0, "prefilling": 1, "decoding": 4, "reserved": 0, "held": 3}[phase]):
        _step(scheduler)
    assert scheduler.remove(RequestId(1)) is sequence
    assert scheduler.remove(RequestId(1)) is None
    assert scheduler._pool.num_free_blocks == 32
    assert not scheduler.has_work
    scheduler.check_invariants()


def test_resumed_request_counts_on_from_what_was_generated_before() -> None:
    scheduler = _scheduler()
    tokens = tuple(range(10, 30))
    request = EngineRequest(RequestId(1), tokens, SamplingParams(max_tokens=8), num_prompt_tokens=15)
    scheduler.add(Sequence(request))
    outputs = _run(scheduler)
    assert [o.token_index for o in outputs] == [5, 6, 7]
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_timing_comes_with_the_first_token_only() -> None:
    scheduler = _scheduler()
    scheduler.add(_sequence(1, 20, max_tokens=2))
    outputs = _run(scheduler)
    assert outputs[0].prefill_timing is not None
    assert outputs[0].prefill_timing.prefill_ns == 1
    assert outputs[1].prefill_timing is None


def test_suspects_take_their_first_sampled_step_alone_one_after_the_other() -> None:
    """Nobody is beside a sequence on trial; who was planned beside it comes in the steps behind."""
    scheduler = _scheduler(max_num_batched_tokens=32)
    scheduler.add(_sequence(1, 5, max_tokens=30))
    _step(scheduler)
    for request_id in (2, 3):
        scheduler.add(_sequence(request_id, 40, max_tokens=30, is_suspect=True))
    steps = [[(chunk.sequence.request_id, chunk.samples) for chunk in _step(scheduler)[0].chunks] for _ in range(8)]
    for request_id in (2, 3):
        assert next(step for step in steps if (request_id, True) in step) == [(request_id, True)]
    # What does not sample is computed beside others, and who has passed its trial is as good as any.
    assert steps[0] == [(1, True), (2, False)]
    assert steps[-1] == [(1, True), (2, True), (3, True)]


def test_suspects_are_never_together_while_one_is_on_trial() -> None:
    """A prompt's chunk may break a step too: beside it stand only those that nobody suspects."""
    scheduler = _scheduler(max_num_batched_tokens=32)
    scheduler.add(_sequence(1, 5, max_tokens=30))
    scheduler.add(_sequence(2, 5, max_tokens=30, is_suspect=True))
    for _ in range(3):
        _step(scheduler)
    scheduler.add(_sequence(3, 100, max_tokens=30, is_suspect=True))
    scheduler.add(_sequence(4, 100, max_tokens=30, is_suspect=True))
    steps = [{chunk.sequence.request_id for chunk in _step(scheduler)[0].chunks} for _ in range(16)]
    trials = [step for step in steps if len(step & {3, 4}) and not step >= {2, 3, 4}]
    assert {1, 3} in trials
    assert {1, 4} in trials
    assert all(len(step & {2, 3, 4}) == 1 for step in trials[: trials.index({4}) + 1])
    # Both have passed: nobody is held back any more.
    assert {1, 2, 3, 4} in steps
