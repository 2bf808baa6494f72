"""Both clients against a scripted gateway: events, requests, typed errors, cancellation."""

import asyncio
from typing import Any

import pytest

from kvrelay.client import AsyncClient, Client
from kvrelay.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    WorkerUnavailable,
)
from kvrelay.results import Chunk, Complete, Event, Started, Timings, Usage
from kvrelay.serving.telemetry import span, traceparent
from kvrelay.v1 import inference_service_pb2 as pb
from kvrelay.v1 import sampling_pb2
from kvrelay.values import FinishReason
from tests.unit.kvrelay.fake_gateway import FakeGateway, answer


class AnyClient:
    """The blocking or the asyncio client behind one blocking face, so that every test runs against both."""

    def __init__(self, kind: str, target: str) -> None:
        self._kind = kind
        self._target = target

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if self._kind == "blocking":
            with Client(self._target) as client:
                return getattr(client, method)(*args, **kwargs)

        async def run() -> Any:
            async with AsyncClient(self._target) as client:
                return await getattr(client, method)(*args, **kwargs)

        return asyncio.run(run())

    def events(self, *args: Any, limit: int | None = None, **kwargs: Any) -> list[Event]:
        """All events of `generate`, or the first `limit` of them, after which the iterator is closed."""
        if self._kind == "blocking":
            with Client(self._target) as client:
                iterator: Any = client.generate(*args, **kwargs)
                events = []
                for event in iterator:
                    events.append(event)
                    if len(events) == limit:
                        iterator.close()
                        break
                return events

        async def run() -> list[Event]:
            async with AsyncClient(self._target) as client:
                iterator: Any = client.generate(*args, **kwargs)
                events = []
                async for event in iterator:
                    events.append(event)
                    if len(events) == limit:
                        await iterator.aclose()
                        break
                return events

        return asyncio.run(run())


@pytest.fixture(params=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, target: str) -> AnyClient:
    return AnyClient(request.param, target)


def test_events_are_typed_and_complete(client: AnyClient) -> None:
    assert client.events("Hi") == [
        Started(request_id=11, seed=77, model="tiny", prompt_tokens=4),
        Chunk(index=0, token_index=0, token_ids=(5,), text="Hello "),
        Chunk(index=0, token_index=1, token_ids=(6,), text="there"),
        Complete(
            index=0,
            finish_reason=FinishReason.STOP,
            matched_stop=2,
            usage=Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=1),
            timings=Timings(
                queue_ns=1_000_000,
                prefill_ns=2_000_000,
                transfer_ns=3_000_000,
                transfer_bytes=2048,
                first_token_ns=4_000_000,
                total_ns=9_000_000,
                transport="shm",
            ),
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            num_attempts=2,
        ),
    ]


def test_stop_string_and_logprobs_are_read(client: AnyClient, gateway: FakeGateway) -> None:
    entry = sampling_pb2.TokenLogprob(token_id=5, logprob=-0.5, rank=1)
    logprobs = [sampling_pb2.PositionLogprobs(sampled=entry, top=[entry])]
    complete = pb.GenerateComplete(finish_reason=sampling_pb2.FINISH_REASON_STOP, matched_stop_str="END")
    gateway.script = [
        pb.GenerateResponse(chunk=pb.GenerateChunk(token_ids=[5], logprobs=logprobs)),
        pb.GenerateResponse(complete=complete),
    ]
    _, chunk, done = client.events("Hi")
    assert isinstance(chunk, Chunk)
    assert chunk.logprobs[0].top[0].logprob == -0.5
    assert isinstance(done, Complete)
    assert done.matched_stop == "END"


def test_completion_is_collected(client: AnyClient) -> None:
    completion = client.call("complete", "Hi")
    assert completion.text == "Hello there"
    assert completion.token_ids == (5, 6)
    assert completion.started.seed == 77
    assert completion.complete.usage.completion_tokens == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"prompt": "Hi"}, pb.GenerateRequest(text="Hi")),
        ({"prompt": ""}, pb.GenerateRequest(text="")),
        ({"token_ids": [1, 2]}, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2]))),
        (
            {"messages": [("system", "s"), {"role": "user", "content": "u"}]},
            pb.GenerateRequest(
                chat=pb.ChatPrompt(
                    messages=[pb.ChatMessage(role="system", content="s"), pb.ChatMessage(role="user", content="u")]
                )
            ),
        ),
    ],
)
def test_prompt_is_sent_in_its_form(
    client: AnyClient, gateway: FakeGateway, arguments: dict[str, Any], expected: pb.GenerateRequest
) -> None:
    client.events(**arguments)
    (request,) = gateway.requests
    assert request.WhichOneof("prompt") == expected.WhichOneof("prompt")
    request.ClearField("sampling_params")
    assert request == expected


def test_only_given_sampling_fields_are_sent(client: AnyClient, gateway: FakeGateway) -> None:
    client.events(
        "Hi",
        model="tiny",
        client_request_id="job-1",
        temperature=0,
        top_p=None,
        stop="END",
        logit_bias={3: 1.5},
        stop_token_ids=[7, 8],
        json_schema="{}",
        seed=2**64 - 1,
    )
    (request,) = gateway.requests
    assert (request.model, request.client_request_id) == ("tiny", "job-1")
    assert {field.name for field, _ in request.sampling_params.ListFields()} == {
        "temperature",
        "stop",
        "logit_bias",
        "stop_token_ids",
        "constraint",
        "seed",
    }
    assert request.sampling_params.HasField("temperature")
    assert list(request.sampling_params.stop) == ["END"]
    assert request.sampling_params.logit_bias[3] == 1.5
    assert request.sampling_params.constraint.json_schema == "{}"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "token_ids": [1]}, "prompt"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": ["x"]}, "token_ids"),
        ({"messages": [("user", 3)]}, "messages[0]"),
        ({"messages": [("user", "x"), {"role": "user"}]}, "messages[1]"),
        ({"prompt": "a", "temperature": "hot"}, "sampling_params.temperature"),
        ({"prompt": "a", "max_tokens": -1}, "sampling_params.max_tokens"),
        ({"prompt": "a", "stop": [1]}, "sampling_params.stop"),
        ({"prompt": "a", "constraint": "x"}, "sampling_params.constraint"),
        ({"prompt": "a", "tempreature": 1}, "sampling_params.tempreature"),
    ],
)
def test_wrong_forms_are_refused_by_name_before_anything_is_sent(
    client: AnyClient, gateway: FakeGateway, arguments: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.events(**arguments)
    assert caught.value.field == field
    assert gateway.requests == []


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("sampling_params.top_p", "must be in (0, 1]"),
        CapacityError("full", 2.5),
        ModelNotFound("no such"),
    ],
)
def test_server_errors_are_typed_with_their_details(
    client: AnyClient, gateway: FakeGateway, error: EngineError
) -> None:
    gateway.script = [*answer("Hello")[:1], error]
    with pytest.raises(type(error)) as caught:
        client.events("Hi")
    assert vars(caught.value) == vars(error)


def test_deadline_is_kept(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.waits_after = 1
    with pytest.raises(DeadlineExceeded):
        client.events("Hi", timeout_s=0.3)


def test_stream_that_ends_early_is_an_error(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.script = [*answer("Hello")[:1]]
    with pytest.raises(EngineError, match="before the completion did"):
        client.events("Hi")
    gateway.script = [*answer("Hello", index=0)]
    with pytest.raises(EngineError, match="before the completion did"):
        client.events("Hi", n=2)


def test_several_completions_end_one_by_one(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.script = [*answer("A", [1], index=1), *answer("B", [2], index=0)]
    ends = [event.index for event in client.events("Hi", n=2) if isinstance(event, Complete)]
    assert ends == [1, 0]
    assert client.call("complete", "Hi", n=2).text == "B"


def test_closing_the_iterator_cancels_the_request(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.waits_after = 1
    assert len(client.events("Hi", limit=2)) == 2
    assert gateway.cancelled.wait(5)


def test_nobody_there_is_worker_unavailable(client: AnyClient) -> None:
    nobody = AnyClient(client._kind, "127.0.0.1:1")
    for method in ("list_models", "server_info", "is_serving"):
        with pytest.raises(WorkerUnavailable):
            nobody.call(method)
    with pytest.raises(WorkerUnavailable):
        nobody.events("Hi")


def test_trace_context_goes_along(client: AnyClient, gateway: FakeGateway) -> None:
    client.events("Hi")
    assert "traceparent" not in gateway.metadata
    with span("job") as current:
        client.events("Hi")
    assert gateway.metadata["traceparent"] == traceparent(current)


def test_questions_are_answered_with_values(client: AnyClient) -> None:
    assert client.call("tokenize", "a bb ccc") == [1, 2, 3]
    assert client.call("tokenize", messages=[("user", "four")]) == [4]
    assert client.call("detokenize", [1, 2]) == "[1, 2] True"
    assert client.call("detokenize", [1], skip_special_tokens=False) == "[1] False"
    assert client.call("abort", 11, 12) == (11,)
    (model,) = client.call("list_models")
    assert (model.name, model.context_length, model.has_chat_template) == ("tiny", 512, True)
    info = client.call("server_info")
    assert (info.version, info.num_running_requests, info.uptime_ms) == ("9.9", 1, 5000)
    assert [worker.worker_id for worker in info.connected("decode")] == ["decode-0"]
    assert info.connected("prefill") == ()
    assert info.workers[0].transports == ("shm", "grpc")
    assert (info.instance_id, info.workers[0].kernels) == ("gateway-1", "native (avx2)")


def test_health_tells_ready_not_ready_and_unknown_apart(client: AnyClient) -> None:
    assert client.call("is_serving") is True
    assert client.call("is_serving", "") is True
    assert client.call("is_serving", "not.Ready") is False
    assert client.call("is_serving", "no.Such") is False


def test_unknown_event_is_an_error(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.script = [pb.GenerateResponse()]
    with pytest.raises(EngineError, match="does not know"):
        client.events("Hi")


def test_end_without_a_reason_is_an_error(client: AnyClient, gateway: FakeGateway) -> None:
    gateway.script = [pb.GenerateResponse(complete=pb.GenerateComplete())]
    with pytest.raises(EngineError, match="why the completion ended"):
        client.events("Hi")


async def test_cancelled_task_cancels_the_request(target: str, gateway: FakeGateway) -> None:
    gateway.waits_after = 1
    arrived = asyncio.Event()

    async def consume() -> None:
        async with AsyncClient(target) as client:
            async for _ in client.generate("Hi"):
                arrived.set()

    task = asyncio.create_task(consume())
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(gateway.cancelled.wait, 5)


def test_threads_share_a_client(target: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with Client(target) as client, ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: client.complete("Hi").text, range(12)))
    assert texts == ["Hello there"] * 12


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"prompt": "a\udcff"}, "prompt", "byte 0xff at character 1 is not UTF-8 text"),
        ({"prompt": "\ud83d"}, "prompt", "U\\+D83D at character 0 is half of a surrogate pair"),
        ({"messages": [("user", "x"), ("user", "\udc80")]}, r"messages[1].content", "byte 0x80"),
        ({"messages": [("\udc80", "x")]}, "messages[0].role", "byte 0x80"),
        ({"prompt": "a", "stop": ["x", "\udc80"]}, "sampling_params.stop[1]", "byte 0x80"),
        ({"prompt": "a", "stop": "\udc80"}, "sampling_params.stop[0]", "byte 0x80"),
        ({"prompt": "a", "bad_words": ("\udc80",)}, "sampling_params.bad_words[0]", "byte 0x80"),
        ({"prompt": "a", "cache_salt": "\udc80"}, "sampling_params.cache_salt", "byte 0x80"),
        ({"prompt": "a", "regex": "\udc80"}, "sampling_params.regex", "byte 0x80"),
        ({"prompt": "a", "model": "\udc80"}, "model", "byte 0x80"),
        ({"prompt": "a", "client_request_id": "\udc80"}, "client_request_id", "byte 0x80"),
        ({"prompt": 5}, "prompt", "must be a text, not 5"),
        ({"messages": "Hi"}, "messages[0]", "must have a role and a content"),
        ({"messages": [("user",)]}, "messages[0]", "must have a role and a content"),
        ({"token_ids": [-1]}, "token_ids", "a list of whole numbers from 0 to 4294967295, not \\[-1\\]"),
        ({"token_ids": 5}, "token_ids", "a list of whole numbers"),
        (
            {"prompt": "a", "max_tokens": -1},
            "sampling_params.max_tokens",
            "a whole number from 0 to 4294967295, not -1",
        ),
        ({"prompt": "a", "seed": 2**64}, "sampling_params.seed", "a whole number from 0 to 18446744073709551615"),
        ({"prompt": "a", "priority": 2**31}, "sampling_params.priority", "from -2147483648 to 2147483647"),
        ({"prompt": "a", "temperature": "hot"}, "sampling_params.temperature", "must be a number, not 'hot'"),
        ({"prompt": "a", "ignore_eos": "x"}, "sampling_params.ignore_eos", "must be a truth value"),
        ({"prompt": "a", "logit_bias": {-1: 2}}, "sampling_params.logit_bias", "whole numbers from .* to numbers"),
        ({"prompt": "a", "logit_bias": [3]}, "sampling_params.logit_bias", "must be a mapping"),
    ],
)
def test_refusals_say_what_is_allowed(arguments: dict[str, Any], field: str, words: str) -> None:
    # The target is never dialled.
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest, match=words) as caught:
        client.generate(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("method", "given", "field"),
    [
        ("tokenize", ["\udc80"], "text"),
        ("tokenize", [5], "text"),
        ("detokenize", [[-1]], "token_ids"),
        ("abort", [-1], "request_ids"),
        ("is_serving", ["\udc80"], "service"),
    ],
)
def test_questions_refuse_wrong_forms_by_name(client: AnyClient, method: str, given: list[Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.call(method, *given)
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_target_that_is_no_address_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidRequest, match=r"target: must be host:port.*the port is missing"):
        AnyClient(kind, "localhost").call("list_models")


def test_proxy_for_the_web_is_passed_by(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for kind in ("blocking", "asyncio"):
        assert AnyClient(kind, target).call("list_models")
