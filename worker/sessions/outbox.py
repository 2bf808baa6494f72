"""Outbox: the events of one session on their way to its gateway.

A gateway that reads slowly makes step outputs coalesce into one message instead of piling up; every other event is
bounded by the number of requests. Belongs to one event loop.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable

from kvrelay.wire.engine.events import Event, Output, Step


class Outbox:
    """A queue of a session's events that merges waiting step outputs."""

    def __init__(self) -> None:
        self._items: deque[Event | list[Output]] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        """Queue an event; after `close` it is dropped, because nobody reads any more."""
        if not self._is_closed:
            self._items.append(event)
            self._wake.set()

    def put_outputs(self, outputs: Iterable[Output]) -> None:
        """Queue one step's outputs, joining them to the last message if that is a step still waiting to be sent."""
        if self._is_closed:
            return
        last = self._items[-1] if self._items else None
        if isinstance(last, list):
            last.extend(outputs)
        else:
            self._items.append(list(outputs))
        self._wake.set()

    def close(self) -> None:
        """End the iteration after what is queued."""
        self._is_closed = True
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events in order until `close`."""
        while True:
            while self._items:
                item = self._items.popleft()
                yield Step(tuple(item)) if isinstance(item, list) else item
            if self._is_closed:
                return
            self._wake.clear()
            await self._wake.wait()
