"""Loading refuses what is incomplete or foreign, naming the tensor, and leaves nothing open."""

import json
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import structlog
import torch
from safetensors.numpy import save_file

from engine.model.files.gguf_file import GgufFile
from engine.model.files.hf_config import read_hf_config
from engine.model.files.open import load_config
from engine.model.loader import load_model
from engine.model.weights import parameter_shapes
from kvrelay.errors import InvalidRequest
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
        ("{", r"cannot read .*index\.json"),
        ("{}", "weight_map names no file"),
        ('{"weight_map": []}', r"weight_map must be an object, not \[\]"),
        ('{"weight_map": {"a": ["b"]}}', "weight_map must name files"),
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
    save(folder, content, "model-00001-of-00002.safetensors")
    save(folder, {"model.norm.weight": content["model.norm.weight"]}, "model-00002-of-00002.safetensors")
    refused(folder, r"model\.norm\.weight is in more than one file")


def test_files_that_do_not_belong_are_ignored_and_named(folder: Path) -> None:
    save(folder, tensors(folder))
    for name in ("adapter_model.safetensors", "model-00001-of-00002.safetensors", "consolidated.safetensors"):
        save(folder, {"base_model.lora_A.weight": np.zeros(3, np.float32)}, name)
    with structlog.testing.capture_logs() as lines:
        assert load_model(str(folder)).config.num_layers == 2
    (line,) = [line for line in lines if line["event"] == "model.files_ignored"]
    assert line["files"] == [
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "model-00001-of-00002.safetensors",
    ]


def test_numbered_shards_are_read_without_their_index(folder: Path) -> None:
    content = tensors(folder)
    names = sorted(content)
    save(folder, {name: content[name] for name in names[:9]}, "model-00001-of-00002.safetensors")
    save(folder, {"lora": np.zeros(3, np.float32)}, "adapter_model.safetensors")
    refused(folder, "1 of 2 shards; number 2 is missing")
    save(folder, {name: content[name] for name in names[9:]}, "model-00002-of-00002.safetensors")
    fingerprint = load_model(str(folder)).fingerprint
    save(folder, content, "model-00001-of-00003.safetensors")
    refused(folder, "shards of several checkpoints: of 00002, 00003")
    save(folder, content)
    assert load_model(str(folder)).fingerprint == fingerprint


def test_a_folder_with_an_adapter_only_is_refused(folder: Path) -> None:
    save(folder, {"lora": np.zeros(3, np.float32)}, "adapter_model.safetensors")
    refused(folder, r"neither model\.safetensors nor .*'adapter_model\.safetensors' is none of them")


def test_a_tied_model_without_its_embedding_says_so(folder: Path) -> None:
    content = tensors(folder)
    del content["model.embed_tokens.weight"]
    (folder / "config.json").write_text(json.dumps({**FIELDS, "tie_word_embeddings": True}))
    save(folder, content)
    refused(folder, r"tensor model\.embed_tokens\.weight is missing")


@pytest.mark.parametrize("num_layers", [40, 2_000_000_000])
def test_more_layers_than_tensors_are_refused_before_anything_is_built(num_layers: int, folder: Path) -> None:
    save(folder, tensors(folder))
    path = write_tiny_gguf(folder, folder / "a.gguf")
    whole = path.read_bytes()
    key = b"llama.block_count" + struct.pack("<I", 4)
    assert whole.count(key + struct.pack("<I", 2)) == 1
    path.write_bytes(whole.replace(key + struct.pack("<I", 2), key + struct.pack("<I", num_layers)))
    (folder / "config.json").write_text(json.dumps({**FIELDS, "num_hidden_layers": num_layers}))
    started = time.process_time()
    refused(path, rf"llama\.block_count is {num_layers}, but there are 21 tensors only")
    refused(folder, rf"config\.json: num_hidden_layers is {num_layers}, but there are 21 tensors only")
    assert time.process_time() - started < 1.0


def test_a_gguf_type_that_cannot_be_read_is_refused_at_once(folder: Path) -> None:
    save(folder, tensors(folder))
    writer = gguf.GGUFWriter(folder / "a.gguf", "llama")
    writer.add_tensor("ids", np.zeros(3, np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(folder / "a.gguf", "tensor ids has the unsupported type I32")


@pytest.mark.parametrize("factors", [[1.0, 0.0, 1.0, 1.0], [1.0, np.nan, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0]])
def test_rotary_factors_that_are_no_divisors_are_refused(factors: list[float], folder: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps({**FIELDS, "rope_parameters": rope}))
    save(folder, tensors(folder))
    path = write_tiny_gguf(folder, folder / "a.gguf")
    file = GgufFile(path)
    offset = file.tensors["rope_freqs.weight"].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 16] = np.array(factors, np.float32).tobytes()
    path.write_bytes(content)
    refused(path, "rotary factors must be positive and finite")


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
