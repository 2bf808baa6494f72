"""Percentiles and the order of variants."""

import pytest

from benchmarks.common.stats import median_or_none, percentile, round_order, spread


def test_percentile_is_a_sample_that_enough_are_not_above() -> None:
    samples = [float(value) for value in range(1, 101)]
    assert [percentile(samples, percent) for percent in (1, 50, 95, 99, 100)] == [1, 50, 95, 99, 100]
    assert percentile([3.0, 1.0], 99) == 3.0


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="samples"):
        percentile([], 50)
    with pytest.raises(ValueError, match="samples"):
        spread([])


def test_spread_holds_the_worst_sample() -> None:
    found = spread([1.0, 2.0, 3.0, 50.0])
    assert (found.p50, found.p99, found.highest) == (2.5, 50.0, 50.0)


def test_median_of_nothing_is_none() -> None:
    assert median_or_none([]) is None
    assert median_or_none([1.0, 3.0]) == 2.0


def test_every_variant_is_first_once() -> None:
    orders = [round_order("abc", round_index) for round_index in range(3)]
    assert orders == [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert round_order("", 5) == []
