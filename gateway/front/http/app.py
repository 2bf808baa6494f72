"""The HTTP application: routes, and each call's way through the same checks, admission and relay as over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from engine.clock import Clock
from gateway.front.convert import to_call, to_tokenize_prompt
from gateway.front.http.errors import error_response, plain_error
from gateway.front.http.requests import ChatBody, CompletionBody, TokenizeBody, read_body
from gateway.front.http.responses import ChatFormat, CompletionFormat, Format
from gateway.front.http.sinks import CollectingSink, StreamingSink
from gateway.front.server_info import ServerInfo
from gateway.relay.generation import Generation
from gateway.relay.tokenizer import TokenizerService
from kvrelay.errors import EngineError, RequestCancelled

_log = structlog.get_logger(__name__)

CLIENT_GONE = 499


class HttpFront:
    """Answers HTTP calls. One event loop."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: TokenizerService,
        info: ServerInfo,
        *,
        clock: Clock,
        max_body_bytes: int,
        write_timeout_s: float,
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._info = info
        self._clock = clock
        self._max_body_bytes = max_body_bytes
        self._write_timeout_s = write_timeout_s
        self._chat = ChatFormat(tokenizer.token_text)
        self._completion = CompletionFormat(tokenizer.token_text)

    def app(self) -> Starlette:
        """Return the application."""
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self._answering(self._chat_completions), methods=["POST"]),
                Route("/v1/completions", self._answering(self._completions), methods=["POST"]),
                Route("/v1/models", self._answering(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", self._answering(self._model), methods=["GET"]),
                Route("/tokenize", self._answering(self._tokenize), methods=["POST"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/ready", self._ready, methods=["GET"]),
            ],
            exception_handlers={HTTPException: _refused},
        )

    def _answering(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except HTTPException:
                raise
            except ClientDisconnect:
                return Response(status_code=CLIENT_GONE)
            except EngineError as error:
                return error_response(error)
            except Exception as error:
                _log.exception("http.unhandled_error", path=request.url.path)
                return error_response(error)

        return answer

    # --- completions --------------------------------------------------------------------------------------------------

    async def _chat_completions(self, request: Request) -> Response:
        body: ChatBody = read_body(ChatBody, await self._content(request))
        return await self._generate(request, body, self._chat)

    async def _completions(self, request: Request) -> Response:
        body: CompletionBody = read_body(CompletionBody, await self._content(request))
        return await self._generate(request, body, self._completion)

    async def _generate(self, request: Request, body: ChatBody | CompletionBody, form: Format) -> Response:
        limits = self._generation.limits()
        call = to_call(body.to_message(), limits)
        if body.stream:
            return _EventStream(
                lambda sink: self._generation.run(call, limits, sink, deadline=None),
                lambda send: StreamingSink(
                    form, send, include_usage=body.wants_usage, write_timeout_s=self._write_timeout_s
                ),
            )
        sink = CollectingSink(form, call.n)
        running = asyncio.ensure_future(self._generation.run(call, limits, sink, deadline=None))
        await _until_done_or_gone(running, request.receive)
        return JSONResponse(sink.body())

    # --- the rest -----------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: Request) -> Response:
        self._generation.check_model(request.path_params["name"])
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, Any]:
        card = self._info.model()
        return {
            "id": card.name,
            "object": "model",
            "created": self._info.started_at,
            "owned_by": "kvrelay",
            "max_model_len": card.context_length,
        }

    async def _tokenize(self, request: Request) -> Response:
        body: TokenizeBody = read_body(TokenizeBody, await self._content(request))
        self._generation.check_model(body.model)
        limits = self._generation.limits()
        token_ids = await self._tokenizer.encode_prompt(to_tokenize_prompt(body.to_message(), limits))
        return JSONResponse({"tokens": token_ids, "count": len(token_ids), "max_model_len": limits.max_sequence_tokens})

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        if self._info.is_ready():
            return JSONResponse({"status": "ready"})
        return plain_error(503, "no decode worker is connected, or the gateway is draining", "not_ready")

    async def _content(self, request: Request) -> bytes:
        """Return the body, read no further than it may be long.

        Raises:
            HTTPException: It is longer.
        """
        parts: list[bytes] = []
        size = 0
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > self._max_body_bytes:
            raise HTTPException(413, f"the body is longer than {self._max_body_bytes} bytes")
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise HTTPException(413, f"the body is longer than {self._max_body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)


async def _refused(request: Request, error: Exception) -> Response:
    """Answer for what Starlette itself refuses: unknown paths, wrong methods, bodies that are too long."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    codes = {404: "unknown_path", 405: "wrong_method", 413: "body_too_long"}
    message = f"{request.method} {request.url.path}: {detail}"
    return plain_error(status, message, codes.get(status, "http_error"))


class _EventStream(Response):
    """An answer that is written while its call runs.

    Args:
        run: Runs the call into a sink.
        make_sink: Makes the sink on an ASGI call's `send`.
    """

    def __init__(
        self, run: Callable[[StreamingSink], Awaitable[None]], make_sink: Callable[[Send], StreamingSink]
    ) -> None:
        super().__init__()
        self._run = run
        self._make_sink = make_sink

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sink = self._make_sink(send)

        async def run() -> None:
            await self._run(sink)
            await sink.finish()

        try:
            await _until_done_or_gone(asyncio.ensure_future(run()), receive)
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, EngineError):
                _log.exception("http.unhandled_error", path=scope["path"])
            if not sink.has_begun:
                # Refused before anything was sent: that has a status of its own.
                await error_response(error)(scope, receive, send)
            elif isinstance(error, RequestCancelled):
                # Nobody reads: an answer that is not finished has the server cut the connection.
                _log.info("http.client_does_not_read", path=scope["path"])
            else:
                await sink.fail(error)


async def _until_done_or_gone(running: "asyncio.Future[None]", receive: Receive) -> None:
    """Wait for a call; when its client goes away, cancel it.

    Raises:
        ClientDisconnect: It did.
    """
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ClientDisconnect
        await running
    finally:
        await _cancelled(running, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _cancelled(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel tasks and wait until they have let go of everything."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
