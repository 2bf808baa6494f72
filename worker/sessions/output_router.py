"""OutputRouter: brings each step's outputs from the engine's thread to the sessions that wait for them.

One hop to asyncio per step, then one message per session. Belongs to one event loop, except `deliver_threadsafe`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from engine.types import RequestId, SequenceOutput
from kvrelay.wire.engine.events import Output
from worker.sessions.outbox import Outbox


@dataclass(slots=True)
class Route:
    """Where one request's outputs go."""

    outbox: Outbox
    attempt: int
    """Goes into each output, so that the gateway can tell attempts apart."""
    on_output: Callable[[SequenceOutput], None]
    """Called for each output once it is on its way, and instead of that for an error; must not raise."""


class OutputRouter:
    """Routes of all requests in this worker's engine.

    Invariant: a request has a route from before it enters the engine until its last output or its removal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_step: Callable[[], None] | None = None) -> None:
        self._loop = loop
        self._on_step = on_step
        self._routes: dict[RequestId, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def add(self, request_id: RequestId, route: Route) -> None:
        """Start routing a request's outputs; a later route replaces an earlier one."""
        self._routes[request_id] = route

    def remove(self, request_id: RequestId) -> None:
        """Stop routing; outputs still on their way are dropped."""
        self._routes.pop(request_id, None)

    def deliver_threadsafe(self, outputs: list[SequenceOutput]) -> None:
        """Take a step's outputs on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.deliver, outputs)

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        """Send a step's outputs to their sessions, one message each."""
        by_outbox: dict[int, tuple[Outbox, list[Output]]] = {}
        observed: list[tuple[Callable[[SequenceOutput], None], SequenceOutput]] = []
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            if output.has_ended:
                del self._routes[output.request_id]
            observed.append((route.on_output, output))
            if output.error is not None:
                continue  # no tokens; whoever observes it tells the gateway
            by_outbox.setdefault(id(route.outbox), (route.outbox, []))[1].append(Output(route.attempt, output))
        for outbox, found in by_outbox.values():
            outbox.put_outputs(found)
        # Later, so that whoever sends the outputs runs before whoever goes on with other work because of them.
        for on_output, output in observed:
            on_output(output)
        if self._on_step is not None:
            self._on_step()
