"""Step cost: shapes are fitted and interpolated, and noise in the timings does not move them."""

import random

import pytest

from engine.spec.pace.cost import CostShape, StepCost, StepLoad, fit_shape

SHAPE = CostShape({1: 1.0, 2: 1.05, 4: 1.3, 8: 1.9, 16: 3.6}, context_token=0.001, extra_pair=0.0002)


def _load(rows: int, context: int = 0) -> StepLoad:
    return StepLoad(rows, context, (rows - 1) * context)


def _relative(cost: StepCost, rows: int, context: int = 100) -> float:
    return cost.seconds(_load(rows, context)) / cost.seconds(_load(1, context))


def _true(rows: int, context: int = 100) -> float:
    return SHAPE.base(rows) + SHAPE.attention(_load(rows, context))


def test_base_lies_on_straight_lines_between_entries_and_beyond() -> None:
    assert SHAPE.base(1) == 1.0
    assert SHAPE.base(3) == pytest.approx(1.175)
    assert SHAPE.base(16) == pytest.approx(3.6)
    assert SHAPE.base(24) == pytest.approx(3.6 + 8 * (3.6 - 1.9) / 8)
    assert CostShape({4: 2.0}).base(1) == 2.0


def test_fit_finds_rows_and_context_apart() -> None:
    measured = [(_load(rows, context), _true(rows, context)) for rows in (1, 2, 4, 8, 16) for context in (32, 512)]
    found = fit_shape(measured)
    assert found.context_token == pytest.approx(SHAPE.context_token)
    assert found.extra_pair == pytest.approx(SHAPE.extra_pair)
    for rows in (1, 2, 3, 8, 12):
        assert found.base(rows) == pytest.approx(SHAPE.base(rows))


def test_fit_never_falls_with_more_rows_or_context() -> None:
    found = fit_shape([(_load(1, 10), 1.0), (_load(1, 90), 0.8), (_load(2, 10), 0.7), (_load(4, 10), 2.0)])
    assert found.context_token == 0.0
    assert found.base(1) <= found.base(2) <= found.base(4)


def test_growth_is_seconds_row_by_row() -> None:
    cost = StepCost(SHAPE)
    cost.observe(_load(2, 50), 3.0)
    grown = list(cost.growth(StepLoad(1, 50), [50, 50, 50]))
    assert grown == pytest.approx([cost.seconds(_load(rows, 50)) for rows in (2, 3, 4)])


def test_machine_that_slows_down_changes_no_ratio() -> None:
    cost = StepCost(SHAPE)
    rng = random.Random(3)
    for step in range(400):
        rows = rng.choice((1, 2, 4, 8))
        cost.observe(_load(rows, 100), _true(rows) * (0.002 if step < 200 else 0.008))
    assert cost.seconds(_load(1, 100)) == pytest.approx(_true(1) * 0.008, rel=0.05)
    for rows in (2, 4, 8, 16):
        assert _relative(cost, rows) == pytest.approx(_true(rows) / _true(1), rel=0.05)


def test_heavy_noise_hardly_moves_the_ratios() -> None:
    cost = StepCost(SHAPE)
    rng = random.Random(5)
    for _ in range(2000):
        rows = rng.choice((1, 2, 3, 4, 8))
        noise = rng.lognormvariate(0.0, 0.3) * (rng.uniform(2, 30) if rng.random() < 0.1 else 1.0)
        cost.observe(_load(rows, 100), _true(rows) * 0.002 * noise)
    for rows in (2, 4, 8):
        assert _relative(cost, rows) == pytest.approx(_true(rows) / _true(1), rel=0.25)


def test_steps_that_agree_correct_a_wrong_shape() -> None:
    cost = StepCost(SHAPE)
    for _ in range(40):
        cost.observe(_load(1), 1.0)
        cost.observe(_load(8), 1.1)
    assert _relative(cost, 8, 0) == pytest.approx(1.1, rel=0.1)
    assert _relative(cost, 2, 0) == pytest.approx(1.05, rel=0.1)


def test_correction_is_limited() -> None:
    cost = StepCost(SHAPE)
    for _ in range(40):
        cost.observe(_load(1), 1.0)
        cost.observe(_load(2), 50.0)
    assert _relative(cost, 2, 0) <= 4.3


def test_time_that_a_coarse_clock_gives_as_nothing_is_ignored() -> None:
    cost = StepCost(SHAPE)
    cost.observe(_load(1), 0.0)
    assert cost.seconds(_load(1)) == 1.0
