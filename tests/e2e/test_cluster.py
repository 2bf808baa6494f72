"""A whole cluster of real processes serving the real model."""

import asyncio
import json
import math
import signal
import subprocess
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from kvrelay.errors import CapacityError, ContextTooLong, InvalidRequest, ModelNotFound, WorkerUnavailable
from kvrelay.results import Chunk, Completion, Started
from kvrelay.values import FinishReason
from tests.settling import settle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

PROMPTS = [
    "What is the capital of France? Answer in one sentence.",
    "Name three primary colors.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "List the days of the week.",
    "Who wrote Hamlet?",
    "Give me one tip for sleeping well.",
    "Say hello in Spanish.",
    "What do bees make?",
    "Describe rain in five words.",
    "What is the opposite of hot?",
    "Name a large animal.",
    "Repeat after me: one two three one two three.",
    "Why is the sky blue?",
    "What year has 366 days?",
    "Translate 'good morning' to French.",
]


def _chat(prompt: str) -> list[tuple[str, str]]:
    return [("user", prompt)]


async def _serve(client: AsyncClient, **sampling: Any) -> list[Completion]:
    return await asyncio.gather(
        *(
            client.complete(messages=_chat(prompt), max_tokens=20, seed=index, timeout_s=300, **sampling)
            for index, prompt in enumerate(PROMPTS)
        )
    )


async def test_fact_is_answered_over_shared_memory(client: AsyncClient) -> None:
    answer = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=40)
    assert "Paris" in answer.text
    assert answer.complete.finish_reason is FinishReason.STOP
    timings = answer.complete.timings
    assert timings.transport == "shm"
    assert timings.transfer_bytes > 0
    assert 0 < timings.prefill_ns < timings.first_token_ns < timings.total_ns
    assert answer.complete.prefill_worker.startswith("prefill")
    assert answer.complete.decode_worker.startswith("decode")


async def test_workers_say_what_they_compute_with(client: AsyncClient) -> None:
    workers = (await client.server_info()).workers
    assert [worker.kernels.partition(" ")[0] for worker in workers] == ["native", "native"]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}])
async def test_sixteen_streams_at_once_get_the_tokens_they_get_one_by_one(
    client: AsyncClient, sampling: dict[str, Any]
) -> None:
    together = await _serve(client, **sampling)
    for index, completion in enumerate(together):
        alone = await client.complete(
            messages=_chat(PROMPTS[index]), max_tokens=20, seed=index, timeout_s=300, **sampling
        )
        assert alone.token_ids == completion.token_ids
        assert alone.text == completion.text


async def test_other_topologies_give_the_same_tokens(client: AsyncClient) -> None:
    expected = [completion.token_ids for completion in await _serve(client, temperature=0.7)]
    colocated = ClusterConfig(num_prefill=0)
    over_grpc = ClusterConfig(worker_args=["--transport", "grpc", "--speculation", "none"], num_decode=2)
    for config in (colocated, over_grpc):
        async with LocalCluster(config) as other, AsyncClient(other.target) as other_client:
            completions = await _serve(other_client, temperature=0.7)
            assert [completion.token_ids for completion in completions] == expected
            transports = {completion.complete.timings.transport for completion in completions}
            assert transports == ({""} if config is colocated else {"grpc"})
            await settle(other_client)


async def test_usage_counts_what_was_sent(client: AsyncClient) -> None:
    ids = await client.tokenize(messages=_chat(PROMPTS[0]))
    answer = await client.complete(token_ids=ids, temperature=0, max_tokens=5)
    assert answer.started.prompt_tokens == answer.complete.usage.prompt_tokens == len(ids)
    assert len(answer.token_ids) == answer.complete.usage.completion_tokens == 5
    assert answer.complete.finish_reason is FinishReason.LENGTH
    assert answer.text == await client.detokenize(answer.token_ids)


async def test_one_token_is_one_token(client: AsyncClient) -> None:
    answer = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=1)
    assert len(answer.token_ids) == 1
    assert answer.complete.finish_reason is FinishReason.LENGTH
    await settle(client)


async def test_stop_string_cuts_text_tokens_and_usage(client: AsyncClient) -> None:
    full = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=40)
    assert full.text == "The capital of France is Paris."
    cut = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=40, stop=["France"])
    assert cut.text == "The capital of "
    assert cut.complete.matched_stop == "France"
    assert len(cut.token_ids) == cut.complete.usage.completion_tokens == 4
    first = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=40, stop=["The"])
    assert (first.text, len(first.token_ids)) == ("", 1)
    await settle(client)


async def test_stop_token_as_first_token_ends_there(client: AsyncClient) -> None:
    full = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, max_tokens=3)
    token = full.token_ids[0]
    answer = await client.complete(messages=_chat(PROMPTS[0]), temperature=0, stop_token_ids=[token])
    assert answer.token_ids == (token,)
    assert answer.complete.matched_stop == token
    await settle(client)


async def test_characters_of_several_tokens_are_never_broken(client: AsyncClient) -> None:
    prompt = "Repeat exactly: 🎉 日本語 naïve 😀"
    texts: list[str] = []
    tokens: list[int] = []
    async for event in client.generate(messages=_chat(prompt), temperature=0, max_tokens=40):
        if isinstance(event, Chunk):
            texts.append(event.text)
            tokens += event.token_ids
    assert "".join(texts) == await client.detokenize(tokens)
    assert not any("\ufffd" in text for text in texts[:-1])


async def test_several_completions_have_seeds_of_their_own(client: AsyncClient) -> None:
    texts: dict[int, list[int]] = {}
    async for event in client.generate(messages=_chat(PROMPTS[2]), n=3, seed=5, max_tokens=12):
        if isinstance(event, Chunk):
            texts.setdefault(event.index, []).extend(event.token_ids)
    second = await client.complete(messages=_chat(PROMPTS[2]), seed=6, max_tokens=12)
    assert texts[1] == list(second.token_ids)
    assert len({tuple(tokens) for tokens in texts.values()}) > 1


@pytest.mark.parametrize(
    ("arguments", "error", "field"),
    [
        ({"prompt": ""}, InvalidRequest, "text"),
        ({"token_ids": []}, InvalidRequest, "token_ids"),
        ({"token_ids": [999_999]}, InvalidRequest, "token_ids"),
        ({"token_ids": [5] * 9000}, ContextTooLong, "token_ids"),
        ({"prompt": "x", "max_tokens": 100_000}, ContextTooLong, "max_tokens"),
        ({"prompt": "x", "temperature": math.nan}, InvalidRequest, "temperature"),
        ({"prompt": "x", "top_p": 0.0}, InvalidRequest, "top_p"),
        ({"prompt": "x", "min_p": 1.5}, InvalidRequest, "min_p"),
        ({"prompt": "x", "n": 17}, InvalidRequest, "sampling_params.n"),
        ({"prompt": "x", "stop": [""]}, InvalidRequest, "stop"),
        ({"prompt": "a" * 20_000_000}, InvalidRequest, "text"),
        ({"prompt": "x", "model": "other"}, ModelNotFound, "other"),
    ],
    ids=lambda value: None if not isinstance(value, dict) else "-".join(value),
)
async def test_bad_requests_are_refused_by_name_and_the_service_goes_on(
    client: AsyncClient, arguments: dict[str, Any], error: type[Exception], field: str
) -> None:
    with pytest.raises(error, match=field):
        await client.complete(**arguments, timeout_s=30)
    assert (await client.complete("The", temperature=0, max_tokens=2)).token_ids


async def test_cancelled_and_finished_requests_leave_both_pools_whole(client: AsyncClient) -> None:
    await settle(client)

    async def one(index: int) -> str:
        stream = client.generate(messages=_chat(PROMPTS[index % 16]), seed=index, max_tokens=2 + index % 3)
        seen = 0
        async for event in stream:
            seen += not isinstance(event, Started)
            if index % 2 and seen >= index % 3:
                await stream.aclose()
                return "cancelled"
        return "finished"

    outcomes: list[str] = []
    for start in range(0, 200, 50):
        outcomes += await asyncio.gather(*(one(index) for index in range(start, start + 50)))
    assert outcomes.count("cancelled") >= 60
    assert outcomes.count("finished") >= 60
    await settle(client)


async def test_killed_client_frees_its_requests(cluster: LocalCluster, client: AsyncClient) -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "generate", "Once upon a time", "--target", cluster.target]
    process = await asyncio.create_subprocess_exec(
        *command, "--max-tokens", "1000", "--ignore-eos", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(4), 60)
    assert (await client.server_info()).num_running_requests == 1
    process.kill()
    await process.wait()
    await settle(client)


async def test_abort_ends_a_stream_with_its_reason(client: AsyncClient) -> None:
    finish: FinishReason | None = None
    request_id = 0
    async for event in client.generate("Once upon a time", max_tokens=2000, ignore_eos=True, temperature=0):
        if isinstance(event, Started):
            request_id = event.request_id
        elif isinstance(event, Chunk):
            await client.abort(request_id)
        else:
            finish = event.finish_reason
    assert finish is FinishReason.ABORT
    await settle(client)


async def test_reflection_and_health_answer(cluster: LocalCluster) -> None:
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvrelay.v1.InferenceService"):
            response = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        names: set[str] = set()
        async for answer in make_stub(channel).ServerReflectionInfo(iter([request])):
            names |= {service.name for service in answer.list_services_response.service}
    assert "kvrelay.v1.InferenceService" in names


async def test_lost_only_decode_worker_is_a_typed_retryable_error() -> None:
    async with LocalCluster(ClusterConfig()) as cluster, AsyncClient(cluster.target) as client:
        running = asyncio.create_task(
            client.complete("Once upon a time", max_tokens=500, ignore_eos=True, timeout_s=60)
        )
        await asyncio.sleep(0.7)
        assert not running.done()
        cluster.kill("decode-0")
        with pytest.raises((WorkerUnavailable, CapacityError)) as caught:
            await running
        assert caught.value.is_retryable


async def test_sigterm_drains_running_requests_and_exits_cleanly() -> None:
    async with LocalCluster(ClusterConfig()) as cluster, AsyncClient(cluster.target) as client:
        running = asyncio.create_task(
            client.complete("Once upon a time", temperature=0, max_tokens=400, ignore_eos=True, timeout_s=60)
        )
        await asyncio.sleep(0.3)
        assert not running.done()
        cluster.process("gateway").send_signal(signal.SIGTERM)
        answer = await running
        assert answer.complete.usage.completion_tokens == 400
        assert await asyncio.wait_for(cluster.process("gateway").wait(), 20) == 0


async def test_demo_prints_its_figures_as_json() -> None:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "kvrelay.cli.main", "demo", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = await asyncio.wait_for(process.communicate(), 200)
    assert process.returncode == 0, stderr.decode()
    report = json.loads(stdout)
    assert "Paris" in report["requests"][0]["text"]
    for request in report["requests"]:
        assert request["transfer_bytes"] > 0
        assert request["transport"] == "shm"
        assert 0 < request["ttft_ms"] < request["total_ms"]
        assert {"queue_ms", "prefill_ms", "transfer_ms", "inter_token_p50_ms", "usage"} <= set(request)
