"""Loading refuses what is incomplete or foreign, naming the tensor, and leaves nothing open."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file

from engine.errors import InvalidRequest
from engine.model.hf_config import read_hf_config
from engine.model.loader import load_config, load_model
from engine.model.weights import parameter_shapes
from tests.tiny_models import write_tiny_gguf

Tensors = dict[str, npt.NDArray[np.float32]]

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config; `tensors` and `save` fill it."""
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path


def tensors(folder: Path) -> Tensors:
    rng = np.random.default_rng(0)
    shapes = parameter_shapes(read_hf_config(folder))
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def save(folder: Path, content: Tensors, name: str = "model.safetensors") -> None:
    save_file(content, folder / name)


def refused(source: Path, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        load_model(str(source))
    assert caught.value.field == "model"


@pytest.mark.usefixtures("no_leaks")
def test_a_loaded_model_keeps_no_file_open(folder: Path) -> None:
    save(folder, tensors(folder))
    model = load_model(str(folder))
    assert model.config == load_config(str(folder))
    assert model.device == torch.device("cpu")
    gguf_model = load_model(str(write_tiny_gguf(folder, folder / "a.gguf")))
    assert gguf_model.fingerprint == model.fingerprint


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(name: str, folder: Path) -> None:
    content = tensors(folder)
    del content[name]
    save(folder, content)
    refused(folder, f"tensor {name} is missing")


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"])
def test_an_unused_tensor_is_named(name: str, folder: Path) -> None:
    save(folder, {**tensors(folder), name: np.zeros(3, np.float32)})
    refused(folder, f"tensor {name} has no use")


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    save(folder, {**tensors(folder), "model.norm.weight": np.zeros(15, np.float32)})
    refused(folder, r"model\.norm\.weight has shape \[15\] instead of \[16\]")


def test_a_tensor_of_an_integer_type_is_named(folder: Path) -> None:
    content: dict[str, npt.NDArray[np.generic]] = {**tensors(folder)}
    content["model.norm.weight"] = np.zeros(16, np.int8)
    save_file(content, folder / "model.safetensors")
    refused(folder, r"model\.norm\.weight has the unsupported type I8")


def test_saved_rotary_buffers_are_ignored(folder: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    save(folder, {**tensors(folder), **buffer})
    assert load_model(str(folder)).config.num_layers == 2


def test_a_tied_head_may_be_stored_twice_but_not_differ(folder: Path) -> None:
    content = tensors(folder)
    (folder / "config.json").write_text(json.dumps({**FIELDS, "tie_word_embeddings": True}))
    save(folder, {**content, "lm_head.weight": content["model.embed_tokens.weight"].copy()})
    assert load_model(str(folder)).config.tie_embeddings
    save(folder, content)
    refused(folder, r"lm_head\.weight differs")


def test_a_truncated_safetensors_file_is_refused(folder: Path) -> None:
    save(folder, tensors(folder))
    path = folder / "model.safetensors"
    content = path.read_bytes()
    for length in (0, 4, 100, len(content) - 1):
        path.write_bytes(content[:length])
        refused(folder, "truncated or no valid safetensors file")


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    refused(folder, "has no safetensors files")


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ("{", "no valid index"),
        ("{}", "no valid index"),
        ('{"weight_map": []}', "no valid index"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "outside the folder"),
        ('{"weight_map": {"a": "b.safetensors"}}', "lacks b.safetensors"),
    ],
)
def test_a_wrong_index_is_refused(index: str, what: str, folder: Path) -> None:
    save(folder, tensors(folder))
    (folder / "model.safetensors.index.json").write_text(index)
    refused(folder, what)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    content = tensors(folder)
    save(folder, content, "a.safetensors")
    save(folder, {"model.norm.weight": content["model.norm.weight"]}, "b.safetensors")
    refused(folder, r"model\.norm\.weight is in more than one file")


def test_missing_and_unused_gguf_tensors_go_by_their_own_names(folder: Path) -> None:
    content = tensors(folder)
    save(folder, {name: values for name, values in content.items() if "layers.1.mlp.down_proj" not in name})
    refused(write_tiny_gguf(folder, folder / "short.gguf"), r"tensor blk\.1\.ffn_down\.weight is missing")
    save(folder, {**content, "model.layers.2.mlp.down_proj.weight": content["model.layers.1.mlp.down_proj.weight"]})
    (folder / "config.json").write_text(json.dumps({**FIELDS, "num_hidden_layers": 3}))
    long = write_tiny_gguf(folder, folder / "long.gguf")
    refused(long, r"tensor blk\.2\.attn_norm\.weight is missing")


def test_a_truncated_gguf_file_is_refused(folder: Path) -> None:
    save(folder, tensors(folder))
    path = write_tiny_gguf(folder, folder / "a.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 4096])
    refused(path, "ends behind the end of the file")
