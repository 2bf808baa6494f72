"""Thin asyncio server interceptors: call tracking, tracing, logging context, errors.

They wrap a call once and never touch its messages. Own code, because the OpenTelemetry ones swallow cancellation. Every
wrapped response stream is closed when its call ends, whatever the reason. `kvrelay/serving/server.py` installs them.
"""

import abc
import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import structlog
from opentelemetry.trace import SpanKind

from kvrelay.errors import EngineError, RequestCancelled
from kvrelay.serving.telemetry import span
from kvrelay.wire.status import CODE_BY_NUMBER, STATUS_DETAILS_KEY, to_status

AnyContext: TypeAlias = grpc.aio.ServicerContext[Any, Any]
"""The context of a call whose message types do not matter."""
# Message types belong to the generated stubs, which this package does not know.
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable["AnyHandler | None"]]
Around: TypeAlias = Callable[[AnyContext], AbstractAsyncContextManager[None]]

_log = structlog.get_logger(__name__)
_QUIET_CODES = frozenset({grpc.StatusCode.OK, grpc.StatusCode.CANCELLED})
_BROKEN_CODES = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS})


async def abort(context: AnyContext, error: BaseException) -> NoReturn:
    """End the call with the status of `error`, details included. Never returns: gRPC's own AbortError is raised.

    Exceptions outside the tree are logged with their traceback: the client is told nothing of them.
    """
    if not isinstance(error, EngineError | asyncio.CancelledError):
        _log.error("rpc.unhandled_error", error_type=type(error).__name__, exc_info=error)
    status = to_status(error)
    await context.abort(
        CODE_BY_NUMBER[status.code], status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),)
    )


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Base: runs every call of the four shapes inside `around(method, context)`."""

    @abc.abstractmethod
    def around(self, method: str, context: AnyContext) -> AbstractAsyncContextManager[None]:
        """Return the context manager that the call runs in.

        Args:
            method: Full name, e.g. `/kvrelay.v1.InferenceService/Generate`.
            context: The call's.
        """

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "AnyHandler | None":
        """Wrap the handler that the rest of the chain found; None (no such method) passes through."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method

        def around(context: AnyContext) -> AbstractAsyncContextManager[None]:
            return self.around(method, context)

        return _wrapped(handler, around)


class CallTracker(CallInterceptor):
    """Knows the tasks of all calls in progress.

    `grpc.aio.Server.stop` does not wait for the clean-up of handlers that were cut off (grpc issue 37239), so the
    server waits for these itself.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def num_calls(self) -> int:
        """How many calls are in progress."""
        return len(self._tasks)

    @asynccontextmanager
    async def around(self, method: str, context: AnyContext) -> AsyncIterator[None]:
        """Hold the call's task while it runs."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call must run in a task")
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until no call is in progress; return whether that came true in time."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=timeout_s)
        return not self._tasks


class TracingInterceptor(CallInterceptor):
    """Opens a server span for every call of the named services, under the caller's `traceparent` metadata."""

    def __init__(self, service_names: Collection[str]) -> None:
        self._service_names = frozenset(service_names)

    @asynccontextmanager
    async def around(self, method: str, context: AnyContext) -> AsyncIterator[None]:
        """Run the call in its span; other services' calls run as they are."""
        full_name = method.removeprefix("/")
        if full_name.partition("/")[0] not in self._service_names:
            yield
            return
        parent = _metadata_text(context, "traceparent")
        with span(full_name, parent, kind=SpanKind.SERVER) as call_span:
            call_span.set_attribute("rpc.system.name", "grpc")
            call_span.set_attribute("rpc.method", full_name)
            try:
                yield
            finally:
                call_span.set_attribute("rpc.response.status_code", final_code(context).name)


class LoggingInterceptor(CallInterceptor):
    """Binds the method to the log context and writes one event when the call ends.

    Good and cancelled calls are told at debug level, refused ones at info, broken ones at warning: the service itself
    logs what matters about a request, this only makes sure that no call ends unseen.
    """

    @asynccontextmanager
    async def around(self, method: str, context: AnyContext) -> AsyncIterator[None]:
        """Run the call with `method` bound."""
        started = time.monotonic()
        code: grpc.StatusCode | None = None
        with structlog.contextvars.bound_contextvars(method=method):
            try:
                yield
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                code = code or final_code(context)
                log = _log.debug if code in _QUIET_CODES else _log.warning if code in _BROKEN_CODES else _log.info
                log("rpc.finished", code=code.name, duration_ms=round((time.monotonic() - started) * 1000, 3))


class ErrorInterceptor(CallInterceptor):
    """Turns typed errors into rich statuses, everything unexpected into INTERNAL. A cancelled call stays cancelled."""

    @asynccontextmanager
    async def around(self, method: str, context: AnyContext) -> AsyncIterator[None]:
        """Run the call; what it raises becomes its status."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this call: something that the handler waited for was. gRPC sends no status for that, and
            # the client would wait for ever (grpc issue 29248).
            await abort(context, RequestCancelled("the request was cancelled inside the server"))
        except grpc.aio.AbortError:
            # The handler has chosen a status itself.
            raise
        except (grpc.aio.UsageError, grpc.aio.InternalError) as error:
            # Writing to a call that is over; nobody is left to be told.
            if context.done():
                _log.debug("rpc.write_after_end", error_type=type(error).__name__)
                return
            await abort(context, error)
        except EngineError as error:
            await abort(context, error)
        except Exception as error:
            await abort(context, error)


def final_code(context: AnyContext) -> grpc.StatusCode:
    """Return the status a call has ended with, as far as its handler knows."""
    if context.cancelled():
        return grpc.StatusCode.CANCELLED
    # Nothing is set until a handler sets it or aborts; the type stubs do not know that.
    code: grpc.StatusCode | None = context.code()
    return grpc.StatusCode.OK if code is None else code


def _metadata_text(context: AnyContext, key: str) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == key and isinstance(value, str):
            return value
    return ""


def _wrapped(handler: AnyHandler, around: Around) -> AnyHandler:
    """Return a handler of the same shape whose behaviour runs inside `around`."""
    serializers = {
        "request_deserializer": handler.request_deserializer,
        "response_serializer": handler.response_serializer,
    }
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(_streaming(handler.stream_stream, around), **serializers)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(_streaming(handler.unary_stream, around), **serializers)
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary, around), **serializers)
    return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary, around), **serializers)


def _unary(behavior: Any, around: Around) -> Any:
    async def call(request: Any, context: AnyContext) -> Any:
        async with around(context):
            return await behavior(request, context)

    return call


def _streaming(behavior: Any, around: Around) -> Any:
    # A coroutine that writes, whatever the handler is: when gRPC iterates an async generator itself, a cancellation
    # that comes between two messages leaves the generator, and what its `finally` frees, to the garbage collector.
    async def call(request: Any, context: AnyContext) -> None:
        async with around(context):
            result = behavior(request, context)
            if inspect.isasyncgen(result):
                async with aclosing(result) as messages:
                    async for message in messages:
                        await context.write(message)
            else:
                await result

    return call
