"""Sends the worker's load to every session: when it changes, and as a sign of life."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from kvrelay.errors import DeviceError
from kvrelay.v1 import session_pb2
from worker.step_watch import StepWatch

INTERVAL_S = 0.25
"""How often the load is looked at."""
HEARTBEAT_S = 1.0
"""A session hears something at least this often: a gateway tells a silent worker from an idle one by it."""


class LoadSink(Protocol):
    """A session that wants to know the load."""

    def put_load(self, load: session_pb2.WorkerLoad) -> None:
        """Queue a load event."""
        ...


class LoadReporter:
    """Reports one worker's load. Never waits for a step: where one hangs, that is what there is to report.

    Args:
        read_load: Asks the engine, between two steps.
        watch: Says how long the step under way has taken.
        sinks: The sessions now.
    """

    def __init__(
        self,
        read_load: Callable[[], Awaitable[session_pb2.WorkerLoad]],
        watch: StepWatch,
        sinks: Callable[[], Iterable[LoadSink]],
    ) -> None:
        self._read_load = read_load
        self._watch = watch
        self._sinks = sinks
        self._last = session_pb2.WorkerLoad()
        self._told_at: dict[int, float] = {}

    async def run(self) -> None:
        """Report until cancelled, or until the engine is gone; whoever ends the process then says why."""
        with contextlib.suppress(DeviceError):
            await self._report()

    async def _report(self) -> None:
        reading: asyncio.Task[session_pb2.WorkerLoad] | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                sinks = list(self._sinks())
                if sinks:
                    reading = reading or loop.create_task(self._read(), name="load_reporter.read")
                    await asyncio.wait((reading,), timeout=INTERVAL_S)
                    load = self._last
                    if reading.done():
                        load, reading = reading.result(), None
                    self._tell(sinks, load)
                else:
                    self._told_at.clear()
                await asyncio.sleep(INTERVAL_S)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def _read(self) -> session_pb2.WorkerLoad:
        return await self._read_load()

    def _tell(self, sinks: list[LoadSink], load: session_pb2.WorkerLoad) -> None:
        is_changed = load != self._last or load.is_stalled != self._watch.is_stalled
        self._last = load
        now = time.monotonic()
        told_at = {id(sink): self._told_at.get(id(sink), float("-inf")) for sink in sinks}
        message = session_pb2.WorkerLoad()
        message.CopyFrom(load)
        message.step_age_ms = round(1000 * self._watch.step_age_s)
        message.is_stalled = self._watch.is_stalled
        for sink in sinks:
            if is_changed or now - told_at[id(sink)] >= HEARTBEAT_S - INTERVAL_S / 2:
                sink.put_load(message)
                told_at[id(sink)] = now
        self._told_at = told_at
