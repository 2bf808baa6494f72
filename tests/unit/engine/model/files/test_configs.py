"""config.json and GGUF metadata to `ModelConfig`, and what they are refused for."""

import dataclasses
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.config import ModelConfig, RopeConfig, RopeScaling
from engine.model.files.gguf_config import read_gguf_config
from engine.model.files.gguf_file import GgufFile
from engine.model.files.hf_config import read_hf_config
from kvrelay.errors import InvalidRequest
from kvrelay.formats.gguf_header import read_gguf_metadata
from kvrelay.text.gguf_vocab import read_gguf_vocabulary
from tests.unit.kvrelay.text.gguf_files import write_gguf

HF_FIELDS: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPECTED = ModelConfig(
    architecture="llama",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=512,
    rope=RopeConfig(theta=500.0),
    tie_embeddings=False,
    bos_token_id=1,
    eos_token_ids=frozenset({2}),
)
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
LLAMA3 = RopeConfig(500.0, RopeScaling.LLAMA3, 8.0, 1.0, 4.0, 128)


def hf_config(folder: Path, **changes: object) -> ModelConfig:
    fields = {name: value for name, value in (HF_FIELDS | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    return read_hf_config(folder)


def gguf_config(path: Path, architecture: str = "llama", **changes: object) -> ModelConfig:
    keys: dict[str, object] = {
        "embedding_length": 64,
        "feed_forward_length": 160,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500.0,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        full = f"{architecture}.{key}"
        match value:
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
            case str() if value != "absent":
                writer.add_string(full, value)
            case list():
                writer.add_array(full, value)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.zeros((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_config(GgufFile(path))


def test_common_fields(tmp_path: Path) -> None:
    assert hf_config(tmp_path) == EXPECTED
    assert gguf_config(tmp_path / "a.gguf") == EXPECTED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_key_value_heads": "absent"}, {"num_kv_heads": 4}),
        ({"head_dim": 32}, {"head_dim": 32}),
        ({"head_dim": None}, {"head_dim": 16}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"eos_token_id": [2, 7]}, {"eos_token_ids": frozenset({2, 7})}),
        ({"eos_token_id": None, "bos_token_id": None}, {"eos_token_ids": frozenset(), "bos_token_id": None}),
        ({"rope_theta": "absent"}, {"rope": RopeConfig(10000.0)}),
        ({"rope_scaling": None}, {}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)}),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4, "finetuned": True}},
            {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)},
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 500.0}},
            {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)},
        ),
        ({"eos_token_id": [2, 300]}, {}),  # the model cannot produce the second
        ({"rope_scaling": LLAMA3_SCALING}, {"rope": LLAMA3}),
        ({"rope_theta": "absent", "rope_parameters": {"rope_theta": 500.0, **LLAMA3_SCALING}}, {"rope": LLAMA3}),
        ({"rope_theta": "absent", "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}, {}),
        ({"sliding_window": 20}, {}),  # Llama has none, whatever a config says
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 20},
            {"architecture": "mistral", "sliding_window": 20},
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, {"architecture": "mistral"}),
        (
            {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 20, "use_sliding_window": False},
            {"architecture": "qwen2", "attention_bias": True},
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 20,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            {"architecture": "qwen2", "attention_bias": True, "sliding_window": 20},
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 20,
                "use_sliding_window": True,
                "max_window_layers": 28,
            },
            {"architecture": "qwen2", "attention_bias": True},
        ),
        ({"architectures": ["Qwen3ForCausalLM"]}, {"architecture": "qwen3", "qk_norm": True}),
    ],
)
def test_hf_variants(changes: dict[str, object], expected: dict[str, object], tmp_path: Path) -> None:
    assert hf_config(tmp_path, **changes) == dataclasses.replace(EXPECTED, **expected)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(("eos", "merged"), [(5, {2, 5}), ([5, 6], {2, 5, 6}), (None, {2})])
def test_eos_ids_of_the_generation_config_are_merged(eos: object, merged: set[int], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert hf_config(tmp_path).eos_token_ids == merged


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not one of LlamaForCausalLM"),
        ({"architectures": "absent"}, "architecture none"),
        ({"vocab_size": "absent"}, "vocab_size must be an integer, not None"),
        ({"hidden_size": "64"}, "hidden_size must be an integer"),
        ({"num_attention_heads": 0}, "num_heads must be positive"),
        ({"num_key_value_heads": 3}, "cannot share 3 KV heads"),
        ({"head_dim": 15}, "odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be positive"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["a"]}, "eos_token_id must be"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "must be positive"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "finite number"),
        ({"rope_scaling": {"factor": 2.0}}, "factor is not supported with the rope type 'default'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "beta_fast is not supported with"),
        ({"rope_scaling": {"rope_type": "default", "type": "linear"}}, "rope_type is 'default', but type is 'linear'"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope type \['linear'\]"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}},
            r"rope_parameters and rope_scaling differ in factor: 4\.0 and 2\.0",
        ),
        ({"eos_token_id": -1}, r"config\.json: eos_token_id must be at least 0, not -1"),
        ({"eos_token_id": [2, -3]}, r"config\.json: eos_token_id must be at least 0, not -3"),
        ({"bos_token_id": -1}, r"config\.json: bos_token_id must be at least 0, not -1"),
        ({"num_hidden_layers": [[2]]}, r"num_hidden_layers must be an integer, not \[\[2\]\]"),
        ({"hidden_size": 2**40}, "hidden_size must be positive and below 2"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of texts"),
        ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "above low_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 20,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "only some of the layers",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window must be positive"),
    ],
)
def test_hf_configs_that_are_not_supported_are_refused(changes: dict[str, object], what: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        hf_config(tmp_path, **changes)
    assert caught.value.field == "model"


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id", "eom_token_id", "bos_token_id", "padding_token_id"])
def test_a_negative_token_id_is_refused_by_its_key(key: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", {f"tokenizer.ggml.{key}": -1})
    with pytest.raises(InvalidRequest, match=rf"tokenizer\.ggml\.{key} must be at least 0, not -1") as caught:
        read_gguf_vocabulary(read_gguf_metadata(path), path)
    assert caught.value.field == "model"


def test_a_negative_id_in_the_generation_config_is_refused_by_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -2}')
    with pytest.raises(InvalidRequest, match=r"generation_config\.json: eos_token_id must be at least 0, not -2"):
        hf_config(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff", "[" * 100_000])
def test_unreadable_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("llama", {"attention__key_length": 32, "attention__value_length": 32}, {"head_dim": 32}),
        ("llama", {"attention__head_count_kv": "absent"}, {"num_kv_heads": 4}),
        ("llama", {"attention__head_count_kv": [2, 2]}, {}),
        (
            "llama",
            {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
            {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)},
        ),
        ("llama", {"rope__scaling__type": "none"}, {}),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {}),
        ("llama", {"rope__scaling__type": "linear"}, {}),
        ("llama", {"rope__scale_linear": 0.0}, {}),
        ("llama", {"rope__scale_linear": 4.0}, {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)}),
        ("llama", {"rope__scaling__factor": 4.0}, {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)}),
        (
            "llama",
            {"rope__scaling__factor": 4.0, "rope__scale_linear": 2.0, "rope__scaling__original_context_length": 128},
            {"rope": RopeConfig(500.0, RopeScaling.LINEAR, 4.0)},
        ),
        ("llama", {"rope__scaling__attn_factor": 1.0, "logit_scale": 1.0}, {}),
        ("llama", {"attention__sliding_window": 20}, {"sliding_window": 20}),
        ("mistral", {}, {"architecture": "mistral"}),
        ("qwen2", {}, {"architecture": "qwen2", "attention_bias": True}),
        ("qwen3", {}, {"architecture": "qwen3", "qk_norm": True}),
    ],
)
def test_gguf_variants(
    architecture: str, changes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    found = gguf_config(tmp_path / "a.gguf", architecture, **changes)
    assert found == dataclasses.replace(EXPECTED, **expected)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("architecture", "changes", "what"),
    [
        ("gpt2", {}, "architecture 'gpt2' is not one of llama"),
        ("llama", {"block_count": "absent"}, r"llama\.block_count must be one integer, not None"),
        ("llama", {"attention__head_count_kv": [2, 1]}, "must be one integer"),
        ("llama", {"rope__dimension_count": 8}, "rotating 8 of 16"),
        ("llama", {"attention__key_length": 32, "attention__value_length": 16}, "keys of 32 and values of 16"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"rope__scaling__type": "yarn"}, "rope scaling type 'yarn'"),
        ("llama", {"attention__layer_norm_rms_epsilon": "absent"}, "must be a number"),
        ("llama", {"attention__head_count_kv": [[2], [2]]}, r"head_count_kv must be one integer, not \[2\]"),
        ("llama", {"block_count": [[2, 3]]}, r"llama\.block_count must be one integer, not \[2, 3\]"),
        ("llama", {"rope__scaling__type": "longrope"}, "rope scaling type 'longrope'"),
        ("llama", {"rope__scaling__attn_factor": 1.5}, r"llama\.rope\.scaling\.attn_factor is not supported"),
        ("llama", {"rope__scaling__yarn_ext_factor": 1.0}, r"llama\.rope\.scaling\.yarn_ext_factor is not supported"),
        ("llama", {"rope__scale_linear": "4"}, r"llama\.rope\.scale_linear must be a number, not '4'"),
        ("llama", {"logit_scale": 0.5}, r"llama\.logit_scale of 0\.5 is not supported"),
    ],
)
def test_gguf_files_that_are_not_supported_are_refused(
    architecture: str, changes: dict[str, object], what: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=what) as caught:
        gguf_config(tmp_path / "a.gguf", architecture, **changes)
    assert caught.value.field == "model"


def test_real_model(smollm2_gguf: Path) -> None:
    config = read_gguf_config(GgufFile(smollm2_gguf))
    assert config.tie_embeddings
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.eos_token_ids == {0, 2}  # <|endoftext|>, known by its spelling, and <|im_end|>
