"""Chances by class of evidence, shifted by how each sequence does."""

import random

import pytest

from engine.spec.drafter import Evidence, evidence_of_probability
from engine.spec.pace.acceptance import Acceptance
from engine.types import RequestId

LIKELY, UNLIKELY = Evidence("ngram", 16, 0.9), Evidence("ngram", 1, 0.2)
ONE, OTHER = RequestId(1), RequestId(2)


def test_prior_holds_until_something_was_counted() -> None:
    acceptance = Acceptance()
    assert acceptance.chance(ONE, LIKELY) == pytest.approx(0.9)
    assert acceptance.chances(ONE, [LIKELY, UNLIKELY]) == pytest.approx([0.9, 0.18])


def test_each_class_is_counted_for_itself() -> None:
    acceptance = Acceptance()
    rng = random.Random(0)
    for request_id in range(100, 600):
        acceptance.observe(RequestId(request_id), [LIKELY], int(rng.random() < 0.3))
        acceptance.observe(RequestId(request_id), [UNLIKELY], int(rng.random() < 0.7))
    assert acceptance.chance(ONE, LIKELY) == pytest.approx(0.3, abs=0.08)
    assert acceptance.chance(ONE, UNLIKELY) == pytest.approx(0.7, abs=0.08)


def test_tokens_behind_the_first_rejected_one_teach_nothing() -> None:
    acceptance = Acceptance()
    acceptance.observe(ONE, [LIKELY, UNLIKELY, UNLIKELY], 0)
    acceptance.forget(ONE)
    assert acceptance.chance(ONE, UNLIKELY) == pytest.approx(0.2)
    assert acceptance.chance(ONE, LIKELY) < 0.9


def test_sequence_that_does_better_gets_better_chances_everywhere_and_others_hardly() -> None:
    acceptance = Acceptance()
    for _ in range(10):
        acceptance.observe(ONE, [UNLIKELY], 1)
    mine, others = acceptance.chance(ONE, LIKELY), acceptance.chance(OTHER, LIKELY)
    assert mine > 0.9
    assert others == pytest.approx(0.9)
    acceptance.forget(ONE)
    assert acceptance.chance(ONE, LIKELY) == pytest.approx(0.9)


def test_old_counts_fade() -> None:
    acceptance = Acceptance()
    for request_id in range(3000):
        acceptance.observe(RequestId(request_id), [LIKELY], 1)
    for request_id in range(3000, 3600):
        acceptance.observe(RequestId(request_id), [LIKELY], 0)
    assert acceptance.chance(ONE, LIKELY) < 0.45


def test_typical_chance_is_that_of_the_whole_source() -> None:
    acceptance = Acceptance()
    for request_id in range(200):
        acceptance.observe(RequestId(request_id), [LIKELY], 1)
        acceptance.observe(RequestId(request_id), [UNLIKELY], 0)
    assert acceptance.typical(ONE, "ngram") == pytest.approx(0.5, abs=0.1)
    assert acceptance.typical(RequestId(999), "head") == pytest.approx(0.6)


def test_probabilities_of_one_tenth_are_one_class() -> None:
    assert evidence_of_probability("head", 0.91) is evidence_of_probability("head", 1.0)
    assert evidence_of_probability("head", 0.91) is not evidence_of_probability("head", 0.89)
    assert evidence_of_probability("head", 0.0).prior > 0.0
