"""The OpenAI-compatible door against the SDK that people have, and against clients that behave badly."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI

from engine.model.files.source import ModelSource
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import decode_service_pb2 as decode_pb2

from .gateway_harness import ANSWER, Harness, harness, load_model, until

pytestmark = pytest.mark.usefixtures("no_leaks")

Model = tuple[ModelSource, Tokenizer]

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module", name="model")
def fixture_model() -> Model:
    return load_model()


def port_of(cluster: Harness) -> int:
    assert cluster.gateway.http is not None
    return cluster.gateway.http.port


@asynccontextmanager
async def served(model: Model, **settings: Any) -> AsyncIterator[tuple[Harness, Any]]:
    async with harness(model, http_port=0, **settings) as cluster:
        url = f"http://127.0.0.1:{port_of(cluster)}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield cluster, client
        await cluster.check_idle()


async def test_chat_is_answered_whole(model: Model) -> None:
    async with served(model) as (cluster, client):
        answer = await client.chat.completions.create(model="fake", messages=HELLO, temperature=0)
        (choice,) = answer.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == ANSWER
        assert choice.finish_reason == "stop"
        assert choice.logprobs is None
        assert answer.usage.completion_tokens == len(cluster.answer)
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


async def test_stream_has_the_same_text_and_ends_with_usage(model: Model) -> None:
    async with served(model) as (cluster, client):
        texts: dict[int, str] = {0: "", 1: ""}
        ends: dict[int, str] = {}
        usage = None
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, n=2, seed=-3, stream=True, stream_options={"include_usage": True}
        )
        async for event in stream:
            for choice in event.choices:
                assert choice.index not in ends
                texts[choice.index] += choice.delta.content or ""
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
            if event.usage is not None:
                assert not event.choices
                usage = event.usage
        assert texts == {0: ANSWER, 1: ANSWER}
        assert ends == {0: "stop", 1: "stop"}
        assert usage is not None
        assert usage.completion_tokens == 2 * len(cluster.answer)


async def test_logprobs_have_each_apis_form(model: Model) -> None:
    async with served(model) as (cluster, client):
        chat = await client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=2)
        entries = chat.choices[0].logprobs.content
        assert len(entries) == len(cluster.answer)
        assert bytes(entries[0].bytes).decode() == entries[0].token
        plain = await client.completions.create(model="fake", prompt="Hi", max_tokens=99, logprobs=1)
        logprobs = plain.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == len(cluster.answer)
        assert (logprobs.text_offset or [])[:2] == [0, len(logprobs.tokens[0])]


async def test_prompt_may_be_tokens(model: Model) -> None:
    async with served(model) as (_, client):
        answer = await client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=99)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 3
        assert answer.choices[0].text == ANSWER


async def test_fields_beyond_openais_reach_the_workers(model: Model) -> None:
    async with served(model) as (cluster, client):
        extra = {"top_k": 9, "min_p": 0.125, "repetition_penalty": 1.25, "min_tokens": 2, "stop_token_ids": [7]}
        await client.completions.create(
            model="fake", prompt="Hi", max_tokens=40, extra_body={**extra, "ignore_eos": True, "cache_salt": "tenant"}
        )
        params = cluster.decodes[0].seen(decode_pb2.ReserveCommand)[0].request.sampling_params
        assert (params.top_k, params.min_p, params.repetition_penalty, params.min_tokens) == (9, 0.125, 1.25, 2)
        assert list(params.stop_token_ids) == [7]
        assert (params.ignore_eos, params.cache_salt, params.max_tokens) == (True, "tenant", 40)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"top_p": "x"}, "top_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, None),
        ({"n": 17}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 9, "stream": True}, "temperature"),
    ],
)
async def test_wrong_field_is_a_400_that_names_it(model: Model, fields: dict[str, Any], param: str | None) -> None:
    async with served(model) as (_, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **fields})
        body: Any = caught.value.body
        assert body["type"] == "invalid_request_error"
        assert param is None or body["param"] == param
        assert body["message"]


async def test_unknown_models_and_full_queues_have_their_classes(model: Model) -> None:
    async with served(model, max_running_requests=1, max_queued_requests=0) as (cluster, client):
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nobody", prompt="Hi")
        cluster.prefills[0].may_prefill.clear()
        running = asyncio.create_task(client.completions.create(model="fake", prompt="Hi", max_tokens=99))
        await until(lambda: cluster.gateway.admission.num_running_slots == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="fake", prompt="Hi")
        assert int(caught.value.response.headers["retry-after"]) >= 1
        cluster.prefills[0].may_prefill.set()
        assert (await running).choices[0].text == ANSWER


async def test_models_tokens_and_states_are_told(model: Model) -> None:
    async with served(model) as (cluster, client):
        assert [each.id for each in (await client.models.list()).data] == ["fake"]
        assert (await client.models.retrieve("fake")).owned_by == "kvrelay"
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port_of(cluster)}") as plain:
            told = (await plain.post("/tokenize", json={"prompt": "The capital"})).json()
            assert told["tokens"] == cluster.tokenizer.encode("The capital")
            assert (await plain.get("/health")).status_code == 200
            assert (await plain.get("/ready")).status_code == 200
            assert (await plain.get("/nowhere")).json()["error"]["code"] == "unknown_path"
            assert (await plain.get("/v1/completions")).status_code == 405
            for body in (b"", b"{", b"[]", b"\xff", b'{"model": 1, "prompt": "x"}'):
                refused = await plain.post("/v1/completions", content=body)
                assert refused.status_code == 400
                assert refused.json()["error"]["type"] == "invalid_request_error"
            await cluster.decodes[0].stop()
            await until(lambda: not cluster.gateway.info.is_ready())
            assert (await plain.get("/ready")).status_code == 503


@pytest.mark.parametrize("is_declared", [True, False])
async def test_body_that_is_too_long_is_refused_unread(model: Model, is_declared: bool) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    async with (
        served(model, max_body_bytes=4096) as (cluster, _),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port_of(cluster)}") as plain,
    ):
        content: Any = b"x" * 8192 if is_declared else parts()
        assert (await plain.post("/v1/completions", content=content)).status_code == 413


@pytest.mark.parametrize("is_stream", [True, False])
async def test_client_that_goes_away_ends_its_request(model: Model, is_stream: bool) -> None:
    async with served(model) as (cluster, _):
        cluster.prefills[0].may_prefill.clear()
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster))
        body = json.dumps({"model": "fake", "prompt": "Hi", "stream": is_stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        await until(lambda: cluster.gateway.generation.num_running == 1)
        writer.close()
        await until(lambda: cluster.gateway.generation.num_running == 0)
        cluster.prefills[0].may_prefill.set()
        await cluster.check_idle()


async def test_reader_that_stops_is_given_up_and_harms_nobody(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # Until its timer has run out, uvicorn keeps what a connection held.
    monkeypatch.setattr("gateway.front.http.server.KEEP_ALIVE_S", 1)
    async with served(model, write_timeout_s=0.3) as (cluster, _):
        cluster.answer = [*cluster.answer[:-1] * 200, cluster.eos]
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(cluster), limit=1024)
        body = json.dumps({"model": "fake", "prompt": "Hi", "stream": True, "max_tokens": 8000, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body)
        await writer.drain()
        await reader.readline()
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a socket
        await until(lambda: cluster.gateway.generation.num_running == 1)
        await until(lambda: cluster.gateway.generation.num_running == 0, timeout_s=20)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
        await cluster.check_idle()
