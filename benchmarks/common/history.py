"""`--record`: figures of reports in an append-only CSV file, one figure a line, with commit, processor and settings."""

import csv
import datetime
import json
from pathlib import Path

from benchmarks.common.report import BenchReport, Row

RESULTS_FILE = Path(__file__).resolve().parents[1] / "results.csv"
COLUMNS = ("recorded_at", "commit", "cpu", "num_cores", "benchmark", "row", "metric", "value", "settings")


def append_report(report: BenchReport, path: Path | None = None) -> int:
    """Append every figure of a report; return how many. The file is made when it is not there.

    Args:
        report: What to append.
        path: The file; None = `RESULTS_FILE`.

    Raises:
        OSError: The file cannot be written.
    """
    figures = [(label, name, value) for row in report.rows for label, name, value in _figures(row)]
    figures += [("ratios", name, value) for name, value in report.ratios.items()]
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    settings = json.dumps(report.settings, ensure_ascii=False, sort_keys=True)
    head = (when, report.commit, report.machine.get("cpu"), report.machine.get("num_cores"), report.name)
    path = path or RESULTS_FILE
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        writer.writerows((*head, label, name, f"{value:.6g}", settings) for label, name, value in figures)
    return len(figures)


def _figures(row: Row) -> list[tuple[str, str, float]]:
    label = " ".join(value for value in row.values() if isinstance(value, str))
    return [
        (label, name, float(value))
        for name, value in row.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
