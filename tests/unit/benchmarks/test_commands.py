"""The commands' flags, and where a report goes."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.common import history
from benchmarks.common.deliver import Outputs, run_and_deliver
from benchmarks.common.progress import BenchProgress
from benchmarks.common.report import BenchReport
from kvrelay.cli.main import app
from kvrelay.errors import InvalidRequest


@pytest.mark.parametrize("command", ["load", "interference", "ladder", "transfer", "spec"])
def test_every_benchmark_writes_its_report_where_it_is_told(command: str) -> None:
    shown = CliRunner().invoke(app, ["bench", command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.stdout)
    assert all(flag in text for flag in ("--json", "--plot", "--record", "--model"))


async def measure(progress: BenchProgress) -> BenchReport:
    progress.begin(1)
    progress.say("measuring")
    progress.advance()
    return BenchReport("demo", {}, [{"path": "shm", "ms": 1.5}], {"a_over_b": 2.0})


def deliver(outputs: Outputs) -> tuple[str, str]:
    out, err = (Console(file=io.StringIO(), width=100) for _ in range(2))
    run_and_deliver("demo", measure, outputs, out, err)
    assert isinstance(out.file, io.StringIO)
    assert isinstance(err.file, io.StringIO)
    return out.file.getvalue(), err.file.getvalue()


def test_table_goes_to_standard_output_and_progress_to_standard_error() -> None:
    out, err = deliver(Outputs())
    assert "shm" in out
    assert err == "demo: measuring\n"


def test_standard_output_belongs_to_json_when_it_goes_there(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = deliver(Outputs(json_file="-"))
    assert out == ""
    assert "shm" in err
    assert json.loads(capsys.readouterr().out)["ratios"] == {"a_over_b": 2.0}


def test_figures_are_recorded_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "results.csv"
    monkeypatch.setattr(history, "RESULTS_FILE", target)
    deliver(Outputs())
    assert not target.exists()
    _, err = deliver(Outputs(is_recorded=True))
    assert "2 figures appended" in err
    assert len(target.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "outputs", [Outputs(json_file="no-such-folder/report.json"), Outputs(plot_file="no-such-folder/plot.png")]
)
def test_report_that_could_not_be_written_is_refused_before_measuring(outputs: Outputs) -> None:
    async def never(progress: BenchProgress) -> BenchReport:
        raise AssertionError("measured in vain")

    console = Console(file=io.StringIO())
    with pytest.raises(InvalidRequest, match="no-such-folder"):
        run_and_deliver("demo", never, outputs, console, console)


def test_file_that_cannot_be_written_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        deliver(Outputs(json_file=str(tmp_path)))
    assert caught.value.field == "json"
