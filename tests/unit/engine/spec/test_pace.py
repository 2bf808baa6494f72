"""Draft lengths follow acceptance and cost."""

import pytest

from engine.spec.pace import EXPLORE_EVERY, DraftPacer, StepCost
from engine.types import RequestId

ONE = [RequestId(1)]


def _pacer(costs: dict[int, float], acceptance: float | None = None) -> DraftPacer:
    pacer = DraftPacer(8)
    for rows, seconds in costs.items():
        pacer.cost.observe(rows, seconds)
    if acceptance is not None:
        for step in range(200):
            pacer.observe(RequestId(1), 1, int(step * acceptance % 1 + acceptance >= 1))
    return pacer


def test_free_rows_are_used_up_to_the_limit() -> None:
    pacer = _pacer({1: 1.0, 9: 1.0}, acceptance=0.9)
    assert pacer.choose(ONE, [20]) == [8]


def test_rows_that_cost_more_than_they_bring_are_not_drafted() -> None:
    pacer = _pacer({rows: float(rows) for rows in range(1, 10)}, acceptance=0.9)
    assert pacer.choose(ONE, [8]) == [0]


def test_worse_acceptance_gives_shorter_drafts() -> None:
    costs = {1: 1.0, 2: 1.05, 4: 1.3, 8: 1.7, 9: 1.8}
    lengths = [_pacer(costs, acceptance).choose(ONE, [8])[0] for acceptance in (0.95, 0.6, 0.0)]
    assert lengths[0] > lengths[1] > lengths[2] == 0


def test_nothing_proposed_means_nothing_drafted() -> None:
    assert _pacer({1: 1.0}).choose([RequestId(1), RequestId(2)], [0, 3])[0] == 0


def test_rows_go_to_the_sequence_whose_guesses_are_better() -> None:
    pacer = DraftPacer(8)
    for rows in range(1, 17):
        pacer.cost.observe(rows, 1.0 + 0.25 * (rows - 1))
    for _ in range(50):
        pacer.observe(RequestId(1), 4, 4)
        pacer.observe(RequestId(2), 4, 0)
    lengths = pacer.choose([RequestId(1), RequestId(2)], [8, 8])
    assert lengths[0] > 0
    assert lengths[1] == 0


def test_sequence_that_stopped_drafting_tries_again_now_and_then() -> None:
    pacer = _pacer({1: 1.0, 2: 1.5, 9: 5.0}, acceptance=0.0)
    lengths = [pacer.choose(ONE, [8])[0] for _ in range(2 * EXPLORE_EVERY)]
    assert sum(lengths) == 2


def test_forgotten_sequence_starts_from_the_prior() -> None:
    pacer = _pacer({1: 1.0, 9: 1.0}, acceptance=0.0)
    pacer.forget(RequestId(1))
    assert pacer.choose(ONE, [8]) == [8]


def test_cost_is_interpolated_and_never_falls_with_more_rows() -> None:
    cost = StepCost()
    cost.observe(1, 1.0)
    cost.observe(4, 0.9)
    cost.observe(8, 2.0)
    assert cost.seconds(1) == 1.0
    assert cost.seconds(2) >= 1.0
    assert cost.seconds(6) == pytest.approx(1.45)
    assert cost.seconds(16) > 2.0
