"""A draft head's file: what is written is read, and what does not fit is refused by name."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import ModelConfig, RopeConfig
from engine.spec.head.format import (
    FORMAT,
    FUSE,
    OUTPUT_NORM,
    VOCAB_IDS,
    DraftHeadFile,
    load_head,
    save_head,
    weight_shapes,
)
from kvrelay.errors import InvalidRequest

CONFIG = ModelConfig("llama", 50, 32, 48, 4, 4, 2, 8, 1e-5, 128, RopeConfig(), tie_embeddings=True)


@pytest.fixture
def head() -> DraftHeadFile:
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(CONFIG, 2)
    weights = {name: torch.randn(shape, generator=generator).half() for name, shape in shapes.items()}
    return DraftHeadFile((1, 3), torch.tensor([0, 7, 49], dtype=torch.int32), weights, 1e-5, "00ff")


def test_head_is_read_as_it_was_written(tmp_path: Path, head: DraftHeadFile) -> None:
    path = tmp_path / "head.safetensors"
    save_head(path, head, CONFIG)
    read = load_head(path, CONFIG)
    assert (read.tap_layers, read.rms_norm_eps, read.target_fingerprint) == ((1, 3), 1e-5, "00ff")
    assert torch.equal(read.vocab_ids, head.vocab_ids)
    assert read.vocab_ids.dtype == torch.int32
    assert read.weights.keys() == head.weights.keys()
    assert all(torch.equal(read.weights[name], weight) for name, weight in head.weights.items())
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_training_weights_are_rounded_to_fp16(tmp_path: Path, head: DraftHeadFile) -> None:
    path = tmp_path / "head.safetensors"
    weights = {name: weight.float() / 3 for name, weight in head.weights.items()}
    save_head(path, replace(head, weights=weights, vocab_ids=head.vocab_ids.long()), CONFIG)
    read = load_head(path, CONFIG)
    assert all(torch.equal(read.weights[name], weight.half()) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tap_layers": (1, 4)}, "tap_layers"),
        ({"tap_layers": (3, 1)}, "tap_layers"),
        ({"tap_layers": ()}, "tap_layers"),
        ({"tap_layers": (3,)}, "fuse.weight"),
        ({"vocab_ids": torch.tensor([3, 3])}, "ascending"),
        ({"vocab_ids": torch.tensor([3, 50])}, "vocabulary of 50"),
        ({"vocab_ids": torch.tensor([-1, 3])}, "vocabulary of 50"),
        ({"vocab_ids": torch.tensor([1.0, 3.0])}, "not a list of token ids"),
    ],
)
def test_head_that_does_not_fit_is_not_written(
    tmp_path: Path, head: DraftHeadFile, change: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        save_head(tmp_path / "head.safetensors", replace(head, **change), CONFIG)  # type: ignore[arg-type]  # by name
    assert caught.value.field == "out"
    assert not list(tmp_path.iterdir())


def test_values_beyond_fp16_are_not_written(tmp_path: Path, head: DraftHeadFile) -> None:
    weights = {**head.weights, OUTPUT_NORM: torch.full((32,), 1e6)}
    with pytest.raises(InvalidRequest, match=r"output_norm.weight.*fp16"):
        save_head(tmp_path / "head.safetensors", replace(head, weights=weights), CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, vocab_size=51), "target_vocab_size is 50, not 51"),
        (replace(CONFIG, hidden_size=64), "target_hidden_size is 32, not 64"),
        (replace(CONFIG, num_layers=3), "tap_layers"),
        (replace(CONFIG, num_heads=2), "find_query.weight"),
        (replace(CONFIG, intermediate_size=64), "gate_proj.weight"),
    ],
)
def test_head_of_another_model_is_refused(
    tmp_path: Path, head: DraftHeadFile, config: ModelConfig, message: str
) -> None:
    path = tmp_path / "head.safetensors"
    save_head(path, head, CONFIG)
    with pytest.raises(InvalidRequest, match=message) as caught:
        load_head(path, config)
    assert caught.value.field == "draft_head"


def test_files_that_are_no_heads_are_refused(tmp_path: Path, head: DraftHeadFile) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(InvalidRequest, match="no such file"):
        load_head(path, CONFIG)
    path.write_bytes(b"not a safetensors file")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_head(path, CONFIG)
    save_head(path, head, CONFIG)
    tensors = load_file(path)
    numbers = {"target_vocab_size": "50", "target_hidden_size": "32"}
    good = {"format": FORMAT, "tap_layers": "1,3", "rms_norm_eps": "1e-05", **numbers}
    for metadata, message in (
        ({}, "not a draft head"),
        ({**good, "format": "kvrelay-draft-head-9"}, "kvrelay-draft-head-9"),
        ({**good, "tap_layers": "1,x"}, "metadata is damaged"),
        ({"format": FORMAT, **numbers}, "metadata is damaged"),
    ):
        save_file(tensors, path, metadata)
        with pytest.raises(InvalidRequest, match=message):
            load_head(path, CONFIG)
    for left_out in (VOCAB_IDS, FUSE):
        save_file({name: tensor for name, tensor in tensors.items() if name != left_out}, path, good)
        with pytest.raises(InvalidRequest, match=f"tensor {left_out} is missing"):
            load_head(path, CONFIG)
    save_file({**tensors, "extra": torch.zeros(1)}, path, good)
    with pytest.raises(InvalidRequest, match="extra has no use"):
        load_head(path, CONFIG)
