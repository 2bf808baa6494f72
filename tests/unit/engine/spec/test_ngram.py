"""Prompt lookup: longest and latest match, periods, other requests of the same salt, bounded memory."""

from typing import Any

import pytest

from engine.sequence import Sequence
from engine.spec import ngram
from engine.spec.ngram import NgramDrafter
from engine.types import EngineRequest, RequestId, SamplingParams


def _sequence(tokens: Any, request_id: int = 1, salt: str = "") -> Sequence:
    return Sequence(EngineRequest(RequestId(request_id), tuple(tokens), SamplingParams(), len(tokens), cache_salt=salt))


def _propose(tokens: Any, max_tokens: int = 4, drafter: Any = None) -> Any:
    return (drafter or NgramDrafter()).propose([_sequence(tokens)], [max_tokens])[0]


def test_continues_after_the_last_place_where_the_tail_stood() -> None:
    assert _propose([1, 2, 3, 4, 9, 9, 2, 3]) == (4, 9, 9, 2)


def test_longer_match_wins_over_a_later_shorter_one() -> None:
    assert _propose([5, 1, 2, 3, 70, 80, 0, 2, 3, 60, 0, 1, 2, 3], 1) == (70,)


def test_among_equal_matches_the_latest_wins() -> None:
    assert _propose([1, 2, 50, 1, 2, 60, 0, 1, 2], 1) == (60,)


def test_nothing_is_proposed_without_a_match() -> None:
    assert _propose([1, 2, 3, 4, 5]) == ()
    assert _propose([1]) == ()


def test_period_is_continued_beyond_the_end() -> None:
    assert _propose([7, 8, 7, 8, 7, 8], 7) == (7, 8, 7, 8, 7, 8, 7)


def test_index_follows_tokens_that_are_generated() -> None:
    drafter = NgramDrafter()
    sequence = _sequence([1, 2, 3])
    assert drafter.propose([sequence], [3]) == [()]
    sequence.token_ids += [9, 1, 2]
    assert drafter.propose([sequence], [3]) == [(3, 9, 1)]


def test_zero_limit_proposes_nothing() -> None:
    assert _propose([1, 2, 1, 2], 0) == ()


def test_finished_requests_of_the_same_salt_are_searched() -> None:
    drafter = NgramDrafter()
    drafter.propose([_sequence([1, 2, 3, 4, 5, 6, 7], request_id=1, salt="a")], [1])
    drafter.forget(RequestId(1))
    same = _sequence([90, 1, 2, 3, 4], request_id=2, salt="a")
    other = _sequence([90, 1, 2, 3, 4], request_id=3, salt="b")
    assert drafter.propose([same, other], [2, 2]) == [(5, 6), ()]


def test_memory_of_finished_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SHARED_TOKENS", 100)
    monkeypatch.setattr(ngram, "MAX_SALTS", 2)
    drafter = NgramDrafter()
    for request_id in range(40):
        tokens = range(request_id * 20, request_id * 20 + 20)
        drafter.propose([_sequence(tokens, request_id, salt=str(request_id % 4))], [1])
        drafter.forget(RequestId(request_id))
    assert len(drafter._shared) == 2
    for pool in drafter._shared.values():
        assert sum(len(tokens) for tokens in pool._lists.values()) <= 100
        assert len(pool._ends) <= 100
    assert drafter._indexes == {}
