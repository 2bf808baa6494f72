"""One gateway's session: commands in, events out, and the end of both.

The gRPC handler is the event generator; commands are read by a task beside it. When either side ends, the other does
too, and the servicer then frees whatever the session had started.
"""

import asyncio
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import TypeVar

import structlog

from engine.types import RequestId
from kvrelay.errors import EngineError
from kvrelay.v1 import session_pb2
from kvrelay.wire.status import to_status
from worker.sessions.outbox import Outbox

Command = TypeVar("Command")
Event = TypeVar("Event")

_log = structlog.get_logger(__name__)


def new_session_id() -> str:
    """Return a random name for a session."""
    return secrets.token_hex(8)


async def session_events(
    commands: AsyncIterable[Command], outbox: Outbox[Event], on_command: Callable[[Command], None]
) -> AsyncIterator[Event]:
    """Yield a session's events until its gateway ends the stream or the outbox is closed.

    Args:
        commands: The gateway's commands.
        outbox: Closed here when the commands end.
        on_command: Called for each command in order; must return at once. An exception ends the session.
    """

    async def read() -> None:
        try:
            async for command in commands:
                on_command(command)
        finally:
            outbox.close()

    reader = asyncio.get_running_loop().create_task(read(), name="session.read")
    try:
        async for event in outbox:
            yield event
    finally:
        reader.cancel()
        (outcome,) = await asyncio.gather(reader, return_exceptions=True)
        if isinstance(outcome, Exception):
            _log.warning("session.read_failed", error=str(outcome), kind=type(outcome).__name__)


def request_error(request_id: RequestId, attempt: int, error: BaseException) -> session_pb2.RequestError:
    """Return the event that ends one request; unknown exceptions are logged and told as internal errors."""
    if not isinstance(error, EngineError):
        _log.error("request.failed_unexpectedly", request_id=request_id, exc_info=error)
    return session_pb2.RequestError(request_id=request_id, attempt=attempt, status=to_status(error).SerializeToString())
