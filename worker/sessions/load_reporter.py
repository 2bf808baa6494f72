"""Sends the worker's load to every session: when it changes, and as a sign of life."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from engine.worker_types import WorkerLoad
from kvrelay.errors import DeviceError
from worker.sessions.outbox import Outbox
from worker.step_watch import StepWatch

INTERVAL_S = 0.25
"""How often the load is looked at."""
HEARTBEAT_S = 1.0
"""A session hears something at least this often: a gateway tells a silent worker from an idle one by it."""


class LoadReporter:
    """Reports one worker's load. Never waits for a step: where one hangs, that is what there is to report.

    Args:
        read_load: Asks the engine, between two steps.
        watch: Says how long the step under way has taken.
        outboxes: Those of the sessions that there are now.
    """

    def __init__(
        self,
        read_load: Callable[[], Coroutine[Any, Any, WorkerLoad]],
        watch: StepWatch,
        outboxes: Callable[[], Iterable[Outbox]],
    ) -> None:
        self._read_load = read_load
        self._watch = watch
        self._outboxes = outboxes
        self._last = WorkerLoad()
        self._was_stalled = False
        self._told_at: dict[int, float] = {}

    async def run(self) -> None:
        """Report until cancelled, or until the engine is gone; whoever ends the process then says why."""
        with contextlib.suppress(DeviceError):
            await self._report()

    async def _report(self) -> None:
        reading: asyncio.Task[WorkerLoad] | None = None
        loop = asyncio.get_running_loop()
        try:
            while True:
                outboxes = list(self._outboxes())
                if outboxes:
                    reading = reading or loop.create_task(self._read_load(), name="load_reporter.read")
                    await asyncio.wait((reading,), timeout=INTERVAL_S)
                    load = self._last
                    if reading.done():
                        load, reading = reading.result(), None
                    self._tell(outboxes, load)
                else:
                    self._told_at.clear()
                await asyncio.sleep(INTERVAL_S)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _tell(self, outboxes: list[Outbox], load: WorkerLoad) -> None:
        is_stalled = self._watch.is_stalled
        is_changed = load != self._last or is_stalled != self._was_stalled
        self._last, self._was_stalled = load, is_stalled
        now = time.monotonic()
        told_at = {id(outbox): self._told_at.get(id(outbox), float("-inf")) for outbox in outboxes}
        told = replace(load, step_age_ms=round(1000 * self._watch.step_age_s), is_stalled=is_stalled)
        for outbox in outboxes:
            if is_changed or now - told_at[id(outbox)] >= HEARTBEAT_S - INTERVAL_S / 2:
                outbox.put(told)
                told_at[id(outbox)] = now
        self._told_at = told_at
