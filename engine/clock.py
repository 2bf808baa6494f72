"""Time as a port, so that leases, deadlines and back-off can be tested without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock. Implementations never go backwards."""

    def now(self) -> float:
        """Return monotonic seconds; only differences mean anything."""
        ...


class SystemClock:
    """The process's monotonic clock."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()
