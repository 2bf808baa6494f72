"""Admission: limits, order of the queue, shedding, and that slots always come back."""

import asyncio

import pytest

from gateway.routing.admission import Admission
from kvrelay.errors import CapacityError, DeadlineExceeded
from tests.unit.gateway.builders import ManualClock


def make(clock: ManualClock, max_running: int = 2, max_queued: int = 2, queue_timeout_s: float = 30.0) -> Admission:
    return Admission(max_running=max_running, max_queued=max_queued, queue_timeout_s=queue_timeout_s, clock=clock)


class Holder:
    """Requests that stay inside until told to leave; notes the order in which they came in."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.inside: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}

    async def start(
        self, name: str, *, weight: int = 1, priority: int = 0, deadline: float | None = None
    ) -> "asyncio.Task[None]":
        leave = self.leave[name] = asyncio.Event()

        async def hold() -> None:
            async with self.admission.admit(weight=weight, priority=priority, deadline=deadline):
                self.inside.append(name)
                await leave.wait()

        task = asyncio.get_running_loop().create_task(hold())
        await settle()
        return task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_limit_is_kept_and_waiters_follow_as_slots_come_back() -> None:
    admission = make(ManualClock())
    holder = Holder(admission)
    tasks = [await holder.start(name) for name in "abc"]
    assert holder.inside == ["a", "b"]
    assert (admission.num_running, admission.num_running_slots, admission.num_queued) == (2, 2, 1)
    holder.leave["a"].set()
    await settle()
    assert holder.inside == ["a", "b", "c"]
    for leave in holder.leave.values():
        leave.set()
    await asyncio.gather(*tasks)
    assert (admission.num_running, admission.num_running_slots, admission.num_queued) == (0, 0, 0)


async def test_queue_is_ordered_by_priority_then_deadline_then_arrival() -> None:
    clock = ManualClock()
    holder = Holder(make(clock, max_running=1, max_queued=10))
    tasks = [await holder.start("running")]
    tasks.append(await holder.start("late"))
    tasks.append(await holder.start("no hurry", deadline=clock.now() + 60))
    tasks.append(await holder.start("urgent", deadline=clock.now() + 10))
    tasks.append(await holder.start("important", priority=-1))
    tasks.append(await holder.start("unimportant", priority=1, deadline=clock.now() + 5))
    for leave in holder.leave.values():
        leave.set()
    await asyncio.gather(*tasks)
    assert holder.inside == ["running", "important", "urgent", "no hurry", "late", "unimportant"]


async def test_full_queue_sheds_the_newcomer_with_a_time_to_retry() -> None:
    admission = make(ManualClock(), max_running=1, max_queued=1)
    holder = Holder(admission)
    tasks = [await holder.start("running"), await holder.start("queued")]
    with pytest.raises(CapacityError) as caught:
        await (await holder.start("too many"))
    assert caught.value.retry_after_s > 0
    with pytest.raises(CapacityError):
        admission.check_room()
    for leave in holder.leave.values():
        leave.set()
    await asyncio.gather(*tasks)


async def test_full_queue_sheds_the_least_important() -> None:
    admission = make(ManualClock(), max_running=1, max_queued=1)
    holder = Holder(admission)
    running, queued = await holder.start("running"), await holder.start("queued")
    admission.check_room(priority=-1)
    important = await holder.start("important", priority=-1)
    with pytest.raises(CapacityError):
        await queued
    holder.leave["running"].set()
    holder.leave["important"].set()
    await asyncio.gather(running, important)
    assert holder.inside == ["running", "important"]


async def test_no_queue_means_run_or_refuse() -> None:
    admission = make(ManualClock(), max_running=1, max_queued=0)
    holder = Holder(admission)
    running = await holder.start("running")
    with pytest.raises(CapacityError):
        await (await holder.start("second"))
    holder.leave["running"].set()
    await running


async def test_deadline_that_has_passed_is_refused_at_once() -> None:
    clock = ManualClock()
    with pytest.raises(DeadlineExceeded):
        async with make(clock).admit(deadline=clock.now() - 1):
            pass


async def test_deadline_ends_the_wait() -> None:
    clock = ManualClock()
    admission = make(clock, max_running=1)
    holder = Holder(admission)
    running = await holder.start("running")
    with pytest.raises(DeadlineExceeded):
        await (await holder.start("waiting", deadline=clock.now() + 0.02))
    assert admission.num_queued == 0
    holder.leave["running"].set()
    await running


async def test_queue_timeout_ends_the_wait() -> None:
    admission = make(ManualClock(), max_running=1, queue_timeout_s=0.02)
    holder = Holder(admission)
    running = await holder.start("running")
    with pytest.raises(CapacityError):
        await (await holder.start("waiting"))
    holder.leave["running"].set()
    await running


async def test_cancelled_waiter_leaves_no_trace() -> None:
    admission = make(ManualClock(), max_running=1)
    holder = Holder(admission)
    running, waiting = await holder.start("running"), await holder.start("waiting")
    waiting.cancel()
    await settle()
    assert admission.num_queued == 0
    holder.leave["running"].set()
    await running
    assert admission.num_running_slots == 0


async def test_waiter_cancelled_in_the_moment_of_its_grant_gives_the_slot_back() -> None:
    admission = make(ManualClock(), max_running=1)
    holder = Holder(admission)
    running, waiting = await holder.start("running"), await holder.start("waiting")
    holder.leave["running"].set()
    while not running.done():  # noqa: ASYNC110 - one turn of the loop at a time
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert (admission.num_running_slots, admission.num_queued) == (0, 0)


async def test_heavy_request_at_the_head_is_not_overtaken_for_ever() -> None:
    admission = make(ManualClock(), max_running=4, max_queued=10)
    holder = Holder(admission)
    tasks = [await holder.start("a", weight=2), await holder.start("heavy", weight=4), await holder.start("light")]
    assert holder.inside == ["a"]
    holder.leave["a"].set()
    await settle()
    assert holder.inside == ["a", "heavy"]
    for leave in holder.leave.values():
        leave.set()
    await asyncio.gather(*tasks)


async def test_request_heavier_than_the_limit_runs_alone() -> None:
    admission = make(ManualClock(), max_running=4)
    async with admission.admit(weight=16):
        assert admission.num_running_slots == 4
    assert admission.num_running_slots == 0
