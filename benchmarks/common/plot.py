"""`--plot FILE.png`: a report's bar charts in one picture, drawn with matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common.report import BarChart, BenchReport
from kvrelay.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_INCHES = 9.0
_HEIGHT_INCHES = 3.6
_DPI = 130
MAX_LABEL_CHARACTERS = 80
"""Labels that are longer in all are written aslant."""
_GROUP_WIDTH = 0.8
"""Share of a group's place that its bars fill."""


def check_plottable(target: str) -> None:
    """Make sure before a long run that its picture can be drawn afterwards.

    Raises:
        InvalidRequest: It is no .png or .svg file in an existing folder, or matplotlib is not installed.
    """
    path = Path(target)
    if path.suffix not in (".png", ".svg"):
        raise InvalidRequest("plot", f"{target} must end in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise InvalidRequest("plot", f"there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise InvalidRequest("plot", 'needs matplotlib: pip install "kvrelay-server[bench]"')


def write_plot(report: BenchReport, target: str) -> None:
    """Draw the report's charts, one below the other.

    Raises:
        InvalidRequest: As `check_plottable`, or the report has nothing to draw.
    """
    check_plottable(target)
    charts = [chart for chart in report.charts if chart.labels]
    if not charts:
        raise InvalidRequest("plot", "nothing was measured that could be drawn")
    # Figure without pyplot: no display, no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES * len(charts)), layout="constrained")
    for index, chart in enumerate(charts):
        _draw(figure.add_subplot(len(charts), 1, index + 1), chart)
    machine = report.machine
    figure.suptitle(f"kvrelay {report.name} · {machine.get('cpu')} · {report.commit}", fontsize=9)
    figure.savefig(target, dpi=_DPI)


def _draw(axes: "Axes", chart: BarChart) -> None:
    num_series = len(chart.series)
    width = _GROUP_WIDTH / max(num_series, 1)
    for index, (name, values) in enumerate(chart.series.items()):
        offset = (index - (num_series - 1) / 2) * width
        bars = axes.bar([place + offset for place in range(len(chart.labels))], values, width, label=name)
        if len(chart.labels) * num_series <= 24:
            axes.bar_label(bars, labels=_labels(values), fontsize=7, padding=2)
    axes.set_title(chart.title, fontsize=10)
    axes.set_ylabel(chart.y_label)
    is_crowded = sum(map(len, chart.labels)) > MAX_LABEL_CHARACTERS
    axes.set_xticks(
        range(len(chart.labels)), chart.labels, rotation=30 if is_crowded else 0, ha="right" if is_crowded else "center"
    )
    axes.margins(y=0.15)
    if chart.is_log:
        axes.set_yscale("log")
    if num_series > 1:
        axes.legend(fontsize=8)


def _labels(values: Sequence[float]) -> list[str]:
    return [f"{value:.3g}" for value in values]
