"""From a measurement to its reader: runs it with a progress bar, then table, JSON, picture and history."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from benchmarks.common.history import append_report
from benchmarks.common.plot import check_plottable, write_plot
from benchmarks.common.progress import BenchProgress, ConsoleProgress
from benchmarks.common.report import BenchReport, write_json
from benchmarks.common.table import report_tables
from kvrelay.errors import InvalidRequest

Measurement = Callable[[BenchProgress], Awaitable[BenchReport]]


@dataclass(frozen=True, slots=True)
class Outputs:
    """Where a report goes, besides the table."""

    json_file: str | None = None
    """A file, or `-` for standard output."""
    plot_file: str | None = None
    is_recorded: bool = False
    """Whether the figures are appended to `benchmarks/results.csv`."""


def run_and_deliver(name: str, measure: Measurement, outputs: Outputs, out: Console, err: Console) -> BenchReport:
    """Measure, and put the report where it was asked for.

    Args:
        name: The benchmark's name, for the progress bar.
        measure: Runs the benchmark.
        outputs: Where the report goes.
        out: Standard output, for the table unless the JSON object goes there.
        err: Standard error, for the progress.

    Raises:
        InvalidRequest: A file cannot be written; names the flag.
        EngineError: What the measurement raised.
    """
    _check(outputs)
    with ConsoleProgress(name, err) as progress:
        report = asyncio.run(_interruptible(measure(progress)))
    (err if outputs.json_file == "-" else out).print(report_tables(report))
    if outputs.json_file is not None:
        with _named("json"):
            write_json(report, outputs.json_file)
    if outputs.plot_file is not None:
        with _named("plot"):
            write_plot(report, outputs.plot_file)
    if outputs.is_recorded:
        with _named("record"):
            num_figures = append_report(report)
        err.print(Text(f"{num_figures} figures appended to benchmarks/results.csv"))
    return report


def _check(outputs: Outputs) -> None:
    """Make sure before a long run that its report can be written afterwards."""
    if outputs.json_file not in (None, "-") and not Path(str(outputs.json_file)).absolute().parent.is_dir():
        raise InvalidRequest("json", f"there is no folder {Path(str(outputs.json_file)).parent}")
    if outputs.plot_file is not None:
        check_plottable(outputs.plot_file)


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """Say which flag named the file that cannot be written."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(flag, f"cannot write {error.filename}: {error.strerror}") from error


async def _interruptible(measurement: Awaitable[BenchReport]) -> BenchReport:
    task = asyncio.current_task()
    if task is not None:
        # As Ctrl-C does: clusters are drained, not left to the kernel.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await measurement
