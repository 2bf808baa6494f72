"""Reports as tables: for the terminal, and in Markdown."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.common.report import BenchReport, JsonValue, Row

MAX_COLUMNS = 11
"""Beyond it a table is turned: one line per figure, one column per row of the report."""


def report_tables(report: BenchReport) -> Group:
    """Return the report as tables, ratios and notes; rows with the same figures share a table."""
    machine = report.machine
    title = f"{report.name} · {machine.get('cpu')} · {machine.get('num_cores')} cores · {report.commit}"
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in report.rows:
        groups.setdefault(tuple(row), []).append(row)
    ratios = [f"{name} = {value:.3g}" for name, value in report.ratios.items()]
    return Group(
        Text(title, style="bold"),
        *(_table(rows) for rows in groups.values()),
        Text("\n".join((*ratios, *report.notes))),
    )


def _table(rows: Sequence[Row]) -> Table:
    """Return rows as a table; a column that is empty everywhere is left out."""
    table = Table()
    names = column_names(rows)
    if len(names) > MAX_COLUMNS:
        return _turned(table, rows, names)
    for name in names:
        is_number = any(_is_number(row.get(name)) for row in rows)
        table.add_column(name.replace("_", " "), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(shown(row.get(name))) for name in names))
    return table


def _turned(table: Table, rows: Sequence[Row], names: Sequence[str]) -> Table:
    head, *figures = names
    table.add_column(head.replace("_", " "))
    for row in rows:
        table.add_column(shown(row.get(head)), justify="right")
    for name in figures:
        table.add_row(name.replace("_", " "), *(Text(shown(row.get(name))) for row in rows))
    return table


def markdown_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    names = column_names(rows)
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "| --- " * len(names) + "|"]
    lines += ["| " + " | ".join(shown(row.get(name)).replace("|", "\\|") for name in names) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def column_names(rows: Sequence[Row]) -> list[str]:
    """Return the names of the columns that hold anything, in the order of their first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if any(row.get(name) is not None for row in rows)]


def shown(value: JsonValue) -> str:
    """Return a cell's text: numbers with as many digits as mean something."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return _shown_number(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence):
        return " ".join(shown(item) for item in value)
    return ", ".join(f"{name} {shown(item)}" for name, item in value.items())


def _shown_number(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def _is_number(value: JsonValue) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
