"""What starts bring: the last count most, a new sequence is like others' beginnings, its own starts soon say more."""

import pytest

from engine.spec.pace.starts import Starts
from engine.types import RequestId

ONE, OTHER = RequestId(1), RequestId(2)


def test_new_sequence_is_like_others_were_at_their_beginning() -> None:
    starts = Starts()
    for number in range(40):
        for _ in range(8):
            starts.observe(RequestId(10 + number), "head", 5, 3)
        for _ in range(50):
            starts.observe(RequestId(10 + number), "head", 9, 9)
    expected = starts.expected(OTHER, "head")
    assert expected.accepted == pytest.approx(3, abs=0.1)
    assert expected.drafted == pytest.approx(5, abs=0.1)


def test_own_starts_soon_say_more_than_others() -> None:
    starts = Starts()
    for _ in range(200):
        starts.observe(ONE, "head", 5, 3)
    for _ in range(12):
        starts.observe(OTHER, "head", 2, 0)
    assert starts.expected(OTHER, "head").accepted < 1.0
    assert starts.expected(ONE, "head").accepted > 2.5


def test_last_starts_count_most() -> None:
    starts = Starts()
    for _ in range(100):
        starts.observe(ONE, "head", 4, 0)
    for _ in range(8):
        starts.observe(ONE, "head", 4, 4)
    assert starts.expected(ONE, "head").accepted > 2.0


def test_sources_are_apart_and_ended_sequences_forgotten() -> None:
    starts = Starts()
    fresh = starts.expected(ONE, "head")
    for _ in range(20):
        starts.observe(ONE, "draft", 4, 4)
    assert starts.expected(ONE, "head") == fresh
    starts.forget(ONE)
    assert starts.expected(ONE, "draft") == starts.expected(OTHER, "draft")
