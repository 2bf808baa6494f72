"""HttpServer: uvicorn inside the gateway's event loop, on a socket that is bound before anybody is told."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from kvrelay.serving.server import check_address

KEEP_ALIVE_S = 75
"""How long an idle connection stays open: longer than load balancers keep theirs, so that they close first."""
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """A server whose signals are the gateway's matter, and that says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.has_begun = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.has_begun.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Serves one application until `stop`. One event loop.

    Args:
        app: The application.
        host: Address to listen on.
        port: 0 = any free one.
        write_timeout_s: How long a client may not read.
    """

    def __init__(self, app: Starlette, host: str, port: int, write_timeout_s: float) -> None:
        self._host = host
        self._write_timeout_s = write_timeout_s
        self._port = port
        self._socket: socket.socket | None = None
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            loop="none",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port, once started."""
        return self._port

    async def start(self) -> None:
        """Bind and answer.

        Raises:
            InvalidRequest: The address cannot be used; names `http_port`.
        """
        check_address(self._host, self._port, field="http_port")
        bound = socket.create_server(
            (self._host, self._port), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET, backlog=_BACKLOG
        )
        bound.setblocking(False)
        # What cannot be delivered for this long is given up by the kernel, on each connection that is accepted here.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * self._write_timeout_s))
        self._socket, self._port = bound, bound.getsockname()[1]
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[bound]), name="http server")
        begun = asyncio.ensure_future(self._server.has_begun.wait())
        await asyncio.wait((self._task, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            await self._task

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, let calls finish for a while, and end."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
        self._task = None
