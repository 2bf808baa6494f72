"""Reordering: whatever order and overlap outputs come in, tokens go out once each, in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.types import RequestId, SequenceOutput
from gateway.relay.sequencer import OutputSequencer
from kvrelay.errors import EngineError
from kvrelay.values import FinishReason, PositionLogprobs, TokenLogprob


def output(index: int, *token_ids: int, finish: FinishReason | None = None, stop: int | None = None) -> SequenceOutput:
    return SequenceOutput(RequestId(1), index, token_ids, finish_reason=finish, matched_stop_token_id=stop)


def taken(sequencer: OutputSequencer) -> list[int]:
    return [token.token_id for token in sequencer.take()]


def test_later_token_waits_for_the_first() -> None:
    sequencer = OutputSequencer(10, has_logprobs=False)
    sequencer.push(output(1, 11, 12))
    assert taken(sequencer) == []
    sequencer.push(output(0, 10))
    assert taken(sequencer) == [10, 11, 12]


def test_end_counts_only_once_all_tokens_before_it_were_taken() -> None:
    sequencer = OutputSequencer(10, has_logprobs=False)
    sequencer.push(output(1, 11, finish=FinishReason.STOP, stop=11))
    ends = [sequencer.end]
    sequencer.push(output(0, 10))
    ends.append(sequencer.end)
    taken(sequencer)
    assert ends == [None, None]
    assert sequencer.end is not None
    assert (sequencer.end.num_tokens, sequencer.end.matched_stop_token_id) == (2, 11)


def test_end_without_tokens_counts() -> None:
    sequencer = OutputSequencer(10, has_logprobs=False)
    sequencer.push(output(0, 10))
    taken(sequencer)
    sequencer.push(output(1, finish=FinishReason.LENGTH))
    assert sequencer.end is not None


def test_restart_forgets_what_was_not_taken() -> None:
    sequencer = OutputSequencer(10, has_logprobs=False)
    sequencer.push(output(0, 10))
    taken(sequencer)
    sequencer.push(output(2, 99, finish=FinishReason.LENGTH))
    sequencer.forget_waiting()
    sequencer.push(output(1, 11, 12))
    assert taken(sequencer) == [11, 12]
    assert sequencer.end is None


def test_token_beyond_the_limit_is_an_error() -> None:
    sequencer = OutputSequencer(2, has_logprobs=False)
    sequencer.push(output(0, 10, 11))
    with pytest.raises(EngineError, match="limited to 2"):
        sequencer.push(output(2, 12))


@pytest.mark.parametrize("num_logprobs", [0, 1, 3])
def test_each_token_needs_its_logprobs(num_logprobs: int) -> None:
    sequencer = OutputSequencer(10, has_logprobs=True)
    entry = PositionLogprobs(TokenLogprob(1, -1.0, 1), ())
    with pytest.raises(EngineError, match="logprobs"):
        sequencer.push(SequenceOutput(RequestId(1), 0, (1, 2), logprobs=(entry,) * num_logprobs))


@given(
    spans=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 6)), max_size=30),
    takes=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_any_order_and_overlap_gives_the_longest_prefix_in_order(
    spans: list[tuple[int, int]], takes: list[bool]
) -> None:
    sequencer = OutputSequencer(26, has_logprobs=False)
    seen: set[int] = set()
    given_out: list[int] = []
    for (start, length), is_taken in zip(spans, takes, strict=False):
        sequencer.push(output(start, *range(100 + start, 100 + start + length)))
        seen.update(range(start, start + length))
        if is_taken:
            given_out += taken(sequencer)
    given_out += taken(sequencer)
    missing = next(index for index in range(100) if index not in seen)
    assert given_out == list(range(100, 100 + missing))
    assert sequencer.num_taken == missing
