"""BenchReport: what a benchmark found, and the one JSON object that it becomes.

Owns the shape of `--json`. Tables, plots and the history file are made from the same value by `table.py`, `plot.py` and
`history.py`.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.common.machine import commit_id, describe_machine

JsonValue: TypeAlias = "str | int | float | bool | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
Row: TypeAlias = Mapping[str, JsonValue]
"""One line of a report: what was measured, and its figures. Units are in the names."""

SIGNIFICANT_DIGITS = 6


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars for `--plot`: one group per label, one bar per series in each."""

    title: str
    y_label: str
    labels: tuple[str, ...]
    series: Mapping[str, Sequence[float]]
    """Bars by name, as many values as there are labels."""
    is_log: bool = False
    """Whether the y axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The outcome of one run."""

    name: str
    settings: Mapping[str, JsonValue]
    """What was asked for. Holds no paths."""
    rows: Sequence[Row]
    ratios: Mapping[str, float]
    """Figures that mean the same on every machine: ratios of medians of this run."""
    charts: Sequence[BarChart] = ()
    notes: Sequence[str] = ()
    """Sentences for people, shown below the table."""
    machine: Mapping[str, JsonValue] = field(default_factory=describe_machine)
    commit: str = field(default_factory=commit_id)

    def as_json(self) -> dict[str, JsonValue]:
        """Return the object that `--json` writes."""
        return {
            "name": self.name,
            "commit": self.commit,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "rows": [_rounded(row) for row in self.rows],
            "ratios": _rounded(self.ratios),
        }


def write_json(report: BenchReport, target: str) -> None:
    """Write the report's JSON object.

    Args:
        report: What to write.
        target: A file, made anew, or `-` for standard output.

    Raises:
        OSError: The file cannot be written.
    """
    text = json.dumps(report.as_json(), ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text, encoding="utf-8")


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float | None:
    """Return the ratio of two medians; None when either has no values, or the second is 0."""
    if not numerators or not denominators:
        return None
    below = statistics.median(denominators)
    return statistics.median(numerators) / below if below else None


def present(ratios: Mapping[str, float | None]) -> dict[str, float]:
    """Return the ratios that could be measured."""
    return {name: value for name, value in ratios.items() if value is not None}


def model_name(model: str) -> str:
    """Return how a report names the model: a path would say where this machine keeps it."""
    return Path(model).name if Path(model).exists() else model


def _rounded(row: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    return {
        name: float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
        for name, value in row.items()
    }
