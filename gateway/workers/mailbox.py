"""The events of one completion, from all sessions, in the order of their arrival.

Owns the hand-over from sessions (which never wait) to the request's task (which does). It needs no limit of its own:
a request has a handful of control events, and its outputs hold at most max_tokens tokens. A task that is slow,
because its client is, finds several outputs at once and turns them into one chunk.
"""

import asyncio
from typing import TypeAlias

from engine.types import WorkerId
from gateway.workers.messages import Event

Delivery: TypeAlias = tuple[WorkerId | None, Event]
"""An event and the worker it came from; None: the gateway itself."""


class Mailbox:
    """Single reader, any number of writers, one event loop."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None

    def post(self, source: WorkerId | None, event: Event) -> None:
        """Add an event; never waits."""
        self._deliveries.append((source, event))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def drain(self) -> list[Delivery]:
        """Wait for at least one event, then take all there are."""
        while not self._deliveries:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        deliveries, self._deliveries = self._deliveries, []
        return deliveries

    def drop_worker_events(self) -> None:
        """Forget what workers have sent; what the gateway itself posted stays."""
        self._deliveries = [delivery for delivery in self._deliveries if delivery[0] is None]
