"""Runs connection handlers for a listener and ends them with it.

Shared by the transports' listeners; it knows nothing of sockets. A handler's error ends its connection and is logged,
never the listener.
"""

import asyncio

import structlog

from kv_transfer.transports.port import Connection, ConnectionHandler
from kvrelay.errors import EngineError

_log = structlog.get_logger(__name__)


class HandlerTasks:
    """The handler tasks of one listener.

    Invariant: a task is listed from `start` until its connection is closed.
    """

    def __init__(self, handler: ConnectionHandler) -> None:
        self._handler = handler
        self._tasks: dict[asyncio.Task[None], Connection] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, connection: Connection) -> asyncio.Task[None]:
        """Serve a connection in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._run(connection))
        self._tasks[task] = connection
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    async def _run(self, connection: Connection) -> None:
        try:
            await self._handler(connection)
        except EngineError as error:
            _log.info("kv_transfer.connection_ended", transport=connection.scheme, error=str(error))
        except Exception:
            # A bug in the handler costs this connection only; the listener goes on serving the others.
            _log.exception("kv_transfer.handler_failed", transport=connection.scheme)
            connection.abort()
        finally:
            await connection.close()

    async def close(self) -> None:
        """Abort every connection, cancel the handlers and wait for them."""
        tasks = list(self._tasks.items())
        for task, connection in tasks:
            connection.abort()
            task.cancel()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
