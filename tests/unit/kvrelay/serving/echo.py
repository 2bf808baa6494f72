"""A service without stubs: raw bytes, one method per behaviour that a server must survive."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from kvrelay.serving.telemetry import traceparent

SERVICE = "test.Echo"


class EchoHandler(grpc.GenericRpcHandler):
    """Methods of `/test.Echo/`; remembers what happened to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.release = asyncio.Event()
        self.entered = asyncio.Event()
        self.seen_traceparent = ""
        self.seen_context: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return {
            f"/{SERVICE}/Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            f"/{SERVICE}/Wait": grpc.unary_unary_rpc_method_handler(self.wait),
            f"/{SERVICE}/Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            f"/{SERVICE}/Flood": grpc.unary_stream_rpc_method_handler(self.flood),
            f"/{SERVICE}/CancelItself": grpc.unary_unary_rpc_method_handler(self.cancel_itself),
            f"/{SERVICE}/Session": grpc.stream_stream_rpc_method_handler(self.session),
        }.get(handler_call_details.method)

    async def echo(self, request: bytes, _context: Any) -> bytes:
        self.seen_traceparent = traceparent()
        self.seen_context = structlog.contextvars.get_contextvars()
        return request

    async def wait(self, request: bytes, _context: Any) -> bytes:
        self.entered.set()
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            self.events.append("cleaned up")
            raise
        self.events.append("finished")
        return request

    async def generate(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            self.entered.set()
            await self.release.wait()
            yield request
        finally:
            self.events.append("closed")

    async def flood(self, request: bytes, _context: Any) -> AsyncIterator[bytes]:
        """Write more than any window holds, so that a cancellation finds the handler inside a write."""
        try:
            while True:
                self.entered.set()
                yield request
        finally:
            self.events.append("closed")

    async def cancel_itself(self, _request: bytes, _context: Any) -> bytes:
        raise asyncio.CancelledError

    async def session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for request in requests:
            await context.write(request)
