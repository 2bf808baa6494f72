"""Sinks: how a call's tokens reach an HTTP client, whole at the end or as server-sent events while they come.

Both satisfy `gateway/relay/generation.py::Sink`. A client that stops reading a stream ends its call after a while; one
that goes away ends it at once.
"""

import asyncio
import json
from typing import Any

from starlette.types import Send

from gateway.front.http.errors import error_object
from gateway.front.http.responses import Answer, Format, details_of, envelope, finish_name, usage_of
from gateway.relay.response import Completion, Started, TokenChunk
from kvrelay.errors import EngineError, RequestCancelled

DONE = b"data: [DONE]\n\n"
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class CollectingSink:
    """Keeps everything until the end."""

    def __init__(self, form: Format, num_completions: int) -> None:
        self._form = form
        self._answers = [Answer() for _ in range(num_completions)]
        self._started: Started | None = None

    async def started(self, started: Started) -> None:
        """See `Sink.started`."""
        self._started = started

    async def chunk(self, index: int, chunk: TokenChunk) -> None:
        """See `Sink.chunk`."""
        self._answers[index].add(chunk)

    async def complete(self, index: int, completion: Completion) -> None:
        """See `Sink.complete`."""
        self._answers[index].completion = completion

    def body(self) -> dict[str, Any]:
        """Return the whole answer.

        Raises:
            EngineError: The call ended before its completions did.
        """
        completions = [answer.completion for answer in self._answers if answer.completion is not None]
        if self._started is None or len(completions) < len(self._answers):
            raise EngineError("the call ended before its completions did")
        choices = [
            self._form.choice(index, answer, finish_name(completion.ending.finish_reason))
            for index, (answer, completion) in enumerate(zip(self._answers, completions, strict=True))
        ]
        return {
            **envelope(self._started.request_id, self._started.model, self._form.prefix, self._form.object_name),
            "choices": choices,
            "usage": usage_of(completions),
            "kvrelay": {"seed": self._started.seed, "completions": [details_of(each) for each in completions]},
        }


class StreamingSink:
    """Writes each chunk as a server-sent event; the answer begins with the first one.

    Completions of one call share the stream, so that writes take turns.

    Args:
        form: Which objects.
        send: Of the ASGI call.
        include_usage: Whether the last object but one has the usage and no choice.
        write_timeout_s: How long the client may not read.
    """

    def __init__(self, form: Format, send: Send, *, include_usage: bool, write_timeout_s: float) -> None:
        self._form = form
        self._send = send
        self._include_usage = include_usage
        self._write_timeout_s = write_timeout_s
        self._lock = asyncio.Lock()
        self._envelope: dict[str, Any] = {}
        self._seed = 0
        self._completions: list[Completion] = []
        self._offsets: dict[int, int] = {}
        self.has_begun = False
        """Whether the answer's status is sent."""

    async def started(self, started: Started) -> None:
        """See `Sink.started`."""
        form = self._form
        self._envelope = envelope(started.request_id, started.model, form.prefix, form.chunk_name)
        self._seed = started.seed

    async def chunk(self, index: int, chunk: TokenChunk) -> None:
        """See `Sink.chunk`."""
        offset = self._offsets.get(index)
        if offset is None:
            offset = 0
            first = self._form.first(index)
            if first is not None:
                await self._put({"choices": [first]})
        self._offsets[index] = offset + len(chunk.text)
        await self._put({"choices": [self._form.delta(index, chunk, offset)]})

    async def complete(self, index: int, completion: Completion) -> None:
        """See `Sink.complete`."""
        self._completions.append(completion)
        reason = finish_name(completion.ending.finish_reason)
        details = {"seed": self._seed, **details_of(completion)}
        await self._put({"choices": [self._form.last(index, reason)], "kvrelay": details})

    async def finish(self) -> None:
        """End the stream after all completions."""
        if self._include_usage:
            await self._put({"choices": [], "usage": usage_of(self._completions)})
        await self._write(DONE, is_last=True)

    async def fail(self, error: BaseException) -> None:
        """End a stream that has begun with an error: its status is sent already."""
        await self._write(_event(error_object(error)), is_last=True)

    async def _put(self, fields: dict[str, Any]) -> None:
        usage = {"usage": None} if self._include_usage else {}
        await self._write(_event({**self._envelope, **usage, **fields}))

    async def _write(self, event: bytes, *, is_last: bool = False) -> None:
        async with self._lock:
            timer = asyncio.timeout(self._write_timeout_s)
            try:
                async with timer:
                    if not self.has_begun:
                        self.has_begun = True
                        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                    await self._send({"type": "http.response.body", "body": event, "more_body": not is_last})
            except TimeoutError:
                if not timer.expired():
                    raise
                raise RequestCancelled(f"the client has not read for {self._write_timeout_s:g} s") from None


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
