"""`kvrelay train-drafter`: flags become settings, mistakes name their flag, and the figures come out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.training import pipeline
from engine.training.settings import GenerationSettings, TrainingSettings
from engine.training.train import HistoryEntry
from kvrelay.cli.main import app

ENTRY = HistoryEntry(40, 1.5, 3.25, (0.5, 0.4, 0.3, 0.2, 0.1, 0.0), (0.5, 0.7, 0.76, 0.77, 0.78, 0.78), {"math": 0.6})


class _Recorded:
    """Stands for the training and remembers what it was told."""

    def __init__(self) -> None:
        self.generation: GenerationSettings | None = None
        self.training: TrainingSettings | None = None
        self.places: tuple[str, Path, Path] | None = None
        self.start_from: Path | None = None

    def train(
        self,
        model: str,
        out: Path,
        work_dir: Path,
        generation: GenerationSettings,
        training: TrainingSettings,
        progress: pipeline.Progress,
        start_from: Path | None,
    ) -> pipeline.TrainedHead:
        self.start_from = start_from
        self.places, self.generation, self.training = (model, out, work_dir), generation, training
        progress("text", 0.5, "10 answer tokens")
        progress("training", 1.0, "step 40, loss 3.250")
        return pipeline.TrainedHead(out, out.with_suffix(".json"), (replace(ENTRY, step=20), ENTRY))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> _Recorded:
    recorded = _Recorded()
    monkeypatch.setattr(pipeline, "train_drafter", recorded.train)
    return recorded


def test_flags_reach_the_training(recorded: _Recorded, tmp_path: Path) -> None:
    out = tmp_path / "head.safetensors"
    flags = ["--out", str(out), "--model", "some/model", "--tokens", "5000", "--text-minutes", "2", "--steps", "40"]
    flags += ["--seed", "7", "--streams", "3", "--context", "256", "--vocab-size", "900", "--tap-layers", "1,4,8"]
    flags += ["--start-from", "older.safetensors"]
    result = CliRunner().invoke(app, ["train-drafter", *flags, "--json"])
    assert result.exit_code == 0, result.output
    assert recorded.places == ("some/model", out, tmp_path / "head.work")
    assert recorded.start_from == Path("older.safetensors")
    assert recorded.generation == GenerationSettings(
        num_tokens=5000, minutes=2.0, seed=7, num_streams=3, max_context=256
    )
    assert recorded.training is not None
    assert (recorded.training.num_steps, recorded.training.vocab_size) == (40, 900)
    assert (recorded.training.seed, recorded.training.tap_layers) == (7, (1, 4, 8))
    shown = json.loads(result.stdout)
    assert shown["head"] == str(out)
    assert [entry["step"] for entry in shown["history"]] == [20, 40]


def test_table_shows_held_out_acceptance(recorded: _Recorded, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train-drafter", "--out", str(tmp_path / "head.safetensors")])
    assert result.exit_code == 0, result.output
    assert "50.0%" in result.stdout
    assert "0.76" in result.stdout
    assert "the model writes text: 50.0% 10 answer tokens" in result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--text-minutes", "0"], "--text-minutes: must be above 0"),
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--vocab-size", "0"], "--vocab-size: must be within"),
        (["--tap-layers", "1,x"], "--tap-layers: '1,x' is not a list of numbers"),
    ],
)
def test_mistakes_name_their_flag(recorded: _Recorded, tmp_path: Path, flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["train-drafter", "--out", str(tmp_path / "head.safetensors"), *flags])
    assert result.exit_code == 2
    assert message in result.stderr
    assert recorded.places is None


def test_output_of_another_kind_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train-drafter", "--out", str(tmp_path / "head.bin")])
    assert result.exit_code == 2
    assert "--out" in result.stderr
