"""From a call to completions: fitting the context, defaults, seeds, ids, bad words."""

from dataclasses import replace
from typing import Any

import pytest

from engine.model.files.source import resolve_model
from engine.types import RequestId, SamplingParams
from gateway.relay.prompt import resolve
from gateway.relay.request import (
    ChatMessage,
    ChatPrompt,
    CompletionRequest,
    GenerateCall,
    ModelLimits,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from gateway.relay.tokenizer import INLINE_BYTES, TokenizerService
from kvrelay.errors import ContextTooLong, InvalidRequest
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer

CONTEXT = 50
LIMITS = ModelLimits(vocab_size=49152, max_token_bytes=81, max_prompt_bytes=100_000, max_sequence_tokens=CONTEXT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve_model("smollm2").path)


async def run(
    tokenizer: Tokenizer, prompt: Prompt, limits: ModelLimits = LIMITS, **changes: Any
) -> list[CompletionRequest]:
    fields: dict[str, Any] = {"max_tokens": None, "seed": None, "sampling_params": SamplingParams(), **changes}
    call = GenerateCall(model="", prompt=prompt, **fields)
    service = TokenizerService(tokenizer)
    try:
        return await resolve(
            call,
            first_request_id=RequestId(100),
            tokenizer=service,
            max_sequence_tokens=CONTEXT,
            limits=limits,
            arrival=5.0,
            deadline=9.0,
        )
    finally:
        service.close()


def tokens(count: int) -> TokenPrompt:
    return TokenPrompt(tuple(range(1, count + 1)))


@pytest.mark.parametrize(("num_tokens", "expected"), [(1, 49), (40, 10), (49, 1)])
async def test_default_is_what_is_left_of_the_context(tokenizer: Tokenizer, num_tokens: int, expected: int) -> None:
    (request,) = await run(tokenizer, tokens(num_tokens))
    assert request.engine_request.sampling_params.max_tokens == expected
    assert request.engine_request.num_prompt_tokens == num_tokens
    assert (request.arrival, request.deadline) == (5.0, 9.0)


async def test_prompt_that_leaves_no_room_names_the_prompt(tokenizer: Tokenizer) -> None:
    with pytest.raises(ContextTooLong) as caught:
        await run(tokenizer, TextPrompt("word " * 60))
    assert caught.value.field == "text"


@pytest.mark.parametrize("form", ["text", "chat"])
async def test_only_prompts_with_a_token_that_the_model_lacks_are_refused(tokenizer: Tokenizer, form: str) -> None:
    last = tokenizer.vocab_size - 1
    word = tokenizer.decode([last])
    assert tokenizer.encode(word) == [last]
    limits = replace(LIMITS, vocab_size=last)

    def prompt(text: str) -> TextPrompt | ChatPrompt:
        return TextPrompt(text) if form == "text" else ChatPrompt((ChatMessage("user", text),))

    assert await run(tokenizer, prompt("the"), limits=limits)
    with pytest.raises(InvalidRequest, match=rf"token ids must be in \[0, {last - 1}\], not {last}") as caught:
        await run(tokenizer, prompt(f"the{word}"), limits=limits)
    assert caught.value.field == ("text" if form == "text" else "chat.messages")
    (request,) = await run(tokenizer, prompt("the"), limits=limits, bad_words=(word, "the"))
    bad_words = request.engine_request.sampling_params.bad_words
    assert bad_words
    assert all(max(token_ids) < last for token_ids in bad_words)


async def test_max_tokens_that_do_not_fit_are_named(tokenizer: Tokenizer) -> None:
    (request,) = await run(tokenizer, tokens(40), max_tokens=10)
    assert request.engine_request.sampling_params.max_tokens == 10
    with pytest.raises(ContextTooLong) as caught:
        await run(tokenizer, tokens(40), max_tokens=11)
    assert caught.value.field == "sampling_params.max_tokens"


@pytest.mark.parametrize(
    ("context_length", "room"),
    [
        (CONTEXT, "the context of 50 tokens"),
        (8192, "the 50 tokens that a decode worker's KV cache holds (the model's context is 8192)"),
    ],
)
async def test_what_is_too_small_is_named(tokenizer: Tokenizer, context_length: int, room: str) -> None:
    limits = replace(LIMITS, context_length=context_length)
    with pytest.raises(ContextTooLong) as caught:
        await run(tokenizer, tokens(50), limits)
    told = f"the prompt has 50 tokens; with at least one new token it must fit {room}"
    assert caught.value.description == told
    with pytest.raises(ContextTooLong) as caught:
        await run(tokenizer, tokens(40), limits, max_tokens=11)
    assert caught.value.description == f"the prompt has 40 tokens, which leaves 10 of {room}, not 11"


async def test_min_tokens_that_do_not_fit_are_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await run(tokenizer, tokens(40), sampling_params=SamplingParams(min_tokens=11))
    assert caught.value.field == "sampling_params.min_tokens"


async def test_completions_have_ids_and_seeds_in_a_row(tokenizer: Tokenizer) -> None:
    requests = await run(tokenizer, tokens(3), n=3, seed=2**64 - 2)
    assert [request.engine_request.request_id for request in requests] == [100, 101, 102]
    assert [request.engine_request.sampling_params.seed for request in requests] == [2**64 - 2, 2**64 - 1, 0]
    assert [request.index for request in requests] == [0, 1, 2]


async def test_seed_is_drawn_when_none_is_given(tokenizer: Tokenizer) -> None:
    seeds = {(await run(tokenizer, tokens(3)))[0].engine_request.sampling_params.seed for _ in range(3)}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_bad_words_are_banned_with_and_without_a_space_before(tokenizer: Tokenizer) -> None:
    (request,) = await run(tokenizer, tokens(3), bad_words=("Paris", "Paris"))
    assert request.engine_request.sampling_params.bad_words == (
        tuple(tokenizer.encode("Paris", add_special_tokens=False)),
        tuple(tokenizer.encode(" Paris", add_special_tokens=False)),
    )


async def test_long_texts_are_tokenized_on_a_thread_with_the_same_result(tokenizer: Tokenizer) -> None:
    service = TokenizerService(tokenizer)
    try:
        for size in (INLINE_BYTES, INLINE_BYTES + 1):
            text = ("a word or two " * 1000)[:size]
            token_ids = await service.encode_prompt(TextPrompt(text))
            assert list(token_ids) == tokenizer.encode(text)
            assert await service.decode(token_ids, skip_special_tokens=True) == text
    finally:
        service.close()
