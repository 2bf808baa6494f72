"""Prompt lookup: longest and latest match, periods, other requests of the same salt, bounded memory."""

from typing import Any

import pytest

from engine.sequence import Sequence
from engine.spec import ngram
from engine.spec.ngram import NgramDrafter
from engine.spec.pace.pacer import DraftPacer
from engine.types import EngineRequest, RequestId, SamplingParams


def _sequence(tokens: Any, request_id: int = 1, salt: str = "") -> Sequence:
    return Sequence(EngineRequest(RequestId(request_id), tuple(tokens), SamplingParams(), len(tokens), cache_salt=salt))


def _propose(tokens: Any, max_tokens: int = 4) -> Any:
    return NgramDrafter(DraftPacer(16)).propose([_sequence(tokens)], [max_tokens])[0].token_ids


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
    drafter = NgramDrafter(DraftPacer(16))
    sequence = _sequence([1, 2, 3])
    assert drafter.propose([sequence], [3])[0].token_ids == ()
    sequence.token_ids += [9, 1, 2]
    assert drafter.propose([sequence], [3])[0].token_ids == (3, 9, 1)


def test_zero_limit_proposes_nothing() -> None:
    assert _propose([1, 2, 1, 2], 0) == ()


def test_longest_match_is_found_beyond_the_indexed_length() -> None:
    source = [9, 1, 2, 3, 4, 5, 6, 70]
    assert _propose([*source, 8, 2, 3, 4, 5, 6, 80, 9, 1, 2, 3, 4, 5, 6], 1) == (70,)


def test_evidence_tells_what_always_followed_from_what_changed() -> None:
    def evidence(followers: list[int], tail: list[int]) -> Any:
        tokens: list[int] = []
        for place, follower in enumerate(followers):
            tokens += [100 + place, *tail, follower]
        return NgramDrafter(DraftPacer(16)).propose([_sequence([*tokens, 99, *tail])], [1])[0].evidence[0]

    once, same, always = (evidence([5] * count, [1, 2]) for count in (1, 2, 3))
    changed = evidence([5, 6], [1, 2])
    assert len({once, same, always, changed}) == 4
    assert changed.prior < once.prior < same.prior < always.prior
    assert evidence([7], [1, 2, 3, 4]).prior > once.prior
    assert evidence([7], [1]).prior < once.prior
    assert evidence([8], [1, 2]) is once


def test_accepted_tokens_make_the_match_behind_them_longer() -> None:
    evidence = NgramDrafter(DraftPacer(16)).propose([_sequence([1, 2, 3, 4, 5, 6, 7, 8, 90, 1, 2])], [5])[0].evidence
    assert [each.grade >> 2 for each in evidence] == [2, 3, 4, 5, 5]


def test_nothing_is_proposed_that_is_not_worth_a_row() -> None:
    tokens: list[int] = []
    for follower in range(60, 90):
        tokens += [1, follower]
    pacer = DraftPacer(16)
    lengths = []
    for pacer.least_chance in (0.0, 0.02, 0.5):
        lengths.append(len(NgramDrafter(pacer).propose([_sequence([*tokens, 1])], [16])[0].token_ids))
    assert lengths[0] == 16 > lengths[1] > lengths[2] == 1


def test_long_prompt_is_entered_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_INDEXED_TOKENS", 10)
    drafter = NgramDrafter(DraftPacer(16))
    late = _sequence([*range(100, 125), 1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert [drafter.propose([late], [1])[0].token_ids for _ in range(3)] == [(), (), (4,)]


def test_finished_requests_of_the_same_salt_are_searched() -> None:
    drafter = NgramDrafter(DraftPacer(16))
    first = _sequence([80, 1, 2, 3], request_id=1, salt="a")
    first.token_ids += [4, 5, 6, 7]
    drafter.propose([first], [1])
    drafter.forget(RequestId(1))
    same = _sequence([90, 1, 2, 3, 4], request_id=2, salt="a")
    other = _sequence([90, 1, 2, 3, 4], request_id=3, salt="b")
    found = drafter.propose([same, other], [2, 2])
    assert [proposal.token_ids for proposal in found] == [(5, 6), ()]
    assert {each.source for each in found[0].evidence} == {"shared"}


def test_own_text_is_preferred_until_others_prove_better() -> None:
    pacer = DraftPacer(16)
    drafter = NgramDrafter(pacer)
    first = _sequence([1, 2], request_id=1)
    first.token_ids += [30, 31, 32, 33, 34, 35]
    drafter.propose([first], [1])
    drafter.forget(RequestId(1))
    own_first = [50, 2, 40, 41, 42, 43, 51, 1, 2]
    own = drafter.propose([_sequence(own_first, request_id=2)], [4])[0]
    assert own.token_ids[0] == 40
    for _ in range(40):
        pacer.acceptance.observe(RequestId(9), own.evidence[:1], 0)
    assert drafter.propose([_sequence(own_first, request_id=3)], [4])[0].token_ids[0] == 30


def test_memory_of_finished_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MAX_SHARED_TOKENS", 100)
    drafter = NgramDrafter(DraftPacer(16))
    for request_id in range(40):
        sequence = _sequence(range(3), request_id, salt=str(request_id % 4))
        sequence.token_ids += range(request_id * 20, request_id * 20 + 20)
        drafter.propose([sequence], [1])
        drafter.forget(RequestId(request_id))
    kept = [tokens for pool in drafter._shared.values() for tokens in pool._lists.values()]
    assert 60 <= sum(len(tokens) for tokens in kept) == drafter._num_shared_tokens <= 100
    assert sum(len(pool._ends) for pool in drafter._shared.values()) <= 3 * 100
    assert drafter._known == {}
