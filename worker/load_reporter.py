"""Sends the worker's load to every session while it changes."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from kvrelay.v1 import session_pb2

INTERVAL_S = 0.25


class LoadSink(Protocol):
    """A session that wants to know the load."""

    def put_load(self, load: session_pb2.WorkerLoad) -> None:
        """Queue a load event."""
        ...


async def report_load(
    read_load: Callable[[], Awaitable[session_pb2.WorkerLoad]], sinks: Callable[[], Iterable[LoadSink]]
) -> None:
    """Report until cancelled; a session gets the load when it changed and right after it began."""
    last: session_pb2.WorkerLoad | None = None
    told: set[int] = set()
    while True:
        current = list(sinks())
        if current:
            load = await read_load()
            for sink in current:
                if load != last or id(sink) not in told:
                    sink.put_load(load)
            last = load
        told = {id(sink) for sink in current}
        await asyncio.sleep(INTERVAL_S)
