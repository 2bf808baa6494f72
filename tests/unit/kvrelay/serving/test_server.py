"""A server's life on the loopback interface: bind, health, reflection, drain, signals, clean-up."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from kvrelay.errors import InvalidRequest, RequestCancelled
from kvrelay.serving.server import ServiceServer
from kvrelay.wire.status import from_rpc_error

from .echo import SERVICE, EchoHandler

pytestmark = pytest.mark.usefixtures("no_leaks")

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Running:
    def __init__(self, server: ServiceServer, handler: EchoHandler, channel: Any) -> None:
        self.server = server
        self.handler = handler
        self.channel = channel
        self.health: Any = health_pb2_grpc.HealthStub(channel)

    def unary(self, method: str) -> Any:
        return self.channel.unary_unary(f"/{SERVICE}/{method}")

    def stream(self, method: str) -> Any:
        return self.channel.unary_stream(f"/{SERVICE}/{method}")

    async def status(self, service: str = SERVICE) -> int:
        return int((await self.health.Check(health_pb2.HealthCheckRequest(service=service))).status)


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with ServiceServer(service_names=[SERVICE]) as server:
        handler = EchoHandler()
        server.grpc_server.add_generic_rpc_handlers((handler,))
        await server.start()
        async with grpc.aio.insecure_channel(server.address) as channel:
            running = Running(server, handler, channel)
            yield running
    # pytest holds on to fixtures while the leak check looks, and gRPC's poller lives as long as any of these.
    vars(running).clear()


async def test_port_is_taken_at_bind_and_answers_after_start() -> None:
    async with ServiceServer() as server:
        port = server.bind()
        assert server.bind() == port
        with socket.socket() as probe, pytest.raises(OSError, match="in use"):
            probe.bind(("127.0.0.1", port))
        assert await server.start() == port
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING


async def test_port_is_unknown_before_bind() -> None:
    async with ServiceServer() as server:
        with pytest.raises(RuntimeError, match="bind"):
            _ = server.port


async def test_taken_port_is_an_error_that_names_the_setting() -> None:
    async with ServiceServer() as first:
        port = first.bind()
        async with ServiceServer(port=port) as second:
            with pytest.raises(InvalidRequest, match=f"127.0.0.1:{port} is already in use") as caught:
                second.bind()
    assert caught.value.field == "port"


@pytest.mark.parametrize("is_started", [True, False])
async def test_port_is_free_again_after_a_stop(is_started: bool) -> None:
    async with ServiceServer() as first:
        port = await first.start() if is_started else first.bind()
    async with ServiceServer(port=port) as second:
        assert await second.start() == port


async def test_unknown_host_is_an_error_that_names_the_setting() -> None:
    async with ServiceServer(host="198.51.100.7") as server:
        with pytest.raises(InvalidRequest) as caught:
            server.bind()
    assert caught.value.field == "host"


async def test_readiness_follows_what_the_service_says(running: Running) -> None:
    assert await running.status("") == SERVING
    assert await running.status() == NOT_SERVING
    running.server.health.set_serving(SERVICE)
    assert await running.status() == SERVING
    assert running.server.health.is_serving(SERVICE)
    running.server.health.set_not_serving(SERVICE)
    assert await running.status() == NOT_SERVING


async def test_health_of_an_unknown_service_is_not_found(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.status("no.Such")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_every_lasting_change_and_ends_with_the_server(running: Running) -> None:
    seen = []
    changed = asyncio.Event()

    async def watch() -> None:
        async for response in running.health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
            seen.append(response.status)
            changed.set()

    task = asyncio.create_task(watch())
    for step in (None, running.server.health.set_serving, running.server.health.set_not_serving):
        changed.clear()
        if step is not None:
            step(SERVICE)
        await asyncio.wait_for(changed.wait(), 5)
    started = time.monotonic()
    await running.server.stop(grace_s=10)
    await task
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
    assert time.monotonic() - started < 5


REFLECTION = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")


async def _reflect(running: Running, service: str, **question: Any) -> reflection_pb2.ServerReflectionResponse:
    call = running.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = [each async for each in call(iter([reflection_pb2.ServerReflectionRequest(**question)]))]
    assert isinstance(answer, reflection_pb2.ServerReflectionResponse)
    return answer


@pytest.mark.parametrize("service", REFLECTION)
async def test_reflection_of_both_versions_lists_every_service(running: Running, service: str) -> None:
    answer = await _reflect(running, service, list_services="")
    names = {each.name for each in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", *REFLECTION}


@pytest.mark.parametrize("service", REFLECTION)
async def test_reflection_describes_itself_in_each_version(running: Running, service: str) -> None:
    answer = await _reflect(running, service, file_containing_symbol=service)
    pool = descriptor_pool.DescriptorPool()
    for content in answer.file_descriptor_response.file_descriptor_proto:
        pool.AddSerializedFile(content)
    described: Any = pool.FindServiceByName(service).methods_by_name["ServerReflectionInfo"]
    package = service.rpartition(".")[0]
    assert described.input_type.full_name == f"{package}.ServerReflectionRequest"
    extension = described.input_type.fields_by_name["file_containing_extension"]
    assert extension.message_type.full_name == f"{package}.ExtensionRequest"


async def test_signal_drains_in_order_and_lets_running_calls_finish(running: Running) -> None:
    running.server.health.set_serving(SERVICE)
    call = running.unary("Wait")(b"x")
    await running.handler.entered.wait()
    seen = []

    async def drain() -> None:
        seen.append(await running.status())
        seen.append(await running.status(""))
        running.handler.release.set()
        await call

    serving = asyncio.create_task(running.server.run_until_signal(drain, drain_timeout_s=10))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert await call == b"x"
    assert seen == [NOT_SERVING, SERVING]
    assert running.handler.events == ["finished"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.unary("Echo")(b"x", timeout=1)
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


async def test_drain_that_takes_too_long_cuts_calls_off_and_waits_for_their_clean_up(running: Running) -> None:
    call = running.unary("Wait")(b"x")
    await running.handler.entered.wait()

    async def drain() -> None:
        await running.handler.release.wait()

    running.server.request_stop()
    started = time.monotonic()
    assert await running.server.run_until_signal(drain, drain_timeout_s=0.2, grace_s=30) == 0
    assert 0.2 <= time.monotonic() - started < 5
    assert running.handler.events == ["cleaned up"]
    with pytest.raises((grpc.aio.AioRpcError, asyncio.CancelledError)):
        await call


async def test_second_signal_skips_the_waiting(running: Running) -> None:
    draining = asyncio.Event()

    async def drain() -> None:
        draining.set()
        await asyncio.Event().wait()

    serving = asyncio.create_task(running.server.run_until_signal(drain, drain_timeout_s=60))
    await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await draining.wait()
    started = time.monotonic()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await serving == 0
    assert time.monotonic() - started < 5


async def test_failing_drain_is_told_by_the_exit_code(running: Running) -> None:
    async def drain() -> None:
        raise RuntimeError("broken")

    running.server.request_stop()
    with structlog.testing.capture_logs() as logs:
        assert await running.server.run_until_signal(drain, drain_timeout_s=5) == 1
    assert "server.drain_failed" in {entry["event"] for entry in logs}


async def test_failing_background_task_ends_the_server_with_an_error(running: Running) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)
        raise RuntimeError("broken")

    running.server.create_task(work(), name="work")
    with structlog.testing.capture_logs() as logs:
        assert await running.server.run_until_signal() == 1
    (failed,) = [entry for entry in logs if entry["event"] == "server.task_failed"]
    assert failed["task"] == "work"


async def test_background_tasks_end_with_the_server(running: Running) -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    running.server.create_task(work(), name="work")
    await asyncio.sleep(0)
    await running.server.stop()
    assert ended == [True]


@pytest.mark.parametrize("method", ["Generate", "Flood"])
async def test_cancelled_stream_is_closed_at_once(running: Running, method: str) -> None:
    call = running.stream(method)(b"x" * 100_000)
    await call.read()
    await running.handler.entered.wait()
    await asyncio.sleep(0.05)
    call.cancel()
    assert await running.server.calls.wait(timeout_s=2)
    assert running.handler.events == ["closed"]


async def test_vanished_client_closes_its_stream(running: Running) -> None:
    channel: Any = grpc.aio.insecure_channel(running.server.address)
    call = channel.unary_stream(f"/{SERVICE}/Generate")(b"x")
    await call.read()
    await running.handler.entered.wait()
    await channel.close()
    assert await running.server.calls.wait(timeout_s=2)
    assert running.handler.events == ["closed"]


async def test_handler_that_cancels_itself_does_not_hang_its_client(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.unary("CancelItself")(b"x", timeout=20)
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert type(from_rpc_error(caught.value)) is RequestCancelled


async def test_expired_deadline_cancels_the_handler(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.unary("Wait")(b"x", timeout=0.1)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await running.server.calls.wait(timeout_s=2)
    assert running.handler.events == ["cleaned up"]


async def test_message_above_the_limit_is_refused_and_the_server_goes_on(running: Running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.unary("Echo")(b"x" * (9 * 1024 * 1024))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await running.unary("Echo")(b"x") == b"x"


async def test_stop_may_be_called_by_several(running: Running) -> None:
    await asyncio.gather(running.server.stop(), running.server.stop())
    await running.server.stop()
