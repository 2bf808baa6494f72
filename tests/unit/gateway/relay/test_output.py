"""What the client sees of a completion: cuts, endings, counts."""

from dataclasses import dataclass

import pytest

from engine.types import RequestId, SamplingParams, SequenceOutput
from gateway.relay.output import CompletionOutput
from kvrelay.errors import EngineError
from kvrelay.values import FinishReason

WORDS = {1: "one ", 2: "two ", 3: "three ", 9: "<eos>"}


@dataclass
class Delta:
    text: str
    matched_stop: str | None = None


class FakeText:
    """Shows a token's word with the token after it, and stops at `stop_token`."""

    def __init__(self, stop_token: int | None = None) -> None:
        self._stop_token = stop_token
        self._held = ""
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> Delta:
        shown, self._held = self._held, WORDS[token_id]
        if token_id == self._stop_token:
            self.matched_stop = WORDS[token_id]
            return Delta(shown, self.matched_stop)
        return Delta(shown)

    def flush(self) -> str:
        return self._held


def make(stop_token: int | None = None, max_tokens: int = 10) -> CompletionOutput:
    params = SamplingParams(max_tokens=max_tokens)
    return CompletionOutput(params, prompt_tokens=20, text=FakeText(stop_token), special_token_ids={9})


def output(index: int, *token_ids: int, finish: FinishReason | None = None, stop: int | None = None) -> SequenceOutput:
    return SequenceOutput(RequestId(1), index, token_ids, finish_reason=finish, matched_stop_token_id=stop)


def test_text_that_is_held_back_comes_with_the_last_chunk() -> None:
    completion = make()
    completion.add(output(0, 1))
    first = completion.take_chunk()
    completion.add(output(1, 2, finish=FinishReason.LENGTH))
    last = completion.take_chunk()
    assert first is not None
    assert last is not None
    assert (first.token_ids, first.text) == ((1,), "")
    assert (last.token_index, last.token_ids, last.text) == (1, (2,), "one two ")
    assert completion.ending is not None
    assert completion.ending.finish_reason is FinishReason.LENGTH
    assert completion.usage.completion_tokens == 2


def test_stop_string_cuts_everything_after_its_token() -> None:
    completion = make(stop_token=2)
    completion.add(output(0, 1, 2, 3, 3, finish=FinishReason.LENGTH))
    chunk = completion.take_chunk()
    assert chunk is not None
    assert (chunk.token_ids, chunk.text) == ((1, 2), "one ")
    assert completion.ending is not None
    assert completion.ending.matched_stop_str == "two "
    assert completion.usage.completion_tokens == 2
    completion.add(output(4, 1))
    assert completion.take_chunk() is None


def test_special_stop_token_is_counted_but_not_shown() -> None:
    completion = make()
    completion.add(output(0, 1, 9, finish=FinishReason.STOP, stop=9))
    chunk = completion.take_chunk()
    assert chunk is not None
    assert (chunk.token_ids, chunk.text) == ((1, 9), "one ")
    assert completion.ending is not None
    assert completion.ending.matched_stop_token_id == 9


def test_ordinary_stop_token_is_shown() -> None:
    completion = make()
    completion.add(output(0, 1, 2, finish=FinishReason.STOP, stop=2))
    chunk = completion.take_chunk()
    assert chunk is not None
    assert chunk.text == "one two "


def test_max_tokens_ends_it_even_if_the_workers_word_was_lost() -> None:
    completion = make(max_tokens=2)
    completion.add(output(0, 1, 2))
    completion.take_chunk()
    assert completion.ending is not None
    assert completion.ending.finish_reason is FinishReason.LENGTH


def test_end_without_any_token_is_an_error() -> None:
    completion = make()
    completion.add(output(0, finish=FinishReason.LENGTH))
    with pytest.raises(EngineError, match="without a token"):
        completion.take_chunk()


def test_abort_shows_what_was_held_back_once() -> None:
    completion = make()
    completion.add(output(0, 1))
    completion.take_chunk()
    chunk = completion.abort()
    assert chunk is not None
    assert (chunk.token_ids, chunk.text) == ((), "one ")
    assert completion.has_ended()
    assert completion.abort() is None


def test_abort_before_any_token_is_an_end() -> None:
    completion = make()
    assert completion.abort() is None
    assert completion.ending is not None
    assert completion.ending.finish_reason is FinishReason.ABORT


def test_cached_tokens_are_the_larger_tiers_and_at_most_the_prompt() -> None:
    completion = make()
    completion.note_cached(4)
    completion.note_cached(2)
    assert completion.usage.cached_tokens == 4
    completion.note_cached(50)
    assert completion.usage.cached_tokens == 20


def test_cached_tokens_of_a_resumed_request_do_not_count() -> None:
    completion = make()
    completion.add(output(0, 1))
    completion.take_chunk()
    completion.note_cached(16)
    assert completion.usage.cached_tokens == 0


def test_draft_counts_add_up() -> None:
    completion = make()
    for index in range(2):
        completion.add(SequenceOutput(RequestId(1), index, (1,), num_draft_tokens=4, num_accepted_tokens=3))
    assert (completion.usage.draft_tokens, completion.usage.accepted_tokens) == (8, 6)
