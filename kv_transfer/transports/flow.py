"""Flow control that the transports share: a budget of bytes in flight and a queue of received frames.

Single event loop, no threads. Both wake their waiters when the connection ends, so nobody waits on a dead peer.
"""

import asyncio
import time
from collections import deque
from typing import TypeVar

from kv_transfer.frame import Frame
from kv_transfer.transports.port import ConnectionClosed
from kvrelay.errors import TransferError

_Error = TypeVar("_Error", bound=TransferError)

MAX_LOOP_HOLD_S = 0.5e-3
"""How long copying may go on before other tasks of the loop get their turn; one frame more may be under way."""


POOL_BYTES = 32 << 20
POOL_GRAIN_BYTES = 256 << 10


def fresh(error: _Error) -> _Error:
    """Return a new error that says the same.

    A raised error keeps the frames that it passed, and with them connections and payloads. Kept by the connection
    itself it would be part of a cycle, which only the garbage collector ends; so what is kept is never raised.
    """
    return type(error)(str(error))


class LoopYield:
    """Gives the event loop back now and then while a task has work without a pause."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.monotonic()

    async def pause(self) -> None:
        """Let other tasks run if this one has held the loop for `MAX_LOOP_HOLD_S` since its last pause."""
        if time.monotonic() - self._since >= MAX_LOOP_HOLD_S:
            await asyncio.sleep(0)
            self._since = time.monotonic()

    def resumed(self) -> None:
        """Note that the task has just waited for something, so that others had their turn."""
        self._since = time.monotonic()


class ByteBudget:
    """Bounds bytes in flight; waiters get room in the order in which they asked.

    A demand larger than the whole budget is let through when nothing else is in flight.

    Invariants: `used` >= 0; the first waiter does not fit.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._error: TransferError | None = None

    def _fits(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= self.limit or self.used == 0

    def acquire_now(self, num_bytes: int) -> bool:
        """Take `num_bytes` if there is room and nobody waits; returns whether it did. Raises like `acquire`."""
        if self._error is not None:
            raise fresh(self._error)
        if self._waiters or not self._fits(num_bytes):
            return False
        self.used += num_bytes
        return True

    async def acquire(self, num_bytes: int) -> None:
        """Take `num_bytes`, waiting for room.

        Raises:
            ConnectionClosed: `close` was called before or while waiting.
        """
        if self.acquire_now(num_bytes):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (num_bytes, future)
        self._waiters.append(waiter)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(num_bytes)  # granted and cancelled in the same loop turn
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
                self._grant()
            raise

    def release(self, num_bytes: int) -> None:
        """Give bytes back and let waiters in."""
        self.used -= num_bytes
        self._grant()

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0][0]):
            num_bytes, future = self._waiters.popleft()
            if not future.done():
                self.used += num_bytes
                future.set_result(None)

    def close(self, error: TransferError) -> None:
        """Make every present and later `acquire` raise an error like `error`."""
        if self._error is None:
            self._error = fresh(error)
        while self._waiters:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_exception(fresh(self._error))


class BufferPool:
    """Payload memory that is used again: fresh memory of this size costs more in page faults than filling it.

    Invariant: a buffer is either in the pool or lent, never both.
    """

    def __init__(self, limit: int = POOL_BYTES) -> None:
        self._limit = limit
        self._free: dict[int, list[bytearray]] = {}
        self.num_bytes = 0
        """Bytes in the pool."""

    def take(self, num_bytes: int) -> bytearray:
        """Lend a buffer of at least `num_bytes`; its content is whatever was there before."""
        size = -(-max(num_bytes, 1) // POOL_GRAIN_BYTES) * POOL_GRAIN_BYTES
        free = self._free.get(size)
        if not free:
            return bytearray(size)
        self.num_bytes -= size
        return free.pop()

    def close(self) -> None:
        """Free what is in the pool and whatever is given back later."""
        self._free.clear()
        self.num_bytes = self._limit = 0

    def give(self, buffer: bytearray) -> None:
        """Take a buffer back; nobody may look at it any more."""
        if self.num_bytes + len(buffer) <= self._limit:
            self.num_bytes += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)


class FrameQueue:
    """Received frames waiting for `recv`; one reader."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: TransferError | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> None:
        """Add a frame; after `close` it is released at once."""
        if self._error is not None:
            frame.release()
            return
        self._frames.append(frame)
        self._wake()

    async def get(self) -> Frame:
        """Return the oldest frame; after `close`, first what is left, then its error."""
        while not self._frames:
            if self._error is not None:
                raise fresh(self._error)
            if self._waiter is not None:
                raise ConnectionClosed("two tasks read one connection at the same time")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._frames.popleft()

    def close(self, error: TransferError, *, drop: bool = False) -> None:
        """End the queue with an error like `error`; `drop` releases what has not been read."""
        if self._error is None:
            self._error = fresh(error)
        if drop:
            while self._frames:
                self._frames.popleft().release()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
