"""Mints request ids: unique within a process by counting, across processes by random high bits."""

import secrets

from engine.types import RequestId

_COUNTER_BITS = 32
_COUNTER_END = 1 << _COUNTER_BITS


class RequestIdMinter:
    """64-bit ids: 32 random bits drawn at start (and again when the counter is used up), then a counter from 1."""

    def __init__(self) -> None:
        self._prefix = secrets.randbits(32)
        self._count = 0

    def mint(self, count: int = 1) -> RequestId:
        """Return the first of `count` ids in a row."""
        if self._count + count >= _COUNTER_END:
            self._prefix, self._count = secrets.randbits(32), 0
        first = self._count + 1
        self._count += count
        return RequestId((self._prefix << _COUNTER_BITS) | first)
