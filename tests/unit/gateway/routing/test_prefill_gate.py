"""Who passes the gate before the prefill tier, in which order, and that places come back."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.prefill_gate import MIN_PROMPTS, PrefillGate, Turn


def granted(turns: list[Turn]) -> list[bool]:
    return [turn.is_granted for turn in turns]


def test_tier_gets_so_many_tokens_ahead_and_at_least_two_prompts() -> None:
    gate = PrefillGate(100, lambda: 1)
    turns = [gate.enter(num_tokens) for num_tokens in (500, 500, 10, 10)]
    assert granted(turns) == [True, True, False, False]
    turns[0].leave()
    assert granted(turns) == [True, True, True, False]
    turns[1].leave()
    assert granted(turns) == [True, True, True, True]
    assert (gate.num_prompts, gate.num_tokens, gate.num_waiting) == (2, 20, 0)


def test_order_is_priority_then_deadline_then_arrival() -> None:
    gate = PrefillGate(1, lambda: 1)
    running = [gate.enter(1) for _ in range(MIN_PROMPTS)]
    late, soon, urgent = gate.enter(1), gate.enter(1, deadline=5.0), gate.enter(1, priority=-1)
    for turn, expected in zip([*running, urgent], (urgent, soon, late), strict=True):
        turn.leave()
        assert expected.is_granted
    assert gate.num_waiting == 0


def test_resumed_request_does_not_wait_again() -> None:
    gate = PrefillGate(1, lambda: 1)
    for _ in range(MIN_PROMPTS):
        gate.enter(1)
    waiting, resumed = gate.enter(1), gate.enter(1, is_resumed=True)
    assert granted([waiting, resumed]) == [False, True]


def test_without_a_prefill_worker_nobody_waits() -> None:
    workers = 1
    gate = PrefillGate(1, lambda: workers)
    turns = [gate.enter(1) for _ in range(4)]
    assert granted(turns) == [True, True, False, False]
    workers = 0
    gate.let_pass()
    assert granted(turns) == [True] * 4


async def test_leaving_wakes_who_waits_for_that_turn() -> None:
    gate = PrefillGate(1, lambda: 1)
    for _ in range(MIN_PROMPTS):
        gate.enter(1)
    turn = gate.enter(1)
    waiting = asyncio.create_task(turn.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    turn.leave()
    await asyncio.wait_for(waiting, 1)
    assert not turn.is_granted


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.integers(0, 7)), max_size=40), st.integers(0, 3))
def test_places_add_up_and_the_first_in_line_never_waits_in_vain(
    steps: list[tuple[int, bool, int]], num_workers: int
) -> None:
    gate = PrefillGate(200, lambda: num_workers)
    turns: list[Turn] = []
    for num_tokens, leaves, which in steps:
        turns.append(gate.enter(num_tokens))
        if leaves:
            turns[which % len(turns)].leave()
        inside = [turn for turn in turns if turn.is_granted and not turn.is_left]
        waiting = [turn for turn in turns if not turn.is_granted and not turn.is_left]
        assert gate.num_prompts == len(inside)
        assert gate.num_tokens == sum(turn.num_tokens for turn in inside)
        assert gate.num_waiting == len(waiting)
        assert num_workers or not waiting
        if waiting:
            assert len(inside) >= MIN_PROMPTS * num_workers
    for turn in turns:
        turn.leave()
        turn.leave()
    assert (gate.num_prompts, gate.num_tokens, gate.num_waiting) == (0, 0, 0)


@pytest.mark.parametrize("is_granted", [True, False])
def test_turn_is_left_once(is_granted: bool) -> None:
    gate = PrefillGate(1, lambda: 1)
    turns = [gate.enter(5) for _ in range(MIN_PROMPTS if is_granted else MIN_PROMPTS + 1)]
    turns[-1].leave()
    turns[-1].leave()
    assert gate.num_tokens == 5 * (MIN_PROMPTS - is_granted)
