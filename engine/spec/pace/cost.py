"""What a step costs: seconds by rows and by the context that they attend to, robust against noise in the timings.

A shape, from a probe at start-up or assumed, says how cost grows; steps that really ran then correct it. Corrections
are medians of few ratios between measured and expected time, so a step that something else held up counts for nothing,
and a machine that gets slower as a whole changes no decision. Owns no clock; torch-free.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from engine.scheduler.plan import StepPlan

_NUM_RECENT = 5
"""Steps whose median the machine's speed is drawn towards."""
_SPEED_RATE = 0.2
"""How far, with each step. Slowly enough that two kinds of step in turn do not take each other's cost for speed."""
_NUM_KEPT = 15
"""Steps of a bucket that its correction is the median of."""
_PRIOR_RATIOS = (0.0, 0.0, 0.0)
"""Steps that agree with the shape, assumed for each bucket."""
_LEAST_BASE = 0.1
"""Share of a measured step that is not attention, at least."""
_MAX_CORRECTION = math.log(2.0)
_MAX_EXACT_ROWS = 16
"""Up to here every number of rows is a bucket of its own; beyond, powers of two."""


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What of a step costs time."""

    num_rows: int
    num_context_tokens: int = 0
    """Sum of the sequences' lengths: KV that is read at least once."""
    num_extra_pairs: int = 0
    """Sum over the sequences of (rows - 1) x length: attention of the rows behind the first."""

    @classmethod
    def of_plan(cls, plan: StepPlan) -> "StepLoad":
        """Return what a planned step weighs."""
        return cls(
            plan.num_rows,
            sum(chunk.start for chunk in plan.chunks),
            sum((chunk.num_rows - 1) * chunk.start for chunk in plan.chunks),
        )


@dataclass(frozen=True, slots=True)
class CostShape:
    """How a step's time grows, in any unit of time."""

    by_rows: Mapping[int, float]
    """Time of a step without context, by rows; at least one entry, none smaller than those before it."""
    context_token: float = 0.0
    """Time per token of context."""
    extra_pair: float = 0.0
    """Time per row behind a sequence's first and token of its context."""

    def base(self, num_rows: int) -> float:
        """Return the time of a step without context; between entries and beyond the last one on straight lines."""
        known = sorted(self.by_rows)
        if len(known) == 1 or num_rows <= known[0]:
            return self.by_rows[known[0]]
        high = min(bisect_left(known, num_rows, lo=1), len(known) - 1)
        below, above = known[high - 1], known[high]
        slope = (self.by_rows[above] - self.by_rows[below]) / (above - below)
        return self.by_rows[below] + slope * (num_rows - below)

    def attention(self, load: StepLoad) -> float:
        """Return what the context adds."""
        return self.context_token * load.num_context_tokens + self.extra_pair * load.num_extra_pairs


ASSUMED_SHAPE = CostShape(
    by_rows={1: 1.0, 2: 1.06, 3: 1.17, 4: 1.35, 5: 1.5, 6: 1.65, 8: 2.0, 9: 2.4, 12: 3.1, 16: 3.8, 32: 7.6},
    context_token=0.0005,
    extra_pair=0.0002,
)
"""In steps of one row: SmolLM2's on the native kernels with two cores. Where rows are cheaper, steps soon show it."""

FLAT_SHAPE = CostShape(by_rows={1: 1.0, 32: 1.3})
"""Where a step reads weights for as long as it computes on few rows, as GPUs do."""


def fit_shape(measured: Iterable[tuple[StepLoad, float]]) -> CostShape:
    """Return the shape that goes through measurements: several row counts of one sequence, each at two contexts.

    Args:
        measured: Loads of single-sequence steps and their times; per row count at least one.
    """
    by_rows: dict[int, list[tuple[StepLoad, float]]] = {}
    for load, seconds in measured:
        by_rows.setdefault(load.num_rows, []).append((load, seconds))
    context_token, pairs = 0.0, [0.0]
    for rows, points in sorted(by_rows.items()):
        (low, low_time), (high, high_time) = (
            min(points, key=lambda point: point[0].num_context_tokens),
            max(points, key=lambda point: point[0].num_context_tokens),
        )
        span = high.num_context_tokens - low.num_context_tokens
        if span <= 0:
            continue
        slope = max(high_time - low_time, 0.0) / span
        if rows == 1:
            context_token = slope
        else:
            pairs.append((slope - context_token) / (rows - 1))
    extra_pair = max(statistics.median(pairs[1:]), 0.0) if len(pairs) > 1 else 0.0
    base: dict[int, float] = {}
    floor = 0.0
    for rows, points in sorted(by_rows.items()):
        rests = [
            seconds - context_token * load.num_context_tokens - extra_pair * load.num_extra_pairs
            for load, seconds in points
        ]
        # What noise puts down to the context must not leave a step that takes no time.
        least = _LEAST_BASE * min(seconds for _, seconds in points)
        floor = base[rows] = max(floor, least, statistics.median(rests))
    return CostShape(base, context_token, extra_pair)


def _bucket(num_rows: int) -> int:
    return num_rows if num_rows <= _MAX_EXACT_ROWS else 1 << (num_rows - 1).bit_length()


def _median(values: Iterable[float]) -> float:
    """Return the middle value, the upper of two; several times faster than `statistics.median`."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _no_ratios() -> deque[float]:
    return deque(maxlen=_NUM_KEPT)


@dataclass(slots=True)
class _Bucket:
    """Log ratios of measured to expected time, the machine's speed at that time taken out."""

    ratios: deque[float] = field(default_factory=_no_ratios)
    factor: float = 1.0
    """What the expected time is multiplied with."""

    def add(self, ratio: float) -> None:
        self.ratios.append(ratio)
        middle = _median([*self.ratios, *_PRIOR_RATIOS])
        self.factor = math.exp(min(max(middle, -_MAX_CORRECTION), _MAX_CORRECTION))


class StepCost:
    """Expected seconds of a step."""

    def __init__(self, shape: CostShape = ASSUMED_SHAPE) -> None:
        self._shape = shape
        self._bases: dict[int, float] = {}
        self._buckets: dict[int, _Bucket] = {}
        self._seen: list[int] = []  # its keys in order
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._speed: float | None = None  # log of what follows; None = nothing measured yet
        self._scale = 1.0  # seconds per unit of the shape

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Take in one step without prefill chunks."""
        if seconds <= 0.0:
            return
        number = _bucket(load.num_rows)
        if number not in self._buckets:
            self._buckets[number] = _Bucket()
            insort(self._seen, number)
        bucket = self._buckets[number]
        ratio = math.log(seconds / (self._base(load.num_rows) + self._shape.attention(load)))
        self._recent.append(ratio - math.log(bucket.factor))
        if self._speed is None:
            self._speed = ratio
        self._speed += _SPEED_RATE * (_median(self._recent) - self._speed)
        self._scale = math.exp(self._speed)
        bucket.add(ratio - self._speed)

    def seconds(self, load: StepLoad) -> float:
        """Return the expected time of a step, in units of the shape while nothing was measured."""
        return self._factor(load.num_rows) * (self._base(load.num_rows) + self._shape.attention(load))

    def growth(self, load: StepLoad, pairs: Iterable[int]) -> Iterator[float]:
        """Yield the expected time of a step with one, two, ... further rows.

        Args:
            load: The step without them.
            pairs: What each row adds to `num_extra_pairs`: its sequence's length.
        """
        num_rows = load.num_rows
        attention, pair = self._shape.attention(load), self._shape.extra_pair
        for length in pairs:
            num_rows += 1
            attention += pair * length
            yield self._factor(num_rows) * (self._base(num_rows) + attention)

    def _base(self, num_rows: int) -> float:
        base = self._bases.get(num_rows)
        if base is None:
            base = self._bases[num_rows] = self._shape.base(num_rows)
        return base

    def _factor(self, num_rows: int) -> float:
        """Seconds per unit of the shape at a number of rows; between those that were seen, what lies between theirs."""
        number = _bucket(num_rows)
        bucket = self._buckets.get(number)
        if bucket is not None:
            return self._scale * bucket.factor
        if not self._seen:
            return self._scale
        place = bisect_left(self._seen, number)
        below, above = self._seen[max(place - 1, 0)], self._seen[min(place, len(self._seen) - 1)]
        low, high = self._buckets[below].factor, self._buckets[above].factor
        if place == 0 or below == above:
            return self._scale * (high if place == 0 else low)
        return self._scale * (low + (high - low) * (number - below) / (above - below))
