"""StepWatch: notices an engine step that hangs, tells it, and in the end takes the process down with it.

Two limits, since a long step is legal on a slow machine. Beyond the first the worker counts as stalled: gateways use
other workers, health says NOT_SERVING, and all is taken back when the step ends. The first limit follows what this
worker's steps have taken so far, so that a slow one is not called stalled for being as slow as always. Beyond the
second the process ends, with every thread's traceback on standard error, for the supervisor to start anew. That one is
a timer in C: it strikes also where a hung step keeps the interpreter's lock and no Python could run.
"""

import asyncio
import faulthandler
from collections.abc import Callable

import structlog

POLL_INTERVAL_S = 0.25
SLOWNESS_FACTOR = 5.0
"""A step may take this many times the longest one before it counts as stalled, whatever the first limit says."""
HALF_LIFE_S = 60.0
"""In which the longest step is half forgotten, so that one hang does not excuse the next."""
_REARM_INTERVAL_S = 1.0

_log = structlog.get_logger(__name__)


class StepWatch:
    """Watches one engine. Belongs to one event loop.

    Args:
        step_age_s: Returns the seconds that the step under way has taken so far; 0 between steps.
        stall_s: First limit.
        limit_s: Second limit, from which on the process ends; None = none.
        on_change: Called when the worker starts or stops to count as stalled.
    """

    def __init__(
        self,
        step_age_s: Callable[[], float],
        stall_s: float,
        limit_s: float | None,
        on_change: Callable[[bool], None],
    ) -> None:
        self._step_age_s = step_age_s
        self._stall_s = stall_s
        self._limit_s = limit_s
        self._on_change = on_change
        self._longest_s = 0.0
        self._last_age_s = 0.0
        self._is_stalled = False

    @property
    def step_age_s(self) -> float:
        """Seconds that the step under way has taken so far."""
        return self._step_age_s()

    @property
    def is_stalled(self) -> bool:
        """Whether the step under way takes longer than this worker's steps do."""
        return self._step_age_s() > max(self._stall_s, SLOWNESS_FACTOR * self._longest_s)

    async def run(self) -> None:
        """Watch until cancelled."""
        rearmed_at = -_REARM_INTERVAL_S
        loop = asyncio.get_running_loop()
        try:
            while True:
                if self._limit_s is not None and self._has_moved() and loop.time() - rearmed_at >= _REARM_INTERVAL_S:
                    faulthandler.dump_traceback_later(self._limit_s, exit=True)
                    rearmed_at = loop.time()
                self._look()
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            if self._limit_s is not None:
                faulthandler.cancel_dump_traceback_later()

    def _has_moved(self) -> bool:
        """Whether the engine is between steps, or in another one than at the last look."""
        return self._step_age_s() <= POLL_INTERVAL_S

    def _look(self) -> None:
        age_s = self._step_age_s()
        self._longest_s *= 0.5 ** (POLL_INTERVAL_S / HALF_LIFE_S)
        if age_s < self._last_age_s:
            # The step seen last has ended; this close to its end it is known how long it took.
            self._longest_s = max(self._longest_s, self._last_age_s)
        self._last_age_s = age_s
        if self.is_stalled != self._is_stalled:
            self._is_stalled = not self._is_stalled
            if self._is_stalled:
                _log.error("engine.stalled", step_age_s=round(age_s, 1), limit_s=self._limit_s)
            else:
                _log.warning("engine.moves_again")
            self._on_change(self._is_stalled)
