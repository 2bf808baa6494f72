"""Requests through a gateway with fake workers: what the client sees of tokens, text, stops, counts and timings."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from engine.model.files.source import ModelSource
from kvrelay.serving.telemetry import in_memory_spans
from kvrelay.text.tokenizer import Tokenizer
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import prefill_service_pb2 as prefill_pb2
from kvrelay.v1 import sampling_pb2
from tests.integration.gateway_harness import ANSWER, PROMPT, Answer, harness, load_model, until

Model = tuple[ModelSource, Tokenizer]
pytestmark = pytest.mark.usefixtures("no_leaks")
LENGTH, STOP = sampling_pb2.FINISH_REASON_LENGTH, sampling_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model()


async def test_answer_has_the_workers_tokens_and_their_text(model: Model) -> None:
    async with harness(model) as cluster:
        answer = await cluster.generate(cluster.request(temperature=0.0))
        assert answer.text() == ANSWER
        assert answer.token_ids() == cluster.answer
        complete = answer.complete[0]
        assert complete.finish_reason == STOP
        assert complete.matched_stop_token_id == cluster.eos
        assert complete.usage.completion_tokens == len(cluster.answer)
        assert complete.usage.prompt_tokens == len(cluster.tokenizer.encode(PROMPT))
        assert (complete.prefill_worker, complete.decode_worker) == ("prefill-0", "decode-0")
        assert not cluster.decodes[0].aborted
        assert not cluster.prefills[0].aborted


async def test_characters_are_never_split_between_chunks(model: Model) -> None:
    async with harness(model) as cluster:
        answer = await cluster.generate(cluster.request(temperature=0.0))
        token_ids: list[int] = []
        text = ""
        for chunk in answer.chunks:
            token_ids += chunk.token_ids
            text += chunk.text
            # All that is whole by now, and nothing of a character that is not.
            assert text == cluster.tokenizer.decode(token_ids).rstrip("\ufffd")
        decoded = [cluster.tokenizer.decode(cluster.answer[:end]) for end in range(len(cluster.answer))]
        assert any(part.endswith("\ufffd") for part in decoded)
        assert token_ids == cluster.answer


async def test_started_names_id_seed_and_model(model: Model) -> None:
    async with harness(model) as cluster:
        given = await cluster.generate(cluster.request(seed=7))
        drawn = [await cluster.generate(cluster.request()) for _ in range(2)]
        assert given.started is not None
        assert given.started.seed == 7
        assert given.started.model == "fake"
        seeds = {answer.started.seed for answer in drawn if answer.started is not None}
        ids = {answer.started.request_id for answer in (*drawn, given) if answer.started is not None}
        assert len(seeds) == 2
        assert len(ids) == 3
        sent = [command.request.sampling_params.seed for command in cluster.decodes[0].seen(decode_pb2.ReserveCommand)]
        assert sent[0] == 7
        assert set(sent[1:]) == seeds


async def test_timings_come_from_workers_and_gateway(model: Model) -> None:
    async with harness(model) as cluster:
        timings = (await cluster.generate(cluster.request())).complete[0].timings
        assert timings.prefill_ns == 2_000
        assert timings.queue_ns > 1_000
        assert (timings.transfer_ns, timings.transfer_bytes, timings.transport) == (3_000, 4096, "inproc")
        assert timings.transfer_exposed_ns == 700
        assert 0 < timings.first_token_ns <= timings.total_ns
        assert 0 < timings.decode_ns < timings.total_ns


async def test_max_tokens_one_ends_without_decode_work(model: Model) -> None:
    async with harness(model) as cluster:
        answer = await cluster.generate(cluster.request(max_tokens=1))
        assert answer.token_ids() == cluster.answer[:1]
        assert answer.complete[0].finish_reason == LENGTH
        assert answer.complete[0].usage.completion_tokens == 1
        assert not cluster.decodes[0].commits
        await until(lambda: len(cluster.decodes[0].aborted) == 1)


async def test_stop_token_on_the_first_token_ends_there(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.answer[:] = [cluster.eos]
        answer = await cluster.generate(cluster.request())
        assert answer.token_ids() == [cluster.eos]
        assert answer.text() == ""
        assert answer.complete[0].finish_reason == STOP
        assert answer.complete[0].usage.completion_tokens == 1


async def test_stop_string_on_the_first_token_ends_there(model: Model) -> None:
    async with harness(model) as cluster:
        first_text = cluster.tokenizer.decode(cluster.answer[:1], is_continuation=True)
        answer = await cluster.generate(cluster.request(stop=[first_text]))
        assert answer.token_ids() == cluster.answer[:1]
        assert answer.text() == ""
        assert answer.complete[0].matched_stop_str == first_text
        assert answer.complete[0].usage.completion_tokens == 1
        await until(lambda: len(cluster.decodes[0].aborted) == 1)


@pytest.mark.parametrize("tokens_per_output", [1, 3, 50])
@pytest.mark.parametrize("is_included", [False, True])
async def test_stop_string_across_tokens_cuts_text_tokens_logprobs_and_usage(
    model: Model, tokens_per_output: int, is_included: bool
) -> None:
    stop = "is Paris, a ci"
    async with harness(model) as cluster:
        cluster.cluster.script.tokens_per_output = tokens_per_output
        cluster.cluster.script.pace_s = 0.01
        request = cluster.request(stop=["never there", stop], include_stop_str=is_included, logprobs=0)
        answer = await cluster.generate(request)
        text, tokens = answer.text(), answer.token_ids()
        assert text == ANSWER[: ANSWER.index(stop)] + (stop if is_included else "")
        assert tokens == cluster.answer[: len(tokens)]
        decode = cluster.tokenizer.decode
        assert stop in decode(tokens, is_continuation=True)
        assert stop not in decode(tokens[:-1], is_continuation=True)
        assert [entry.sampled.token_id for chunk in answer.chunks for entry in chunk.logprobs] == tokens
        complete = answer.complete[0]
        assert complete.finish_reason == STOP
        assert complete.matched_stop_str == stop
        assert complete.usage.completion_tokens == len(tokens)
        if tokens_per_output < 50:
            await until(lambda: len(cluster.decodes[0].aborted) == 1)


async def test_decodes_tokens_wait_for_prefills_first(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.prefills[0].may_send_first_token.clear()
        running = asyncio.create_task(cluster.generate(cluster.request()))
        await until(lambda: len(cluster.decodes[0].commits) == 1 and not cluster.decodes[0].running)
        assert not running.done()
        cluster.prefills[0].may_send_first_token.set()
        answer = await running
        assert answer.token_ids() == cluster.answer
        assert answer.text() == ANSWER


async def test_duplicate_outputs_are_dropped(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].sends_duplicates = True
        answer = await cluster.generate(cluster.request(logprobs=0))
        assert answer.token_ids() == cluster.answer
        assert answer.complete[0].usage.completion_tokens == len(cluster.answer)


async def test_n_completions_share_one_stream_with_seeds_counting_up(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.cluster.script.tokens = lambda request: cluster.answer[request.sampling_params.seed % 10 :]
        answer = await cluster.generate(cluster.request(n=3, seed=2**64 - 1))
        assert sorted(answer.complete) == [0, 1, 2]
        for index, seed in enumerate((2**64 - 1, 0, 1)):
            assert answer.token_ids(index) == cluster.answer[seed % 10 :]
            assert answer.complete[index].usage.completion_tokens == len(cluster.answer) - seed % 10


async def test_short_prompt_is_prefilled_by_decode(model: Model) -> None:
    async with harness(model) as cluster:
        answer = await cluster.generate(inference_pb2.GenerateRequest(text="Hi"))
        assert answer.text() == ANSWER
        assert answer.complete[0].prefill_worker == answer.complete[0].decode_worker == "decode-0"
        assert answer.complete[0].timings.transport == ""
        assert answer.complete[0].timings.prefill_ns == 2_000
        assert not cluster.prefills[0].seen(prefill_pb2.PrefillCommand)


async def test_uncached_rest_decides_who_prefills(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.decodes[0].num_cached_tokens = 16
        answer = await cluster.generate(cluster.request())
        assert answer.complete[0].usage.cached_tokens == 16
        assert answer.complete[0].prefill_worker == "decode-0"


async def test_without_prefill_workers_decode_prefills(model: Model) -> None:
    async with harness(model, num_prefill=0) as cluster:
        assert (await cluster.generate(cluster.request())).text() == ANSWER


async def test_chat_and_token_prompts_reach_the_workers(model: Model) -> None:
    async with harness(model) as cluster:
        messages = [inference_pb2.ChatMessage(role="user", content=PROMPT)]
        await cluster.generate(inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages)))
        await cluster.generate(inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=range(100, 150))))
        chat, tokens = (command.request for command in cluster.decodes[0].seen(decode_pb2.ReserveCommand))
        assert list(chat.token_ids) == cluster.tokenizer.encode_chat([("user", PROMPT)])
        assert list(tokens.token_ids) == list(range(100, 150))


async def test_every_parameter_travels_to_both_workers(model: Model) -> None:
    async with harness(model) as cluster:
        params: dict[str, Any] = {
            "max_tokens": 40, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 9, "min_p": 0.125, "seed": 5,
            "repetition_penalty": 1.25, "presence_penalty": 0.5, "frequency_penalty": -0.5, "stop_token_ids": [7],
            "ignore_eos": True, "logit_bias": {3: -1.5}, "allowed_token_ids": [1, 2, 3], "logprobs": 4,
            "priority": -3, "cache_salt": "tenant", "num_draft_tokens": 0,
        }  # fmt: skip
        await cluster.generate(cluster.request(**params, bad_words=["Paris"]))
        reserve = cluster.decodes[0].seen(decode_pb2.ReserveCommand)[0].request
        prefill = cluster.prefills[0].seen(prefill_pb2.PrefillCommand)[0].request
        sent = sampling_pb2.SamplingParams(**params)
        for request in (reserve, prefill):
            assert request.sampling_params == sent
            words = [tuple(word.token_ids) for word in request.bad_words_token_ids]
            encode = cluster.tokenizer.encode
            assert words == [tuple(encode("Paris", False)), tuple(encode(" Paris", False))]


async def test_a_client_that_reads_slowly_gets_all_tokens_in_fewer_chunks(model: Model) -> None:
    async with harness(model) as cluster:
        cluster.answer[:] = (cluster.answer * 100)[:4000]
        call = cluster.stub.Generate(cluster.request(max_tokens=4000, ignore_eos=True, logprobs=0))
        answer = Answer()
        answer.add(await call.read())
        await until(lambda: bool(cluster.decodes[0].commits) and not cluster.decodes[0].running, timeout_s=20.0)
        while (message := await call.read()) is not grpc.aio.EOF:
            answer.add(message)
        assert answer.token_ids() == cluster.answer
        assert len(answer.chunks) < 4000


async def test_a_request_is_one_trace_through_both_workers(model: Model) -> None:
    with in_memory_spans() as exporter:
        async with harness(model) as cluster:
            await cluster.generate(cluster.request())
            reserve = cluster.decodes[0].seen(decode_pb2.ReserveCommand)[0].request.traceparent
            prefill = cluster.prefills[0].seen(prefill_pb2.PrefillCommand)[0].request.traceparent
        spans = {span.name: span for span in exporter.get_finished_spans()}
    root = spans["gateway.generate"]
    assert root.context is not None
    for name in ("gateway.reserve", "gateway.prefill_wait"):
        parent = spans[name].parent
        assert parent is not None
        assert parent.span_id == root.context.span_id
    trace_id = format(root.context.trace_id, "032x")
    assert reserve.split("-")[1] == prefill.split("-")[1] == trace_id
