"""Liveness: whether anything is heard of a worker. A clock-driven decision; `session.py` feeds it."""

HEARTBEAT_SLACK_S = 1.0
"""A look that comes this much late says that the gateway itself stood still, which counts for no worker."""


class Liveness:
    """When a worker was heard last, and whether that is too long ago.

    Args:
        now: Seconds, on the clock of all other arguments.
        silence_s: How long a worker may be silent; workers say something every second.
        look_interval_s: How often `is_silent` is going to be asked.
    """

    def __init__(self, now: float, silence_s: float, look_interval_s: float) -> None:
        self._silence_s = silence_s
        self._look_interval_s = look_interval_s
        self._heard_at = self._looked_at = now

    def heard(self, now: float) -> None:
        """Something came."""
        self._heard_at = now

    def is_silent(self, now: float) -> bool:
        """Look, and say whether the worker has been silent for too long."""
        stood_still_s = now - self._looked_at - self._look_interval_s
        if stood_still_s > HEARTBEAT_SLACK_S:
            # What came meanwhile may still wait in a socket.
            self._heard_at += stood_still_s
        self._looked_at = now
        return now - self._heard_at > self._silence_s
