"""A whole run on a tiny model: it learns, its file loads, it follows from its seed, and it goes on after an end."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.model.files.open import load_config
from engine.spec.head.format import DraftHeadFile, load_head
from engine.training.corpus import Conversation
from engine.training.pipeline import TrainedHead, choose_vocabulary, default_tap_layers, split, train_drafter
from engine.training.settings import GenerationSettings, TrainingSettings
from engine.training.train import rate_factor
from kvrelay.errors import InvalidRequest

GENERATION = GenerationSettings(num_tokens=600, minutes=5, seed=2, num_streams=8, max_context=64)
TRAINING = TrainingSettings(num_steps=24, seed=2, vocab_size=128, batch_tokens=200, checkpoint_minutes=1e-6)


def _train(
    source: Path,
    folder: Path,
    training: TrainingSettings = TRAINING,
    text: Path | None = None,
    start_from: Path | None = None,
) -> TrainedHead:
    folder.mkdir(exist_ok=True)
    out, work = folder / "head.safetensors", folder / "work"
    if text is not None:
        shutil.copytree(text, work / "text", dirs_exist_ok=True)
    return train_drafter(str(source), out, work, GENERATION, training, lambda part, share, line: None, start_from)


@pytest.fixture(scope="module")
def text(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the tiny model writes; a run that is given it writes nothing."""
    folder = tmp_path_factory.mktemp("run")
    _train(tiny_target, folder, replace(TRAINING, num_steps=1))
    return folder / "work" / "text"


def _load(trained: TrainedHead, source: Path) -> DraftHeadFile:
    return load_head(trained.path, load_config(str(source)))


def test_head_learns_and_its_file_loads(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    trained = _train(tiny_target, tmp_path, text=text)
    assert trained.history[-1].loss < 0.9 * trained.history[0].loss
    head = _load(trained, tiny_target)
    assert head.tap_layers == (0, 1)
    assert len(head.vocab_ids) == 128
    log = json.loads(trained.log_path.read_text())
    assert log["history"][-1]["step"] == 24
    assert log["text"]["num_answer_tokens"] >= 500
    assert str(tmp_path) not in trained.log_path.read_text()


def test_run_follows_from_its_seed(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    settings = replace(TRAINING, num_steps=6)
    first, second = (
        _load(_train(tiny_target, tmp_path / name, settings, text), tiny_target) for name in ("one", "two")
    )
    other = _load(_train(tiny_target, tmp_path / "three", replace(settings, seed=3), text), tiny_target)
    assert torch.equal(first.vocab_ids, second.vocab_ids)
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    assert any(not torch.equal(first.weights[name], other.weights[name]) for name in first.weights)


def test_run_goes_on_from_its_work_folder(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    _train(tiny_target, tmp_path, replace(TRAINING, num_steps=5), text)
    taps = tmp_path / "work" / "features" / "taps.f16"
    written_ns = taps.stat().st_mtime_ns
    trained = _train(tiny_target, tmp_path, replace(TRAINING, num_steps=9))
    assert (tmp_path / "work" / "text" / "tokens.u32").read_bytes() == (text / "tokens.u32").read_bytes()
    assert taps.stat().st_mtime_ns == written_ns
    assert [entry.step for entry in trained.history] == list(range(1, 10))


def test_run_goes_on_from_another_head(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    first = _train(tiny_target, tmp_path / "first", text=text)
    second = _train(tiny_target, tmp_path / "second", replace(TRAINING, num_steps=2), text, first.path)
    # The same batch, of the same seed: a fresh head's loss would be the same.
    assert second.history[0].loss < first.history[0].loss
    assert json.loads(second.log_path.read_text())["head"]["started_from"] == "head.safetensors"


def test_head_to_go_on_from_must_fit(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    first = _train(tiny_target, tmp_path / "first", replace(TRAINING, num_steps=1, tap_layers=(1,)), text)
    with pytest.raises(InvalidRequest, match=r"sees layers \[1\], not \[0, 1\]") as caught:
        _train(tiny_target, tmp_path / "second", start_from=first.path)
    assert caught.value.field == "start_from"
    with pytest.raises(InvalidRequest, match="no such file") as caught:
        _train(tiny_target, tmp_path / "third", start_from=tmp_path / "missing.safetensors")
    assert caught.value.field == "start_from"


def test_work_folder_of_another_run_is_refused(tiny_target: Path, tmp_path: Path, text: Path) -> None:
    _train(tiny_target, tmp_path, replace(TRAINING, num_steps=1), text)
    with pytest.raises(InvalidRequest, match="another run: vocab_size differs") as caught:
        _train(tiny_target, tmp_path, replace(TRAINING, num_steps=1, vocab_size=64))
    assert caught.value.field == "work_dir"


@pytest.mark.parametrize("taps", [(0,), (0, 1, 2), (1, 0, 1), (-1, 1)])
def test_taps_that_do_not_fit_are_refused(tiny_target: Path, tmp_path: Path, taps: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _train(tiny_target, tmp_path, replace(TRAINING, tap_layers=taps))
    assert caught.value.field == "tap_layers"


def test_output_must_be_a_safetensors_file_in_a_folder_that_exists(tiny_target: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "head.bin", tmp_path / "nowhere" / "head.safetensors"):
        with pytest.raises(InvalidRequest) as caught:
            train_drafter(str(tiny_target), out, tmp_path, GENERATION, TRAINING, lambda part, share, line: None)
        assert caught.value.field == "out"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: GenerationSettings(num_tokens=0), "tokens"),
        (lambda: GenerationSettings(minutes=0), "text_minutes"),
        (lambda: GenerationSettings(greedy_share=1.5), "greedy_share"),
        (lambda: TrainingSettings(num_steps=0), "steps"),
        (lambda: TrainingSettings(vocab_size=40_000), "vocab_size"),
        (lambda: TrainingSettings(learning_rate=0), "learning_rate"),
        (lambda: TrainingSettings(batch_tokens=0), "batch_tokens"),
    ],
)
def test_settings_name_the_field_that_is_wrong(make: Callable[[], object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.field == field


def test_vocabulary_is_what_answers_say_most_often(tiny_target: Path) -> None:
    config = load_config(str(tiny_target))
    text = Conversation(0, "chat", (50, 50, 50, 60, 60, 70, 80, 80, 80), ((3, 9),))
    assert choose_vocabulary([text], config, 5).tolist() == [2, 3, 60, 70, 80]
    assert 50 in choose_vocabulary([text], config, 6).tolist()
    assert len(choose_vocabulary([text], config, 10_000)) == config.vocab_size


def test_held_out_conversations_are_not_learned_from() -> None:
    conversations = [Conversation(index, "chat", (1, 2), ((1, 2),)) for index in range(100, 0, -1)]
    held_out, learned = split(conversations)
    assert [conversations[place].index for place in held_out] == [80, 40]
    assert sorted([*held_out, *learned]) == list(range(100))


def test_taps_spread_over_the_model_and_end_with_its_last_layer() -> None:
    assert default_tap_layers(30) == (7, 15, 29)
    assert default_tap_layers(2) == (0, 1)
    assert default_tap_layers(1) == (0,)


def test_learning_rate_rises_then_falls() -> None:
    factors = [rate_factor(share / 100) for share in range(101)]
    peak = factors.index(max(factors))
    assert factors[:peak] == sorted(factors[:peak])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] < 0.05 < 0.95 < max(factors)
