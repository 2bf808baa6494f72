"""The gateway around its requests: readiness, registration, drain, information, tokenizing, the process itself."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine.model.files.source import ModelSource
from engine.worker_types import WorkerRole
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import registry_service_pb2 as registry_pb2
from kvrelay.v1 import registry_service_pb2_grpc
from tests.fake_workers import FakeDecodeWorker, FakePrefillWorker
from tests.integration.gateway_harness import ANSWER, PROMPT, Harness, harness, load_model, until

Model = tuple[ModelSource, Tokenizer]
pytestmark = pytest.mark.usefixtures("no_leaks")
INFERENCE, REGISTRY = "kvrelay.v1.InferenceService", "kvrelay.v1.RegistryService"


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


async def is_serving(cluster: Harness, service: str) -> bool:
    """Ask the health service over the wire."""
    stub: Any = health_pb2_grpc.HealthStub(cluster.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def test_ready_exactly_while_a_decode_worker_is_connected(model: Model) -> None:
    async with harness(model, num_decode=1) as cluster:
        assert await is_serving(cluster, INFERENCE)
        assert await is_serving(cluster, REGISTRY)
        assert await is_serving(cluster, "")
        await cluster.decodes[0].stop()
        await until(lambda: not cluster.gateway.server.health.is_serving(INFERENCE))
        assert not await is_serving(cluster, INFERENCE)
        await cluster.decodes[0].start()
        await cluster.decodes[0].register(cluster.gateway.address)
        await until(lambda: cluster.gateway.server.health.is_serving(INFERENCE))


async def test_draining_decode_worker_gets_no_new_requests_and_readiness_follows(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        registry = registry_service_pb2_grpc.RegistryServiceStub(cluster.channel)
        await registry.KeepAlive(registry_pb2.KeepAliveRequest(worker_id="decode-0", incarnation=1, is_draining=True))
        for _ in range(4):
            await cluster.generate(cluster.request())
        assert not cluster.decodes[0].commands
        assert await is_serving(cluster, INFERENCE)
        await registry.KeepAlive(registry_pb2.KeepAliveRequest(worker_id="decode-1", incarnation=1, is_draining=True))
        assert not await is_serving(cluster, INFERENCE)


async def test_requests_spread_over_equal_workers(model: Model) -> None:
    async with harness(model, num_decode=2, num_prefill=2, prefix_affinity_entries=0) as cluster:
        for decode in cluster.decodes:
            decode.may_generate.clear()
        calls = [asyncio.create_task(cluster.generate(cluster.request())) for _ in range(8)]
        await until(lambda: sum(len(decode.commits) for decode in cluster.decodes) == 8)
        assert [len(decode.commits) for decode in cluster.decodes] == [4, 4]
        for decode in cluster.decodes:
            decode.may_generate.set()
        await asyncio.gather(*calls)


async def test_equal_prefixes_meet_the_same_decode_worker(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        for _ in range(3):
            await cluster.generate(cluster.request())
        assert sorted(len(decode.commits) for decode in cluster.decodes) == [0, 3]


async def test_prefill_workers_learn_the_decode_workers_before_anything_else(model: Model) -> None:
    async with harness(model, num_decode=1) as cluster:
        late = FakeDecodeWorker("decode-late", cluster.cluster)
        await late.start()
        try:
            await late.register(cluster.gateway.address)
            await until(lambda: sorted(cluster.prefills[0].peers) == ["decode-0", "decode-late"])
            registry = registry_service_pb2_grpc.RegistryServiceStub(cluster.channel)
            await registry.Deregister(registry_pb2.DeregisterRequest(worker_id="decode-late", incarnation=1))
            await until(lambda: cluster.prefills[0].peers == ["decode-0"])
            await until(lambda: not late.sessions)
        finally:
            await late.stop()


async def test_worker_that_does_not_fit_is_refused_with_the_reason(model: Model) -> None:
    async with harness(model) as cluster:
        prefill = FakePrefillWorker("prefill-x", cluster.cluster)
        prefill.address = "127.0.0.1:1"
        prefill.layout = replace(prefill.layout, num_layers=3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await prefill.register(cluster.gateway.address)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "num_model_layers" in (caught.value.details() or "")
        # Another block size is converted at import.
        prefill.layout = replace(cluster.decodes[0].layout, block_size=32)
        await prefill.register(cluster.gateway.address)


async def test_silent_worker_is_forgotten_and_asked_to_register_again(model: Model) -> None:
    async with harness(model, keep_alive_interval_s=0.1) as cluster:
        registry = registry_service_pb2_grpc.RegistryServiceStub(cluster.channel)
        alive = registry_pb2.KeepAliveRequest(worker_id="decode-0", incarnation=1)
        for _ in range(8):
            await registry.KeepAlive(alive)
            await asyncio.sleep(0.05)
        assert cluster.gateway.pool.usable(WorkerRole.DECODE)
        await until(lambda: not cluster.decodes[0].sessions)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.KeepAlive(alive)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_drain_finishes_the_running_and_refuses_the_new(model: Model) -> None:
    async with harness(model, drain_timeout_s=10.0) as cluster:
        cluster.decodes[0].may_generate.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: cluster.gateway.generation.num_running == 1)
        drain = asyncio.create_task(cluster.gateway.drain())
        await until(lambda: cluster.gateway.generation.is_draining)
        assert not await is_serving(cluster, INFERENCE)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.generate(cluster.request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not drain.done()
        cluster.decodes[0].may_generate.set()
        assert (await running).text() == ANSWER
        await drain


async def test_drain_ends_what_lasts_too_long_with_a_typed_error(model: Model) -> None:
    async with harness(model, drain_timeout_s=0.2, max_running_requests=1) as cluster:
        cluster.decodes[0].may_generate.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: cluster.gateway.generation.num_running == 1)
        queued = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: cluster.gateway.admission.num_queued == 1)
        await cluster.gateway.drain()
        for call in (running, queued):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: len(cluster.decodes[0].aborted) == 1)


async def test_server_info_shows_workers_and_load(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].may_generate.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: cluster.gateway.generation.num_running == 1)
        info = await cluster.stub.GetServerInfo(inference_pb2.GetServerInfoRequest())
        assert [(worker.worker_id, worker.role) for worker in info.workers] == [
            ("decode-0", "decode"),
            ("prefill-0", "prefill"),
        ]
        assert all(worker.is_connected and not worker.is_draining for worker in info.workers)
        assert info.num_running_requests == 1
        assert info.version
        cluster.decodes[0].may_generate.set()
        await running


async def test_models_tokenize_and_detokenize(model: Model) -> None:
    async with harness(model) as cluster:
        (card,) = (await cluster.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert (card.name, card.architecture, card.context_length, card.vocab_size) == ("fake", "llama", 8192, 49152)
        assert card.has_chat_template
        response = await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(text=PROMPT))
        assert list(response.token_ids) == cluster.tokenizer.encode(PROMPT)
        text = await cluster.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=response.token_ids))
        assert text.text == PROMPT
        shown = await cluster.stub.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[cluster.eos], skip_special_tokens=False)
        )
        assert shown.text == cluster.tokenizer.decode([cluster.eos], skip_special_tokens=False)
        for call, request in (
            (cluster.stub.Tokenize, inference_pb2.TokenizeRequest()),
            (cluster.stub.Tokenize, inference_pb2.TokenizeRequest(text=PROMPT * 100_000)),
            (cluster.stub.Detokenize, inference_pb2.DetokenizeRequest(token_ids=[49152])),
            (cluster.stub.Abort, inference_pb2.AbortRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_broken_event_fails_its_request_only(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].may_generate.clear()
        calls = [asyncio.create_task(cluster.generate(cluster.request(logprobs=0))) for _ in range(2)]
        await until(lambda: len(cluster.decodes[0].commits) == 2)
        (session,) = cluster.decodes[0].sessions
        victim = cluster.decodes[0].commits[0]
        broken = decode_pb2.DecodeServiceSessionResponse()
        # Three tokens without the logprobs that were asked for.
        broken.step.outputs.add(request_id=victim, attempt=1, token_index=1, token_ids=[1, 2, 3])
        session.events.put_nowait(broken)
        cluster.decodes[0].may_generate.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sorted(isinstance(result, grpc.aio.AioRpcError) for result in results) == [False, True]


async def test_gateway_process_serves_and_ends_cleanly_on_sigterm(model: Model) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "KVRELAY_PORT": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "gateway",
        "--log-json",
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stderr is not None
    lines: list[str] = []
    async with asyncio.timeout(60.0):
        while not lines or "gateway.started" not in lines[-1]:
            lines.append((await process.stderr.readline()).decode())
        process.send_signal(signal.SIGTERM)
        rest = (await process.stderr.read()).decode()
        assert await process.wait() == 0, rest
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "gateway.relay.relay" in imported
    assert not {"torch", "triton", "kv_transfer"} & {name.partition(".")[0] for name in imported}
