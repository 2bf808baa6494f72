"""Who may run now, who waits, and who is turned away.

Owns the limit on running completions and the bounded queue before it, ordered by priority, then deadline, then arrival.
Knows nothing of workers: their blocks are granted by `Reserve`. Used by `gateway/relay/generation.py`.
"""

import asyncio
import heapq
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.clock import Clock
from kvrelay.errors import CapacityError, DeadlineExceeded

_SMOOTHING = 0.1
"""Weight of the newest service time in the running mean."""
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 30.0


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    deadline: float
    """Clock seconds; infinite = none."""
    arrival: int
    weight: int = field(compare=False)
    granted: "asyncio.Future[None]" = field(compare=False)


class Admission:
    """Counts what runs and queues what cannot run yet. One event loop.

    Invariants: `num_running_slots` is the sum of the weights of the `admit` blocks that are inside; nobody waits
    while the first in the queue would fit; at most `max_queued` wait.
    """

    def __init__(self, *, max_running: int, max_queued: int, queue_timeout_s: float, clock: Clock) -> None:
        self._max_running = max_running
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._clock = clock
        self._queue: list[_Waiter] = []
        self._num_arrived = 0
        self._mean_service_s = 1.0
        self.num_running_slots = 0
        """Completions inside."""
        self.num_running = 0
        """Requests inside."""

    @property
    def num_queued(self) -> int:
        """Requests waiting."""
        return len(self._queue)

    def check_room(self, priority: int = 0) -> None:
        """Refuse early, before any work is spent, what the queue could not take.

        Raises:
            CapacityError: the queue is full of requests that go first.
        """
        if len(self._queue) >= self._max_queued and self._has_no_slot(1):
            worst = max(self._queue, default=None)
            if worst is None or priority >= worst.priority:
                raise self._full()

    @asynccontextmanager
    async def admit(self, *, weight: int = 1, priority: int = 0, deadline: float | None = None) -> AsyncIterator[None]:
        """Wait for room, then run the block with `weight` completions counted.

        Args:
            weight: Completions that the request runs at once; more than the limit counts as the limit.
            priority: Lower goes first.
            deadline: Clock seconds at which the client stops waiting; None: never.

        Raises:
            CapacityError: the queue is full, or the wait took too long.
            DeadlineExceeded: the deadline passed before there was room.
        """
        weight = min(weight, self._max_running)
        await self._wait_for_room(weight, priority, deadline)
        self.num_running += 1
        started = self._clock.now()
        try:
            yield
        finally:
            self._mean_service_s += _SMOOTHING * (self._clock.now() - started - self._mean_service_s)
            self.num_running -= 1
            self._give_back(weight)

    async def _wait_for_room(self, weight: int, priority: int, deadline: float | None) -> None:
        now = self._clock.now()
        if deadline is not None and deadline <= now:
            raise DeadlineExceeded("the deadline had passed before the request could be admitted")
        self._num_arrived += 1
        waiter = _Waiter(
            priority,
            math.inf if deadline is None else deadline,
            self._num_arrived,
            weight,
            asyncio.get_running_loop().create_future(),
        )
        heapq.heappush(self._queue, waiter)
        self._grant()
        if len(self._queue) > self._max_queued:
            self._shed(max(self._queue))
        give_up_at = min(waiter.deadline, now + self._queue_timeout_s)
        try:
            async with asyncio.timeout(give_up_at - now):
                await waiter.granted
        except TimeoutError:
            self._leave(waiter)
            if deadline is not None and give_up_at == deadline:
                raise DeadlineExceeded("the deadline passed while the request waited for admission") from None
            raise CapacityError(
                f"no room within {self._queue_timeout_s:g} s; {len(self._queue)} requests wait", self._retry_after_s()
            ) from None
        except BaseException:
            self._leave(waiter)
            raise

    def _has_no_slot(self, weight: int) -> bool:
        return self.num_running_slots + weight > self._max_running

    def _grant(self) -> None:
        while self._queue and not self._has_no_slot(self._queue[0].weight):
            waiter = heapq.heappop(self._queue)
            if not waiter.granted.done():
                self.num_running_slots += waiter.weight
                waiter.granted.set_result(None)

    def _shed(self, waiter: _Waiter) -> None:
        self._remove(waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(self._full())

    def _leave(self, waiter: _Waiter) -> None:
        """Forget a waiter that gave up; give its slots back if they were granted at that very moment."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self._give_back(waiter.weight)
        else:
            self._remove(waiter)
            self._grant()

    def _remove(self, waiter: _Waiter) -> None:
        if waiter in self._queue:
            self._queue.remove(waiter)
            heapq.heapify(self._queue)

    def _give_back(self, weight: int) -> None:
        self.num_running_slots -= weight
        self._grant()

    def _full(self) -> CapacityError:
        return CapacityError(
            f"{self.num_running} requests run and {len(self._queue)} wait, which is the limit", self._retry_after_s()
        )

    def _retry_after_s(self) -> float:
        waves = (len(self._queue) + 1) / self._max_running
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._mean_service_s * waves))
