"""Requests that end early: cancelled, abandoned, aborted or out of time, at every phase; both workers hear of it."""

import asyncio
import os
import random
import signal
import subprocess
import sys

import grpc
import grpc.aio
import pytest

from engine.model.files.source import ModelSource
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from kvrelay.v1 import sampling_pb2
from tests.integration.gateway_harness import Answer, Harness, harness, load_model, until

Model = tuple[ModelSource, Tokenizer]
pytestmark = pytest.mark.usefixtures("no_leaks")

PHASES = ("reserve", "prefill", "first_token", "decode")


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


async def stop_at(cluster: Harness, phase: str) -> None:
    """Make every request wait in a phase."""
    decode, prefill = cluster.decodes[0], cluster.prefills[0]
    if phase == "reserve":
        decode.may_reserve.clear()
    elif phase == "prefill":
        prefill.may_prefill.clear()
    elif phase == "first_token":
        prefill.may_send_first_token.clear()
    decode.may_generate.clear()


async def reach(cluster: Harness, phase: str, answer: Answer) -> None:
    """Wait until the request is in the phase, and the client knows that it began."""
    await until(lambda: answer.started is not None)
    decode, prefill = cluster.decodes[0], cluster.prefills[0]
    if phase == "reserve":
        await until(lambda: len(decode.commands) == 1)
    elif phase == "prefill":
        await until(lambda: len(prefill.seen(prefill_pb2.PrefillCommand)) == 1)
    elif phase == "first_token":
        await until(lambda: len(decode.commits) == 1)
    else:
        await until(lambda: len(answer.chunks) == 1)


async def collect(cluster: Harness, answer: Answer, timeout_s: float | None = None) -> None:
    async for message in cluster.stub.Generate(cluster.request(), timeout=timeout_s):
        answer.add(message)


def check_told(cluster: Harness, phase: str) -> None:
    """Check that whoever still held something was told to let go."""
    assert len(cluster.decodes[0].aborted) == 1
    # Before Reserve was answered prefill never heard of the request; after commit and first token it holds nothing.
    if phase in ("prefill", "first_token"):
        assert cluster.prefills[0].aborted == cluster.decodes[0].aborted


@pytest.mark.parametrize("phase", PHASES)
async def test_cancel_frees_both_workers(model: Model, phase: str) -> None:
    async with harness(model) as cluster:
        await stop_at(cluster, phase)
        answer = Answer()
        call = asyncio.create_task(collect(cluster, answer))
        await reach(cluster, phase, answer)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: len(cluster.decodes[0].aborted) == 1)
        await cluster.check_idle()
        check_told(cluster, phase)


@pytest.mark.parametrize("phase", PHASES)
async def test_deadline_frees_both_workers(model: Model, phase: str) -> None:
    async with harness(model) as cluster:
        await stop_at(cluster, phase)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster, Answer(), timeout_s=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: len(cluster.decodes[0].aborted) == 1)
        await cluster.check_idle()
        check_told(cluster, phase)


@pytest.mark.parametrize("phase", PHASES)
async def test_abort_ends_the_stream_with_its_reason(model: Model, phase: str) -> None:
    async with harness(model) as cluster:
        await stop_at(cluster, phase)
        answer = Answer()
        call = asyncio.create_task(collect(cluster, answer))
        await reach(cluster, phase, answer)
        assert answer.started is not None
        request_id = answer.started.request_id
        response = await cluster.stub.Abort(inference_pb2.AbortRequest(request_ids=[request_id, 12345, request_id]))
        assert list(response.aborted_request_ids) == [request_id]
        await call
        assert answer.complete[0].finish_reason == sampling_pb2.FINISH_REASON_ABORT
        assert answer.token_ids() == cluster.answer[: answer.complete[0].usage.completion_tokens]
        await cluster.check_idle()
        check_told(cluster, phase)


async def test_abort_shows_the_text_that_was_held_back(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].may_generate.clear()
        first_text = cluster.tokenizer.decode(cluster.answer[:1], is_continuation=True)
        answer = Answer()

        async def run() -> None:
            async for message in cluster.stub.Generate(cluster.request(stop=[first_text + "xyz"])):
                answer.add(message)

        call = asyncio.create_task(run())
        await until(lambda: len(answer.chunks) == 1)
        assert answer.text() == ""
        assert answer.started is not None
        await cluster.stub.Abort(inference_pb2.AbortRequest(request_ids=[answer.started.request_id]))
        await call
        assert answer.text() == first_text


async def test_the_workers_learn_the_time_that_is_left(model: Model) -> None:
    async with harness(model) as cluster:
        await collect(cluster, Answer(), timeout_s=20.0)
        await collect(cluster, Answer())
        limited, unlimited = (command.request.timeout_ms for command in cluster.decodes[0].commands)
        assert 15_000 < limited < 21_000  # gRPC rounds timeouts up
        assert unlimited == 0


_CLIENT = """
import sys
import grpc
from kvrelay.v1 import inference_service_pb2 as pb, inference_service_pb2_grpc as rpc
channel = grpc.insecure_channel(sys.argv[1])
for message in rpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(text="kill me while I listen " * 8)):
    sys.stdout.write("message\\n")
    sys.stdout.flush()
"""


async def test_killed_client_frees_both_workers(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].may_generate.clear()
        command = [sys.executable, "-c", _CLIENT, cluster.gateway.address]
        client = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        )
        assert client.stdout is not None
        await asyncio.wait_for(client.stdout.readline(), 30.0)
        await until(lambda: len(cluster.decodes[0].commits) == 1)
        client.send_signal(signal.SIGKILL)
        await client.wait()
        await until(lambda: len(cluster.decodes[0].aborted) == 1)
        await cluster.check_idle()


async def test_cancelled_while_queued_is_forgotten(model: Model) -> None:
    async with harness(model, max_running_requests=1) as cluster:
        cluster.decodes[0].may_generate.clear()
        first = asyncio.create_task(collect(cluster, Answer()))
        await until(lambda: cluster.gateway.generation.num_running == 1)
        queued = asyncio.create_task(collect(cluster, Answer()))
        await until(lambda: cluster.gateway.admission.num_queued == 1)
        queued.cancel()
        await until(lambda: cluster.gateway.admission.num_queued == 0)
        cluster.decodes[0].may_generate.set()
        await first
        assert len(cluster.decodes[0].seen(type(cluster.decodes[0].commands[0]))) == 1


async def test_200_mixed_requests_leave_nothing(model: Model) -> None:
    async with harness(model, num_decode=2, num_prefill=2, max_running_requests=16) as cluster:
        cluster.cluster.script.pace_s = 0.001
        random_source = random.Random(3)

        async def one(index: int) -> None:
            request = cluster.request(
                n=1 + index % 3, max_tokens=1 + index % 40, stop=["Paris"] if index % 5 == 0 else []
            )
            if index % 2:
                await cluster.generate(request)
                return
            call = asyncio.create_task(cluster.generate(request))
            await asyncio.sleep(random_source.uniform(0.0, 0.3))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

        async with asyncio.TaskGroup() as group:
            for index in range(200):
                group.create_task(one(index))
        await cluster.check_idle()
        assert (await cluster.generate(cluster.request())).token_ids() == cluster.answer
