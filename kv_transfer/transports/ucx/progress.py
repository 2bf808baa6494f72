"""Drives one UCX worker from the event loop: no thread, no polling.

UCX offers a file descriptor that becomes readable when there is something to do. On it the worker is progressed until
it has nothing left, finished requests call back, and the worker is armed again. ucxx's own asyncio layer either polls
(burning a core) or wakes the loop from threads; both cost more than half of the throughput on small machines.
Everything here runs on the loop that made the engine; callbacks of UCX arrive there too.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Protocol

from kvrelay.errors import EngineError, PeerUnavailable

# Read by UCX when it is loaded. Variables for parts that are not compiled in would be reported on every start.
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

from ucxx._lib import libucxx as ucx  # the asyncio layer above it is what this module replaces
from ucxx._lib.arr import Array
from ucxx.types import Tag, TagMaskFull

SEGMENT_BYTES = "512k"
"""TCP segment: UCX's default of 8 KiB sends, 64 KiB receives reaches a sixth of what the socket does."""

CLOSE_PERIOD_NS = 10**9
"""Bound on closing an endpoint."""

DEFAULT_CONFIG: Mapping[str, str] = {
    # Shared memory cannot report a dead peer, so UCX never picks it for our endpoints; it would only open files.
    "TLS": "^posix,sysv,cma",
    "TCP_TX_SEG_SIZE": SEGMENT_BYTES,
    "TCP_RX_SEG_SIZE": SEGMENT_BYTES,
    "KEEPALIVE_INTERVAL": "10s",
}
"""Settings of the UCX context; a `UCX_<NAME>` variable in the environment wins."""


class Request(Protocol):
    """What is used of ucxx's request."""

    @property
    def completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...

    def check_error(self) -> None:
        """Raise its error, if it ended with one."""
        ...


Done = Callable[[EngineError | None], None]


class UcxEngine:
    """One UCX context and worker.

    Invariant: between two turns of the loop the worker is armed, or a turn of `_turn` is scheduled.
    """

    def __init__(self, config: Mapping[str, str] | None = None) -> None:
        """Start the worker on the running loop.

        Raises:
            PeerUnavailable: UCX cannot be started here.
        """
        chosen = {
            name: value
            for name, value in {**DEFAULT_CONFIG, **(config or {})}.items()
            if f"UCX_{name}" not in os.environ
        }
        self._loop = asyncio.get_running_loop()
        try:
            self._context = ucx.UCXContext(chosen)
            self.worker = ucx.UCXWorker(self._context, enable_delayed_submission=False, enable_python_future=False)
            self.worker.init_blocking_progress_mode()
        except ucx.UCXError as error:
            raise PeerUnavailable(f"UCX cannot start: {error}") from error
        self._descriptor: int = self.worker.epoll_file_descriptor
        self._pending: list[tuple[Request, Done]] = []
        self._closing: list[ucx.UCXEndpoint] = []
        self._is_scheduled = False
        self._is_closed = False
        self._loop.add_reader(self._descriptor, self._turn)
        self.schedule()

    def track(self, request: Request, on_done: Done) -> None:
        """Call `on_done` with the request's error or None once it has ended. Never calls it at once."""
        self._pending.append((request, on_done))
        self.schedule()

    async def wait(self, request: Request) -> None:
        """Wait for a request.

        Raises:
            PeerUnavailable: It ended with an error.
        """
        future: asyncio.Future[None] = self._loop.create_future()

        def on_done(error: EngineError | None) -> None:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)

        self.track(request, on_done)
        await future

    def schedule(self) -> None:
        """See to it that the worker is progressed in the next turn of the loop."""
        if not self._is_scheduled and not self._is_closed:
            self._is_scheduled = True
            self._loop.call_soon(self._scheduled_turn)

    def close_endpoint(self, endpoint: "ucx.UCXEndpoint") -> None:
        """Close an endpoint in the next turn; its requests end with an error. May be called from a callback of UCX."""
        self._closing.append(endpoint)
        self.schedule()

    def close(self) -> None:
        """Stop. Endpoints and listeners must be gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._descriptor)
        self._close_endpoints()
        pending, self._pending = self._pending, []
        for _, on_done in pending:
            on_done(PeerUnavailable("UCX was shut down"))
        del self.worker, self._context

    def _scheduled_turn(self) -> None:
        self._is_scheduled = False
        if not self._is_closed:
            self._turn()

    def _turn(self) -> None:
        self.worker.progress()
        self._close_endpoints()
        self._settle()
        # Arming fails while there is more to do; that is left to the next turn so that other tasks get theirs.
        if not self._is_closed and not self.worker.arm():
            self.schedule()

    def _close_endpoints(self) -> None:
        closing, self._closing = self._closing, []
        for endpoint in closing:
            # Cancels what is under way and closes by force, which does not wait for the peer.
            endpoint.close_blocking(period=CLOSE_PERIOD_NS, max_attempts=1)

    def _settle(self) -> None:
        if not any(request.completed for request, _ in self._pending):
            return
        pending, self._pending = self._pending, []
        for request, on_done in pending:
            if request.completed:
                on_done(_error_of(request))
            else:
                self._pending.append((request, on_done))


def _error_of(request: Request) -> EngineError | None:
    try:
        request.check_error()
    except ucx.UCXError as error:
        return PeerUnavailable(f"UCX: {error}")
    return None


__all__ = ["DEFAULT_CONFIG", "Array", "Done", "Request", "Tag", "TagMaskFull", "UcxEngine", "ucx"]
