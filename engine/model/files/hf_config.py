"""`config.json` of a Hugging Face folder to `ModelConfig`. Torch-free; refuses what the forward does not compute.

Both ways of writing rotary settings are read: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`.
"""

from collections.abc import Mapping
from pathlib import Path

from engine.config import ModelConfig, RopeConfig, RopeScaling
from engine.model.files.config_checks import check_model_config
from kvrelay.errors import shown
from kvrelay.formats.json_fields import Json, JsonFields, read_json
from kvrelay.text.hf_vocab import read_hf_vocabulary

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_DEFAULT_THETA = 10000.0
_ROPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
}
"""Fields that a type of scaling is computed from."""
_ROPE_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ROPE_NOTES = frozenset({"original_max_position_embeddings", "finetuned"})
"""Fields that tell where a scaling comes from; only llama3 computes with one of them."""


def read_hf_config(folder: Path) -> ModelConfig:
    """Read `config.json`, and which tokens end a turn, which several files of the folder say.

    Raises:
        InvalidRequest: A file is unreadable, or it asks for something this engine does not compute. Names `model`.
    """
    reader = read_json(folder / "config.json")
    names = reader.strings("architectures")
    architecture = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
    if architecture is None:
        found = ", ".join(map(shown, names[:4])).replace("'", "")
        raise reader.error(f"architecture {found or 'none'} is not one of {', '.join(_ARCHITECTURES)}")
    _refuse_variants(reader, architecture)
    num_heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    return check_model_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=reader.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=reader.integer("num_key_value_heads", num_heads),
            head_dim=reader.integer("head_dim", hidden_size // max(num_heads, 1)),
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            max_position=max_position,
            rope=_rope(reader, max_position),
            tie_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=architecture == "qwen2",
            qk_norm=architecture == "qwen3",
            sliding_window=_sliding_window(reader, architecture, num_layers),
            bos_token_id=reader.token_id("bos_token_id"),
            eos_token_ids=read_hf_vocabulary(folder).end_token_ids,
        ),
        str(reader.path),
    )


def _refuse_variants(reader: JsonFields, architecture: str) -> None:
    if (activation := reader.get("hidden_act", "silu")) != "silu":
        raise reader.error(f"hidden_act {shown(activation)} is not supported, only 'silu'")
    if reader.get("quantization_config") is not None:
        raise reader.error("quantized checkpoints (quantization_config) are not supported; GGUF ones are")
    for name in ("attention_bias", "mlp_bias"):  # biases on more than q, k and v
        if architecture != "qwen2" and reader.flag(name):
            raise reader.error(f"{name} is not supported for {architecture}")
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor other than 1 is not supported")


def _rope(reader: JsonFields, max_position: int) -> RopeConfig:
    rope = JsonFields(_rope_fields(reader), reader.path)
    theta = rope.number("rope_theta", reader.number("rope_theta", _ROPE_DEFAULT_THETA))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor other than 1 is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("type", kind) != kind:
        raise reader.error(f"rope_type is {shown(kind)}, but type is {shown(rope.get('type'))}")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise reader.error(f"rope type {shown(kind)} is not supported, only 'default', 'linear' and 'llama3'")
    for name, value in rope.fields.items():
        if value is not None and name not in _ROPE_FIELDS[kind] | _ROPE_COMMON_FIELDS | _ROPE_NOTES:
            raise reader.error(f"{shown(name)[1:-1]} is not supported with the rope type {kind!r}")
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling=RopeScaling.LLAMA3,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position=rope.integer("original_max_position_embeddings", max_position),
        )
    return RopeConfig(theta=theta)


def _rope_fields(reader: JsonFields) -> Json:
    """The rotary settings as transformers 5 has them, or as older versions do; if both are there they must agree."""
    newer, older = reader.mapping("rope_parameters"), reader.mapping("rope_scaling")
    if any(isinstance(value, Mapping) for value in (*newer.values(), *older.values())):
        raise reader.error("rope_parameters per layer type are not supported")
    for name in newer.keys() & older.keys():
        if newer[name] != older[name]:
            raise reader.error(
                f"rope_parameters and rope_scaling differ in {shown(name)[1:-1]}: {shown(newer[name])} and "
                f"{shown(older[name])}"
            )
    return {**older, **newer}


def _sliding_window(reader: JsonFields, architecture: str, num_layers: int) -> int | None:
    window = reader.optional_integer("sliding_window")
    if architecture == "llama" or window is None:
        return None
    if architecture in ("qwen2", "qwen3"):
        if not reader.flag("use_sliding_window"):
            return None
        first_windowed_layer = reader.integer("max_window_layers", num_layers)
        types = set(reader.strings("layer_types"))
        if not types:
            types |= {"full_attention"} if first_windowed_layer > 0 else set()
            types |= {"sliding_attention"} if first_windowed_layer < num_layers else set()
        if len(types) > 1:
            raise reader.error("a sliding window on only some of the layers is not supported")
        return window if types == {"sliding_attention"} else None
    return window
