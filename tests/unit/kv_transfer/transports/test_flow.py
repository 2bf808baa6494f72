"""Flow control shared by the transports: budgets, queues, buffers, and giving the loop back."""

import asyncio

import pytest

from kv_transfer.frame import Frame, FrameKind, seal
from kv_transfer.transports import flow
from kv_transfer.transports.flow import POOL_GRAIN_BYTES, BufferPool, ByteBudget, FrameQueue, LoopYield
from kv_transfer.transports.port import ConnectionClosed

pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_a_budget_lets_waiters_in_in_their_order() -> None:
    budget = ByteBudget(10)
    await budget.acquire(8)
    order: list[str] = []

    async def take(name: str, num_bytes: int) -> None:
        await budget.acquire(num_bytes)
        order.append(name)

    tasks = [asyncio.ensure_future(take("large", 9)), asyncio.ensure_future(take("small", 1))]
    await asyncio.sleep(0)
    assert not budget.acquire_now(1)  # there is room, but others were first
    budget.release(8)
    await asyncio.gather(*tasks)
    assert order == ["large", "small"]
    assert budget.used == 10


async def test_a_demand_over_the_limit_passes_when_nothing_else_is_under_way() -> None:
    budget = ByteBudget(10)
    await budget.acquire(1)
    waiting = asyncio.ensure_future(budget.acquire(50))
    await asyncio.sleep(0)
    assert not waiting.done()
    budget.release(1)
    await waiting
    assert not budget.acquire_now(1)


async def test_a_cancelled_waiter_takes_nothing() -> None:
    budget = ByteBudget(10)
    await budget.acquire(6)
    large = asyncio.ensure_future(budget.acquire(10))
    small = asyncio.ensure_future(budget.acquire(4))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.gather(large, return_exceptions=True)
    await asyncio.wait_for(small, 1)
    granted = asyncio.ensure_future(budget.acquire(3))
    await asyncio.sleep(0)
    budget.release(6)
    granted.cancel()  # granted and cancelled in the same turn of the loop
    await asyncio.gather(granted, return_exceptions=True)
    assert budget.used == 4


async def test_closing_a_budget_wakes_everybody() -> None:
    budget = ByteBudget(1)
    await budget.acquire(1)
    waiting = asyncio.ensure_future(budget.acquire(1))
    await asyncio.sleep(0)
    budget.close(ConnectionClosed("over"))
    budget.close(ConnectionClosed("again"))
    with pytest.raises(ConnectionClosed, match="over"):
        await waiting
    with pytest.raises(ConnectionClosed, match="over"):
        budget.acquire_now(1)
    budget.release(1)


def a_frame(released: list[int], number: int = 0) -> Frame:
    frame = seal(FrameKind.CREDIT)
    return Frame(frame.header, frame.payload, on_release=lambda: released.append(number))


async def test_a_queue_hands_out_what_is_left_before_its_end() -> None:
    released: list[int] = []
    queue = FrameQueue()
    queue.put(a_frame(released, 1))
    queue.close(ConnectionClosed("over"))
    queue.put(a_frame(released, 2))
    assert released == [2]  # too late
    (await queue.get()).release()
    with pytest.raises(ConnectionClosed, match="over"):
        await queue.get()
    assert released == [2, 1]


async def test_dropping_a_queue_releases_its_frames() -> None:
    released: list[int] = []
    queue = FrameQueue()
    for number in range(3):
        queue.put(a_frame(released, number))
    queue.close(ConnectionClosed("over"), drop=True)
    assert released == [0, 1, 2]
    assert len(queue) == 0


async def test_a_queue_has_one_reader() -> None:
    queue = FrameQueue()
    reader = asyncio.ensure_future(queue.get())
    await asyncio.sleep(0)
    with pytest.raises(ConnectionClosed, match="two tasks"):
        await queue.get()
    queue.put(a_frame([]))
    (await reader).release()


def test_a_pool_lends_memory_again_and_is_bounded() -> None:
    pool = BufferPool(2 * POOL_GRAIN_BYTES)
    first, second, third = (pool.take(POOL_GRAIN_BYTES - number) for number in range(3))
    assert len({id(buffer) for buffer in (first, second, third)}) == 3
    assert len(pool.take(POOL_GRAIN_BYTES + 1)) == 2 * POOL_GRAIN_BYTES
    assert len(pool.take(0)) == POOL_GRAIN_BYTES
    for buffer in (first, second, third):
        pool.give(buffer)
    assert pool.num_bytes == 2 * POOL_GRAIN_BYTES
    assert pool.take(1) is second
    assert pool.take(1) is first
    assert pool.take(1) is not third
    assert pool.num_bytes == 0


async def test_a_busy_task_gives_the_loop_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kv_transfer.transports.flow.time.monotonic", lambda: now)
    turns: list[int] = []
    loop_yield = LoopYield()
    asyncio.get_running_loop().call_soon(turns.append, 1)
    await loop_yield.pause()
    assert turns == []
    now = flow.MAX_LOOP_HOLD_S
    await loop_yield.pause()
    assert turns == [1]
    asyncio.get_running_loop().call_soon(turns.append, 2)
    now += flow.MAX_LOOP_HOLD_S
    loop_yield.resumed()
    await loop_yield.pause()
    assert turns == [1]
