"""The life of one asyncio gRPC server: bind, serve, drain, stop. Used by all three services.

Owns the order in which things start and end, the signals, and the process's background tasks. Never knows what is
served: servicers are added to `ServiceServer.grpc_server` by their packages. Options are in
`kvrelay/channel.py`, what wraps every call in `kvrelay/serving/interceptors.py`.
"""

import asyncio
import errno
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc.aio
import structlog

from kvrelay.channel import INTERNAL_MAX_MESSAGE_BYTES, server_options
from kvrelay.errors import InvalidRequest
from kvrelay.serving.health import add_health
from kvrelay.serving.interceptors import CallTracker, ErrorInterceptor, LoggingInterceptor, TracingInterceptor
from kvrelay.serving.reflection import add_reflection

DrainHook = Callable[[], Awaitable[None]]

DEFAULT_GRACE_S: Final = 2.0
"""How long calls that survived the drain may go on before they are cut off."""
CLEAN_UP_TIMEOUT_S: Final = 5.0
"""How long handlers and tasks that were cut off may clean up."""

_log = structlog.get_logger(__name__)


class ServiceServer:
    """A gRPC server with health, reflection, tracing, typed errors and an orderly end.

    Create it inside the event loop that will serve. Usual order::

        server = ServiceServer(host="127.0.0.1", port=0, service_names=["kvrelay.v1.DecodeService"])
        server.bind()                       # the port is known and taken, nothing is answered yet
        ...                                 # load the model
        add_DecodeServiceServicer_to_server(servicer, server.grpc_server)
        await server.start()                # "" is SERVING: the process lives
        server.health.set_serving("kvrelay.v1.DecodeService")
        exit_code = await server.run_until_signal(on_drain=servicer.drain, drain_timeout_s=30)

    Args:
        host: Address to listen on; a name, an IPv4 or an IPv6 address.
        port: Port to listen on; 0 takes any free one.
        service_names: Full names of the services, for health (NOT_SERVING until set) and reflection.
        traced_services: Full names of those whose calls get a server span; not for long-lived sessions.
        max_message_bytes: Largest message in either direction.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        service_names: Sequence[str] = (),
        traced_services: Sequence[str] = (),
        max_message_bytes: int = INTERNAL_MAX_MESSAGE_BYTES,
    ) -> None:
        self._host = host
        self._requested_port = port
        self._bound_port: int | None = None
        self._service_names = tuple(service_names)
        self._is_started = False
        self._stop_task: asyncio.Task[None] | None = None
        self._exit_code = 0
        self._stop_requested = asyncio.Event()
        self._cut_requested = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.calls = CallTracker()
        """The calls in progress."""
        self.grpc_server = grpc.aio.server(
            interceptors=[self.calls, TracingInterceptor(traced_services), LoggingInterceptor(), ErrorInterceptor()],
            options=server_options(max_message_bytes),
        )
        """Where servicers are added before `start`."""
        self.health = add_health(self.grpc_server)
        """Readiness of the named services."""
        for name in self._service_names:
            self.health.set_not_serving(name)

    @property
    def port(self) -> int:
        """The port in use.

        Raises:
            RuntimeError: `bind` has not been called.
        """
        if self._bound_port is None:
            raise RuntimeError("the port is known only after bind()")
        return self._bound_port

    @property
    def address(self) -> str:
        """`host:port` in use, as a client on this host writes it."""
        return _join(self._host, self.port)

    def bind(self) -> int:
        """Take the port and return it. Calling it again changes nothing.

        Raises:
            InvalidRequest: The address cannot be used; names the setting `port` or `host`.
        """
        if self._bound_port is None:
            check_address(self._host, self._requested_port)
            address = _join(self._host, self._requested_port)
            try:
                self._bound_port = self.grpc_server.add_insecure_port(address)
            except RuntimeError as error:
                raise InvalidRequest("port", f"cannot listen on {address}: {error}") from error
            if self._bound_port == 0:
                raise InvalidRequest("port", f"cannot listen on {address}")
        return self._bound_port

    async def start(self) -> int:
        """Bind if that has not happened yet, start to answer, and return the port. Servicers must have been added."""
        port = self.bind()
        add_reflection(self.grpc_server, self._service_names)
        await self.grpc_server.start()
        self._is_started = True
        _log.info("server.started", address=self.address)
        return port

    def create_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a background task that ends with the server. If it fails, the server drains and exits with 1."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            _log.error("server.task_failed", task=task.get_name(), exc_info=error)
            self.request_stop(exit_code=1)

    def request_stop(self, exit_code: int = 0) -> None:
        """Make `run_until_signal` drain and return; what SIGTERM does. The highest exit code asked for wins."""
        self._exit_code = max(self._exit_code, exit_code)
        self._stop_requested.set()

    def _on_signal(self, name: str) -> None:
        if self._stop_requested.is_set():
            _log.warning("server.cut_requested", signal=name)
            self._cut_requested.set()
        else:
            _log.info("server.stop_requested", signal=name)
            self.request_stop()

    async def run_until_signal(
        self, on_drain: DrainHook | None = None, drain_timeout_s: float = 30.0, grace_s: float = DEFAULT_GRACE_S
    ) -> int:
        """Serve until SIGTERM, SIGINT or `request_stop`, drain, stop, and return the exit code.

        Readiness turns NOT_SERVING first; then `on_drain` finishes what runs and ends long-lived streams, for at most
        `drain_timeout_s`; then the server stops. A second signal skips the waiting.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number.name)
        try:
            await self._stop_requested.wait()
            self.health.enter_drain()
            is_drained = await self._drain(on_drain, drain_timeout_s)
            await self.stop(grace_s if is_drained else 0.0)
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
        return self._exit_code

    async def _drain(self, on_drain: DrainHook | None, timeout_s: float) -> bool:
        if on_drain is None:
            return True
        _log.info("server.draining", timeout_s=timeout_s)
        drain = asyncio.ensure_future(on_drain())
        cut = asyncio.ensure_future(self._cut_requested.wait())
        await asyncio.wait((drain, cut), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        is_drained = drain.done() and not drain.cancelled() and drain.exception() is None
        if drain.done() and not drain.cancelled() and (error := drain.exception()) is not None:
            _log.error("server.drain_failed", exc_info=error)
            self._exit_code = max(self._exit_code, 1)
        elif not is_drained:
            _log.warning("server.drain_incomplete", num_calls=self.calls.num_calls)
        await _cancel_and_wait((drain, cut), CLEAN_UP_TIMEOUT_S)
        return is_drained

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stop answering, cut off what still runs after `grace_s`, and wait for its clean-up. May be called again."""
        if self._stop_task is None:
            self._stop_task = asyncio.get_running_loop().create_task(self._stop(grace_s), name="server.stop")
        await asyncio.shield(self._stop_task)

    async def _stop(self, grace_s: float) -> None:
        self.health.shut_down()
        if not self._is_started and self._bound_port is not None:
            # gRPC gives the port of a server that was only bound back when it is started and stopped, not before.
            await self.grpc_server.start()
        await self.grpc_server.stop(grace_s)
        if not await self.calls.wait(CLEAN_UP_TIMEOUT_S):
            _log.warning("server.calls_left", num_calls=self.calls.num_calls)
        await _cancel_and_wait(tuple(self._tasks), CLEAN_UP_TIMEOUT_S)
        _log.info("server.stopped")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()


async def _cancel_and_wait(tasks: Sequence[asyncio.Future[Any]], timeout_s: float) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=timeout_s)
        for task in left:
            _log.warning("server.task_left", task=task.get_name() if isinstance(task, asyncio.Task) else "")


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(host: str, port: int, field: str = "port") -> None:
    """Try an address with a plain socket, whose errors say what is wrong; gRPC only says that it failed.

    Raises:
        InvalidRequest: A server could not listen there now; names the setting `field` or `host`.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise InvalidRequest("host", f"{host!r} is not an address of this machine: {error}") from error
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As gRPC does: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InvalidRequest(
                    field, f"{_join(host, port)} is already in use; choose another one, or 0 for any free one"
                ) from error
            if error.errno == errno.EACCES:
                raise InvalidRequest(field, f"{_join(host, port)} needs privileges; choose one above 1023") from error
            raise InvalidRequest("host", f"cannot listen on {host!r}: {error.strerror}") from error
