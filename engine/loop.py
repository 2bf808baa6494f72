"""EngineLoop: the one thread that owns the device.

asyncio code never waits on a forward: it hands functions to the thread (`call`), which runs them between steps, and
gets each step's outputs in one message.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import structlog

from engine.engine import Engine
from engine.types import RequestId, SequenceOutput
from kvrelay.errors import DeviceError

T = TypeVar("T")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Call(Generic[T]):
    """A function on its way to the engine's thread, and where its result goes."""

    function: Callable[[Engine], T]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[T]

    def run(self, engine: Engine) -> None:
        try:
            result = self.function(engine)
        except Exception as error:
            self._settle(error=error)
        else:
            self._settle(result)

    def fail(self, error: Exception) -> None:
        self._settle(error=error)

    def _settle(self, result: T | None = None, error: Exception | None = None) -> None:
        def settle() -> None:
            if self.future.done():
                return
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)  # type: ignore[arg-type]  # None is T's value when T is None

        # The event loop may be gone when a service is being torn down; nobody waits for the result then.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(settle)


class EngineLoop:
    """Runs an engine on its own thread.

    Args:
        make_engine: Builds the engine; runs on the engine's thread, so that all device state lives there.
        on_outputs: Called on the engine's thread after each step that produced something; must return at once.
        on_fatal: Called on the engine's thread when a step failed, with the error and the requests that took part in
            the step; the loop has stopped by then.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        on_outputs: Callable[[list[SequenceOutput]], None],
        on_fatal: Callable[[BaseException, tuple[RequestId, ...]], None],
    ) -> None:
        self._make_engine = make_engine
        self._on_outputs = on_outputs
        self._on_fatal = on_fatal
        self._calls: deque[_Call[Any]] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def step_age_s(self) -> float:
        """Seconds since the step under way, or the calls before it, began; 0 between steps. Any thread may ask."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def start(self) -> None:
        """Build the engine on its thread and wait until it is ready.

        Raises:
            Exception: Whatever building the engine raised.
        """
        self._thread.start()
        await self.call(lambda engine: None)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function(engine)` on the engine's thread between two steps and return its result.

        Raises:
            DeviceError: The engine's thread has ended.
            Exception: Whatever `function` raised.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        call = _Call(function, loop, future)
        with self._wake:
            if self._failure is not None or self._is_stopping:
                raise self._ended()
            self._calls.append(call)
            self._wake.notify()
        return await future

    async def stop(self) -> None:
        """End the thread after the step it is in; calls that still wait fail with DeviceError."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _ended(self) -> DeviceError:
        return DeviceError(f"the engine failed: {self._failure}" if self._failure else "the engine has stopped")

    def _main(self) -> None:
        try:
            engine = self._make_engine()
        except BaseException as error:
            self._end(error, error if isinstance(error, Exception) else None)
            return
        try:
            while self._run_once(engine):
                pass
        except BaseException as error:
            _log.exception("engine.step_failed", request_ids=engine.step_request_ids)
            self._end(error)
            self._on_fatal(error, engine.step_request_ids)
        else:
            self._end(None)
        finally:
            engine.close()

    def _run_once(self, engine: Engine) -> bool:
        """Run the waiting calls and one step; returns False when it is time to stop."""
        with self._wake:
            if self._is_stopping:
                return False
            calls, self._calls = self._calls, deque()
        self._busy_since = time.monotonic()
        for call in calls:
            call.run(engine)
        outputs = engine.step() if engine.has_work else []
        if outputs:
            self._on_outputs(outputs)
        self._busy_since = None
        with self._wake:
            # Waiting sequences alone are no reason to spin: only a call can bring them blocks.
            self._wake.wait_for(
                lambda: bool(self._calls or self._is_stopping or outputs or engine.scheduler.num_running)
            )
        return True

    def _end(self, failure: BaseException | None, told: Exception | None = None) -> None:
        """Take no more calls, and fail those that wait: with `told`, or by default because the engine has ended."""
        with self._wake:
            self._failure = failure
            self._is_stopping = True
            self._busy_since = None
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.fail(told or self._ended())
