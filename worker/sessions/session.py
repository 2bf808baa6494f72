"""One gateway's session: commands in, events out, and the end of both.

The gRPC handler is the event generator; commands are read by a task beside it. When either side ends, the other does
too, and the tier then frees whatever the session had started.
"""

import asyncio
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import TypeVar

import structlog

from engine.types import RequestId
from kvrelay.errors import EngineError
from kvrelay.wire.engine.events import Committed, Event, Exported, Failed, ForRequest, Reserved
from kvrelay.wire.status import INTERNAL_MESSAGE
from worker.sessions.outbox import Outbox

Message = TypeVar("Message")

_log = structlog.get_logger(__name__)


class GatewaySession:
    """One gateway's session with this worker. Requests belong to the session that brought them."""

    def __init__(self) -> None:
        self.session_id = secrets.token_hex(8)
        self.outbox = Outbox()

    def tell(self, request_id: RequestId, event: Reserved | Committed | Exported) -> None:
        """Queue what happened to a request."""
        self.outbox.put(ForRequest(request_id, event))

    def fail(self, request_id: RequestId, attempt: int, error: BaseException) -> None:
        """Queue the event that ends a request; exceptions outside the tree are logged and told as internal errors."""
        if not isinstance(error, EngineError):
            _log.error("request.failed_unexpectedly", request_id=request_id, exc_info=error)
            error = EngineError(INTERNAL_MESSAGE)
        self.outbox.put(ForRequest(request_id, Failed(attempt, error)))


async def session_events(
    commands: AsyncIterable[Message], outbox: Outbox, on_command: Callable[[Message], None]
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
