"""The JSON object, its ratios, and where it goes."""

import csv
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.common.history import COLUMNS, append_report
from benchmarks.common.machine import commit_id, describe_machine
from benchmarks.common.plot import check_plottable, write_plot
from benchmarks.common.report import BarChart, BenchReport, model_name, present, ratio, write_json
from benchmarks.common.table import markdown_table, report_tables
from kvrelay.errors import InvalidRequest


def report(**changes: object) -> BenchReport:
    values: dict[str, object] = {
        "name": "demo",
        "settings": {"model": "tiny"},
        "rows": [{"path": "shm", "ms": 1.23456789, "num_samples": 3, "is_same": True}],
        "ratios": {"a_over_b": 0.123456789},
        "charts": (BarChart("speed", "GB/s", ("x", "y"), {"one": [1.0, 2.0], "two": [3.0, 4.0]}),),
        "notes": ("a note",),
    }
    return BenchReport(**(values | changes))  # type: ignore[arg-type]  # fields are checked by name at run time


def test_json_holds_exactly_the_keys_of_the_contract() -> None:
    written = report().as_json()
    assert list(written) == ["name", "commit", "machine", "settings", "rows", "ratios"]
    assert written["ratios"] == {"a_over_b": 0.123457}
    assert written["rows"] == [{"path": "shm", "ms": 1.23457, "num_samples": 3, "is_same": True}]


def test_json_goes_to_a_file_or_to_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # One report for both: another one may find another load of the machine.
    written = report()
    write_json(written, str(tmp_path / "report.json"))
    write_json(written, "-")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(capsys.readouterr().out)


def test_figure_that_is_no_number_is_refused_rather_than_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(report(ratios={"x": float("nan")}), "-")


def test_machine_says_what_it_is_and_not_where() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert isinstance(machine["num_cores"], int)
    assert machine["num_cores"] >= 1
    assert not any("/" in str(value) for name, value in machine.items() if name != "cpu")


def test_commit_is_named() -> None:
    assert commit_id().removesuffix("-dirty").isalnum()


def test_ratio_is_that_of_medians() -> None:
    assert ratio([1.0, 100.0, 3.0], [1.5, 1.5, 9.0]) == 2.0


def test_ratio_that_cannot_be_measured_is_left_out() -> None:
    assert present({"a": ratio([], [1.0]), "b": ratio([1.0], []), "c": ratio([1.0], [0.0]), "d": 2.0}) == {"d": 2.0}


def test_report_names_a_model_file_without_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.touch()
    assert model_name(str(file)) == "weights.gguf"
    assert model_name("org/model") == "org/model"


def test_table_shows_rows_ratios_and_notes() -> None:
    shown = _printed(report())
    assert all(text in shown for text in ("shm", "1.23", "yes", "a_over_b = 0.123", "a note"))


def test_rows_with_other_figures_get_a_table_of_their_own() -> None:
    shown = _printed(report(rows=[{"path": "a", "ms": 1}, {"rung": "b", "speed": 2}, {"path": "c", "ms": 3}]))
    assert shown.count("path") == shown.count("rung") == 1


def test_table_with_many_figures_is_turned() -> None:
    rows = [{"scenario": name} | {f"figure_{index}": index for index in range(20)} for name in ("one", "two")]
    lines = _printed(report(rows=rows)).splitlines()
    assert any(line.count("19") == 3 for line in lines), "the name and both values of the last figure share a line"


def _printed(shown: BenchReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report_tables(shown))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_markdown_table_has_all_columns_and_escapes_bars() -> None:
    text = markdown_table([{"system": "a|b", "tokens_per_s": 1234.5}, {"system": "c", "ms": None}])
    assert text == "| system | tokens per s |\n| --- | --- |\n| a\\|b | 1,234 |\n| c | - |\n"


def test_history_is_appended_with_one_header(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    assert append_report(report(), path) == 3
    append_report(report(), path)
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert tuple(lines[0]) == COLUMNS
    assert len(lines) == 6
    assert [(line["row"], line["metric"], line["value"]) for line in lines[:3]] == [
        ("shm", "ms", "1.23457"),
        ("shm", "num_samples", "3"),
        ("ratios", "a_over_b", "0.123457"),
    ]
    assert json.loads(lines[0]["settings"]) == {"model": "tiny"}


def test_plot_is_a_picture(tmp_path: Path) -> None:
    write_plot(report(), str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("target", ["out.txt", "missing-folder/out.png"])
def test_plot_that_cannot_be_written_is_refused_beforehand(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_plottable(str(tmp_path / target))
    assert caught.value.field == "plot"
