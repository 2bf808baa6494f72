"""Percentiles and the order in which variants are measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of one set of samples."""

    p50: float
    p95: float
    p99: float
    highest: float


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that at least `percent` % of all are not above.

    Raises:
        ValueError: There are no samples, or `percent` is not in (0, 100].
    """
    if not samples or not 0 < percent <= 100:
        raise ValueError("a percentile needs samples and a percentage above 0 and up to 100")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def spread(samples: Sequence[float]) -> Spread:
    """Return the percentiles; raises like `percentile`. The p50 is the median."""
    return Spread(
        p50=statistics.median(samples) if samples else percentile(samples, 50),
        p95=percentile(samples, 95),
        p99=percentile(samples, 99),
        highest=max(samples),
    )


def median_or_none(samples: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    return statistics.median(samples) if samples else None


def round_order(variants: Sequence[T], round_index: int) -> list[T]:
    """Return the order of one round: each round begins one variant later.

    Interleaving makes a slow minute of the machine hit all variants alike; turning the order makes sure that none
    always follows the same other one.
    """
    if not variants:
        return []
    first = round_index % len(variants)
    return [*variants[first:], *variants[:first]]
