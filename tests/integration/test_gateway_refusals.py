"""What a gateway refuses over the wire, with which status and field, and that it goes on serving afterwards."""

import asyncio
import math
import time
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from engine.model.files.source import ModelSource
from kvrelay.errors import CapacityError, InvalidRequest
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import sampling_pb2
from tests.integration.gateway_harness import ANSWER, PROMPT, Harness, harness, load_model, until

Model = tuple[ModelSource, Tokenizer]
pytestmark = pytest.mark.usefixtures("no_leaks")
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


async def refusal(
    cluster: Harness, request: inference_pb2.GenerateRequest, timeout_s: float = 20.0
) -> grpc.aio.AioRpcError:
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.generate(request, timeout_s=timeout_s)
    return caught.value


def detail(error: grpc.aio.AioRpcError, kind: type[Any]) -> Any:
    """Return one of the rich details of an error."""
    status: Status | None = rpc_status.from_call(error)  # type: ignore[arg-type]  # takes what the asyncio error offers
    assert status is not None
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            return message
    raise AssertionError(f"no {kind.__name__} in {status}")


def bad_field(error: grpc.aio.AioRpcError) -> str:
    """Return the field that an error names."""
    field: str = detail(error, BadRequest).field_violations[0].field
    return field


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": math.nan}, "sampling_params.temperature"),
        ({"top_p": 0.0}, "sampling_params.top_p"),
        ({"max_tokens": 0}, "sampling_params.max_tokens"),
        ({"max_tokens": 8190}, "sampling_params.max_tokens"),
        ({"n": 2, "temperature": 0.0}, "sampling_params.n"),
        ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
        ({"constraint": sampling_pb2.OutputConstraint(regex="a+")}, "sampling_params.constraint"),
        ({"stop_token_ids": [49152]}, "sampling_params.stop_token_ids"),
    ],
)
async def test_wrong_parameter_is_named(model: Model, params: dict[str, Any], field: str) -> None:
    async with harness(model) as cluster:
        error = await refusal(cluster, cluster.request(**params))
        assert error.code() is INVALID
        assert bad_field(error) == field
        assert detail(error, ErrorInfo).metadata["retryable"] == "false"
        assert (await cluster.generate(cluster.request())).text() == ANSWER
        assert len(cluster.decodes[0].commands) == 1


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text"),
        ({"token_ids": inference_pb2.TokenIds()}, "token_ids.ids"),
        ({"token_ids": inference_pb2.TokenIds(ids=[49152])}, "token_ids.ids"),
        ({"token_ids": inference_pb2.TokenIds(ids=[1] * 8192)}, "token_ids.ids"),
        ({"chat": inference_pb2.ChatPrompt()}, "chat.messages"),
        ({"text": "word " * 8192}, "text"),
    ],
)
async def test_unusable_prompt_is_named(model: Model, request_fields: dict[str, Any], field: str) -> None:
    async with harness(model) as cluster:
        error = await refusal(cluster, inference_pb2.GenerateRequest(**request_fields))
        assert error.code() is INVALID
        assert bad_field(error) == field
        assert (await cluster.generate(cluster.request())).text() == ANSWER


async def test_prompt_of_20_megabytes_is_refused_quickly_and_stalls_nobody(model: Model) -> None:
    async with harness(model) as cluster:
        text = "all work and no play " * 1_000_000
        messages = [inference_pb2.ChatMessage(role="user", content=text)]
        requests = {
            "text": inference_pb2.GenerateRequest(text=text),
            "chat.messages": inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages)),
            "token_ids.ids": inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[300] * 10_000_000)),
        }
        for field, request in requests.items():
            started = time.perf_counter()
            error = await refusal(cluster, request)
            assert error.code() is INVALID
            assert bad_field(error) == field
            assert time.perf_counter() - started < 2.0
        assert (await cluster.generate(cluster.request())).text() == ANSWER


async def test_unknown_model_is_not_found(model: Model) -> None:
    async with harness(model) as cluster:
        error = await refusal(cluster, inference_pb2.GenerateRequest(model="gpt-17", text=PROMPT))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "gpt-17" in (error.details() or "")
        answer = await cluster.generate(inference_pb2.GenerateRequest(model="fake", text=PROMPT))
        assert answer.text() == ANSWER


async def test_full_gateway_sheds_with_retry_info(model: Model) -> None:
    async with harness(model, max_running_requests=2, max_queued_requests=1) as cluster:
        cluster.decodes[0].may_generate.clear()
        running = [asyncio.create_task(cluster.generate(cluster.request())) for _ in range(3)]
        await until(lambda: cluster.gateway.admission.num_queued == 1)
        error = await refusal(cluster, cluster.request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, RetryInfo).retry_delay.ToNanoseconds() > 0
        assert detail(error, ErrorInfo).metadata["retryable"] == "true"
        cluster.decodes[0].may_generate.set()
        for task in running:
            assert (await task).text() == ANSWER


async def test_wait_for_admission_ends_with_the_queue_timeout(model: Model) -> None:
    async with harness(model, max_running_requests=1, queue_timeout_s=0.1) as cluster:
        cluster.decodes[0].may_generate.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: cluster.gateway.generation.num_running == 1)
        error = await refusal(cluster, cluster.request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        cluster.decodes[0].may_generate.set()
        await running


async def test_full_decode_worker_is_told_to_the_client(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].reserve_error = CapacityError("no blocks", retry_after_s=2.5)
        error = await refusal(cluster, cluster.request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert detail(error, RetryInfo).retry_delay.ToNanoseconds() == 2_500_000_000


async def test_full_decode_worker_sends_the_request_to_another(model: Model) -> None:
    async with harness(model, num_decode=2) as cluster:
        cluster.decodes[0].reserve_error = CapacityError("no blocks")
        answer = await cluster.generate(cluster.request())
        assert answer.text() == ANSWER
        assert answer.complete[0].decode_worker == "decode-1"


async def test_what_a_worker_finds_wrong_is_passed_on_with_its_field(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].reserve_error = InvalidRequest("sampling_params.top_k", "the engine dislikes it")
        error = await refusal(cluster, cluster.request())
        assert error.code() is INVALID
        assert bad_field(error) == "sampling_params.top_k"


async def test_without_decode_workers_requests_are_unavailable(model: Model) -> None:
    async with harness(model, num_decode=0) as cluster:
        error = await refusal(cluster, cluster.request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert detail(error, ErrorInfo).metadata["retryable"] == "true"


async def test_worker_that_ends_a_request_without_a_token_is_an_error(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.answer.clear()
        error = await refusal(cluster, inference_pb2.GenerateRequest(text="Hi"), timeout_s=5.0)
        assert error.code() is grpc.StatusCode.INTERNAL
