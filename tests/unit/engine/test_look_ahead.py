"""Blocks for drafting ahead of a step: given while nobody misses them, never at another's cost."""

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.plan import SampledTokens, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import EngineRequest, RequestId, SamplingParams

BLOCK = 8


def _scheduler(num_blocks: int, *sequences: Sequence) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK)
    scheduler = Scheduler(SchedulerConfig(), pool, max_position=64, eos_token_ids=frozenset())
    for sequence in sequences:
        scheduler.add(sequence)
    plan = scheduler.plan(0)
    scheduler.apply(plan, StepResult(tuple(SampledTokens(chunk.sequence.request_id, (3,)) for chunk in plan.chunks)), 0)
    return scheduler


def _sequence(request_id: int, num_tokens: int, max_tokens: int = 40) -> Sequence:
    tokens = tuple(range(100 * request_id, 100 * request_id + num_tokens))
    return Sequence(EngineRequest(RequestId(request_id), tokens, SamplingParams(max_tokens=max_tokens), num_tokens))


def test_drafts_get_their_blocks() -> None:
    sequence = _sequence(1, 6)
    scheduler = _scheduler(8, sequence)
    scheduler.look_ahead(1)
    assert len(sequence.block_table) == 1  # 7 tokens and a draft
    scheduler.look_ahead(10)
    assert len(sequence.block_table) == 3
    scheduler.look_ahead(10)
    assert len(sequence.block_table) == 3
    scheduler.check_invariants()


def test_no_more_than_the_request_can_use() -> None:
    sequence = _sequence(1, 6, max_tokens=4)
    scheduler = _scheduler(8, sequence)
    scheduler.look_ahead(30)
    assert len(sequence.block_table) == 2  # 7 tokens, at most 2 drafts that count


def test_no_more_than_the_context_holds() -> None:
    sequence = _sequence(1, 60, max_tokens=4)
    scheduler = _scheduler(32, sequence)
    scheduler.look_ahead(30)
    assert len(sequence.block_table) == 8


def test_each_running_sequence_is_left_a_free_block() -> None:
    first, second = _sequence(1, 6, max_tokens=20), _sequence(2, 6, max_tokens=20)
    scheduler = _scheduler(4, first, second)
    scheduler.look_ahead(8)
    assert (len(first.block_table), len(second.block_table)) == (1, 1)
    assert scheduler.num_preemptions == 0
    scheduler.remove(RequestId(2))
    scheduler.look_ahead(8)
    assert len(first.block_table) == 2
    scheduler.check_invariants()
