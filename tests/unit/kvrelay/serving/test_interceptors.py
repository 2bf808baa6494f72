"""What wraps every call: spans for named services, the log context, one event at the end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from opentelemetry.trace import StatusCode

from kvrelay.serving.server import ServiceServer
from kvrelay.serving.telemetry import in_memory_spans

from .echo import SERVICE, EchoHandler

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

Traced = tuple[EchoHandler, Any, ServiceServer]


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    async with ServiceServer(traced_services=[SERVICE]) as server:
        handler = EchoHandler()
        server.grpc_server.add_generic_rpc_handlers((handler,))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            yield handler, channel, server


async def test_call_runs_in_a_span_under_the_callers(traced: Traced) -> None:
    handler, channel, _server = traced
    with in_memory_spans() as exporter:
        await channel.unary_unary(f"/{SERVICE}/Echo")(b"x", metadata=(("traceparent", PARENT),))
    (span,) = exporter.get_finished_spans()
    assert span.name == f"{SERVICE}/Echo"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes is not None
    assert span.attributes["rpc.response.status_code"] == "OK"
    assert handler.seen_traceparent == f"00-0af7651916cd43dd8448eb211c80319c-{span.context.span_id:016x}-01"


async def test_cancelled_stream_ends_its_span(traced: Traced) -> None:
    handler, channel, server = traced
    with in_memory_spans() as exporter:
        call = channel.unary_stream(f"/{SERVICE}/Generate")(b"x")
        await call.read()
        await handler.entered.wait()
        call.cancel()
        assert await server.calls.wait(timeout_s=2)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CancelledError"
    assert span.status.status_code is not StatusCode.ERROR


async def test_services_that_are_not_named_get_no_span() -> None:
    async with ServiceServer(traced_services=["other.Service"]) as server:
        server.grpc_server.add_generic_rpc_handlers((EchoHandler(),))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            with in_memory_spans() as exporter:
                echo: Any = channel.unary_unary(f"/{SERVICE}/Echo")
                assert await echo(b"x") == b"x"
    assert exporter.get_finished_spans() == ()


async def test_method_is_bound_to_the_log_context_of_the_call_only(traced: Traced) -> None:
    handler, channel, _server = traced
    await channel.unary_unary(f"/{SERVICE}/Echo")(b"x")
    assert handler.seen_context == {"method": f"/{SERVICE}/Echo"}
    assert structlog.contextvars.get_contextvars() == {}


@pytest.mark.parametrize(
    ("method", "code", "level"), [("Echo", "OK", "debug"), ("None", None, None), ("CancelItself", "CANCELLED", "debug")]
)
async def test_every_call_ends_with_one_event(traced: Traced, method: str, code: str | None, level: str | None) -> None:
    _, channel, server = traced
    with structlog.testing.capture_logs() as logs:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await channel.unary_unary(f"/{SERVICE}/{method}")(b"x", timeout=5)
        assert await server.calls.wait(timeout_s=2)
    finished = [(entry["code"], entry["log_level"]) for entry in logs if entry["event"] == "rpc.finished"]
    assert finished == ([(code, level)] if code else [])


async def test_bidirectional_stream_passes_through(traced: Traced) -> None:
    _, channel, _server = traced
    call = channel.stream_stream(f"/{SERVICE}/Session")()
    for message in (b"a", b"b"):
        await call.write(message)
        assert await call.read() == message
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
