"""Every field of the public request: what is taken, what is refused and under which name."""

import math
import re
import time
from dataclasses import replace
from typing import Any

import pytest

from engine.types import RequestId, SamplingParams, WorkerId
from gateway.front import convert
from gateway.relay.request import ChatMessage, ChatPrompt, GenerateCall, ModelLimits, TextPrompt, TokenPrompt
from gateway.relay.response import Completion, Ending, Started, Timings, TokenChunk, Usage
from kvrelay.errors import ContextTooLong, InvalidRequest
from kvrelay.v1 import inference_service_pb2 as inference_pb2
from kvrelay.v1 import sampling_pb2
from kvrelay.values import FinishReason, PositionLogprobs, TokenLogprob
from kvrelay.wire.engine.sampling import sampling_params_to_proto

LIMITS = ModelLimits(vocab_size=100, max_token_bytes=4, max_prompt_bytes=10_000, max_sequence_tokens=50)


def to_call(prompt: Any = "hello", limits: ModelLimits = LIMITS, **params: Any) -> GenerateCall:
    message = inference_pb2.GenerateRequest(text=prompt, sampling_params=sampling_pb2.SamplingParams(**params))
    return convert.to_call(message, limits)


# Per field of the proto: values taken with what they become, and values refused.
TAKEN: dict[str, list[tuple[Any, Any]]] = {
    "n": [(1, 1), (16, 16)],
    "max_tokens": [(1, 1), (49, 49)],
    "min_tokens": [(0, 0), (3, 3)],
    "temperature": [(0.0, 0.0), (2.0, 2.0)],
    "top_p": [(0.5, 0.5), (1.0, 1.0)],
    "top_k": [(0, 0), (40, 40), (2**31 - 1, 2**31 - 1)],
    "min_p": [(0.0, 0.0), (1.0, 1.0)],
    "seed": [(0, 0), (2**64 - 1, 2**64 - 1)],
    "repetition_penalty": [(0.5, 0.5), (2.0, 2.0)],
    "presence_penalty": [(-2.0, -2.0), (2.0, 2.0)],
    "frequency_penalty": [(-2.0, -2.0), (2.0, 2.0)],
    "stop": [(["a", "b", "a"], ("a", "b")), ([str(i) for i in range(16)], tuple(str(i) for i in range(16)))],
    "stop_token_ids": [([1, 99, 1], frozenset({1, 99}))],
    "include_stop_str": [(True, True)],
    "ignore_eos": [(True, True)],
    "logit_bias": [({0: -100.0, 99: 100.0}, {0: -100.0, 99: 100.0})],
    "allowed_token_ids": [([], None), ([4, 5], frozenset({4, 5}))],
    "bad_words": [(["bad", "worse"], ("bad", "worse"))],
    "logprobs": [(0, 0), (20, 20)],
    "prompt_logprobs": [],
    "skip_special_tokens": [(False, False)],
    "priority": [(-5, -5), (7, 7)],
    "cache_salt": [("tenant", "tenant")],
    "constraint": [],
    "num_draft_tokens": [(0, 0), (8, 8)],
}
REFUSED: list[tuple[str, Any, str]] = [
    ("n", 0, "n"),
    ("n", 17, "n"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", 50, "max_tokens"),
    ("stop", [""], "stop[0]"),
    ("stop", ["fine", "x" * 5000], "stop[1]"),
    ("stop", ["x"] * 17, "stop"),
    ("stop_token_ids", [100], "stop_token_ids"),
    ("stop_token_ids", [1] * 101, "stop_token_ids"),
    ("top_k", 2**31, "top_k"),
    ("top_k", 2**32 - 1, "top_k"),
    ("num_draft_tokens", 2**31, "num_draft_tokens"),
    ("repetition_penalty", 1e-44, "repetition_penalty"),
    ("repetition_penalty", 0.0099, "repetition_penalty"),
    ("logit_bias", {100: 1.0}, "logit_bias"),
    ("logit_bias", {1: 100.5}, "logit_bias[1]"),
    ("logit_bias", {1: math.nan}, "logit_bias[1]"),
    ("allowed_token_ids", [100], "allowed_token_ids"),
    ("bad_words", [""], "bad_words[0]"),
    ("bad_words", ["x"] * 1025, "bad_words"),
    ("logprobs", 21, "logprobs"),
    ("prompt_logprobs", 0, "prompt_logprobs"),
    ("constraint", sampling_pb2.OutputConstraint(), "constraint"),
    ("cache_salt", "é" * 129, "cache_salt"),
]
for _name, _low, _high in (
    ("temperature", -0.5, 2.5),
    ("top_p", 0.0, 1.5),
    ("min_p", -0.5, 1.5),
    ("repetition_penalty", 0.0, 2.5),
    ("presence_penalty", -2.5, 2.5),
    ("frequency_penalty", -2.5, 2.5),
):
    REFUSED += [(_name, value, _name) for value in (_low, _high, math.nan, math.inf, -math.inf)]


def read(call: GenerateCall, name: str) -> Any:
    """Return what a field of the proto has become."""
    source = call if name in GenerateCall.__slots__ and name != "sampling_params" else call.sampling_params
    return getattr(source, name)


def test_the_tables_know_every_field() -> None:
    fields = set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert set(TAKEN) == fields
    ranged = {name for name, _, _ in REFUSED}
    unlimited = {"min_tokens", "seed", "include_stop_str", "ignore_eos", "skip_special_tokens", "priority"}
    assert ranged | unlimited == fields


@pytest.mark.parametrize(
    ("name", "value", "expected"), [(name, *pair) for name, pairs in TAKEN.items() for pair in pairs]
)
def test_value_in_range_is_taken(name: str, value: Any, expected: Any) -> None:
    assert read(to_call(**{name: value}), name) == expected


@pytest.mark.parametrize(("name", "value", "field"), REFUSED)
def test_value_out_of_range_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_call(**{name: value})
    assert caught.value.field == f"sampling_params.{field}"


def test_absent_fields_mean_their_defaults() -> None:
    call = to_call()
    assert (call.max_tokens, call.seed, call.n) == (None, None, 1)
    assert call.sampling_params == SamplingParams()


def test_several_greedy_completions_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_call(n=2, temperature=0.0)
    assert caught.value.field == "sampling_params.n"
    assert to_call(n=2, temperature=0.5).n == 2


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        to_call(min_tokens=5, max_tokens=4)
    assert caught.value.field == "sampling_params.min_tokens"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.GenerateRequest(), "prompt"),
        (inference_pb2.GenerateRequest(text=""), "text"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), "token_ids.ids"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[100])), "token_ids.ids"),
        (inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt()), "chat.messages"),
        (
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(content="no role")])
            ),
            "chat.messages[0].role",
        ),
        (inference_pb2.GenerateRequest(text="x", client_request_id="x" * 129), "client_request_id"),
    ],
)
def test_unusable_request_is_refused_by_name(message: inference_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert.to_call(message, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.GenerateRequest(text="x" * 201), "text"),
        (inference_pb2.GenerateRequest(text="é" * 101), "text"),
        (inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1] * 50)), "token_ids.ids"),
        (
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="x" * 200)])
            ),
            "chat.messages",
        ),
        (
            inference_pb2.GenerateRequest(
                chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="u")] * 51)
            ),
            "chat.messages",
        ),
    ],
)
def test_prompt_that_cannot_fit_is_refused_untokenized(message: inference_pb2.GenerateRequest, field: str) -> None:
    with pytest.raises(ContextTooLong) as caught:
        convert.to_call(message, LIMITS)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens": 60}, "60 tokens and a prompt do not fit the 50 tokens that a decode worker's KV cache holds"),
        ({"text": "x" * 201}, "over 200 bytes, which cannot fit the 50 tokens that a decode worker's KV cache holds"),
        ({"text": "x" * 10_001}, "over 10000 bytes, the most that is taken here"),
    ],
)
def test_small_cache_is_not_called_the_context(changes: dict[str, Any], words: str) -> None:
    limits = replace(LIMITS, context_length=8192)
    with pytest.raises(ContextTooLong, match=re.escape(words)):
        to_call(changes.pop("text", "hi"), limits, **changes)


def test_without_workers_only_the_byte_limit_holds() -> None:
    limits = ModelLimits(vocab_size=100, max_token_bytes=4, max_prompt_bytes=1_000, max_sequence_tokens=None)
    assert to_call("x" * 1_000, limits).prompt == TextPrompt("x" * 1_000)
    with pytest.raises(ContextTooLong):
        to_call("x" * 1_001, limits)


def test_prompts_become_values() -> None:
    chat = inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role="user", content="hi")], add_generation_prompt=False
    )
    assert convert.to_call(inference_pb2.GenerateRequest(chat=chat), LIMITS).prompt == ChatPrompt(
        (ChatMessage("user", "hi"),), add_generation_prompt=False
    )
    tokens = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 2]))
    assert convert.to_call(tokens, LIMITS).prompt == TokenPrompt((1, 2))
    chat.ClearField("add_generation_prompt")
    prompt = convert.to_tokenize_prompt(inference_pb2.TokenizeRequest(chat=chat), LIMITS)
    assert prompt == ChatPrompt((ChatMessage("user", "hi"),), add_generation_prompt=True)


def test_responses_carry_every_field() -> None:
    logprobs = PositionLogprobs(TokenLogprob(5, -0.5, 1), ())
    started = convert.started_to_proto(Started(RequestId(9), 8, "model", 7)).started
    assert (started.request_id, started.seed, started.model, started.prompt_tokens) == (9, 8, "model", 7)
    chunk = convert.chunk_to_proto(2, TokenChunk(4, (5,), "five", (logprobs,))).chunk
    assert (chunk.index, chunk.token_index, list(chunk.token_ids), chunk.text) == (2, 4, [5], "five")
    assert chunk.logprobs[0].sampled.token_id == 5
    completion = Completion(
        Ending(FinishReason.STOP, matched_stop_str="end"),
        Usage(1, 2, 3, 4, 5),
        Timings(1, 2, 3, 4, 5, 6, 7, 8, "shm"),
        WorkerId("p"),
        WorkerId("d"),
    )
    complete = convert.completion_to_proto(1, completion).complete
    assert complete.finish_reason == sampling_pb2.FINISH_REASON_STOP
    assert complete.matched_stop_str == "end"
    for message in (complete, complete.usage, complete.timings):
        values = {field.name for field, _ in message.ListFields()}
        assert values == set(message.DESCRIPTOR.fields_by_name) - {"matched_stop_token_id"}


def test_lists_that_are_read_for_every_completion_are_short() -> None:
    """The longest that are taken, for the most completions: writing them all must not hold up the event loop."""
    wide = replace(LIMITS, vocab_size=200_000)
    longest: dict[str, Any] = {
        "n": convert.MAX_COMPLETIONS,
        "logit_bias": dict.fromkeys(range(convert.MAX_TOKEN_ENTRIES), 1.0),
        "stop_token_ids": range(convert.MAX_TOKEN_ENTRIES),
        "allowed_token_ids": range(convert.MAX_ALLOWED_TOKENS),
    }

    def call_with(fields: dict[str, Any]) -> GenerateCall:
        params = sampling_pb2.SamplingParams(**fields)
        return convert.to_call(inference_pb2.GenerateRequest(text="x", sampling_params=params), wide)

    params = call_with(longest).sampling_params
    times_s = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(convert.MAX_COMPLETIONS):
            sampling_params_to_proto(params).SerializeToString()
        times_s.append(time.process_time() - started)
    # 8 ms where this was written, 600 ms for lists of a whole vocabulary.
    assert min(times_s) < 0.1
    for name, value in longest.items():
        if name != "n":
            longer = {**value, 150_000: 1.0} if isinstance(value, dict) else [*value, 150_000]
            with pytest.raises(InvalidRequest, match=f"{name}: at most"):
                call_with({name: longer})
