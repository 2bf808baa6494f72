"""`config.json` of a Hugging Face folder to `ModelConfig`. Torch-free; refuses what the forward does not compute.

Both ways of writing rotary settings are read: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import ModelConfig, RopeConfig, RopeScaling
from engine.errors import InvalidRequest
from engine.model.config_checks import check_model_config

Json = Mapping[str, object]

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_DEFAULT_THETA = 10000.0


def read_hf_config(folder: Path) -> ModelConfig:
    """Read `config.json` and the end-of-sequence ids of `generation_config.json`.

    Raises:
        InvalidRequest: A file is unreadable, or it asks for something this engine does not compute. Names `model`.
    """
    fields = _read_json(folder / "config.json")
    reader = _Fields(fields, folder / "config.json")
    names = reader.strings("architectures")
    architecture = next((_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES), None)
    if architecture is None:
        raise reader.error(f"architecture {', '.join(names) or 'none'} is not one of {', '.join(_ARCHITECTURES)}")
    _refuse_variants(reader, architecture)
    num_heads, hidden_size = reader.integer("num_attention_heads"), reader.integer("hidden_size")
    num_layers = reader.integer("num_hidden_layers")
    max_position = reader.integer("max_position_embeddings")
    eos_token_ids = reader.token_ids("eos_token_id")
    if (generation_path := folder / "generation_config.json").is_file():
        eos_token_ids |= _Fields(_read_json(generation_path), generation_path).token_ids("eos_token_id")
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
            bos_token_id=reader.optional_integer("bos_token_id"),
            eos_token_ids=eos_token_ids,
        ),
        str(reader.path),
    )


def _refuse_variants(reader: "_Fields", architecture: str) -> None:
    if (activation := reader.get("hidden_act", "silu")) != "silu":
        raise reader.error(f"hidden_act {activation!r} is not supported, only 'silu'")
    if reader.get("quantization_config") is not None:
        raise reader.error("quantized checkpoints (quantization_config) are not supported; GGUF ones are")
    for name in ("attention_bias", "mlp_bias"):  # biases on more than q, k and v
        if architecture != "qwen2" and reader.flag(name):
            raise reader.error(f"{name} is not supported for {architecture}")
    if reader.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor other than 1 is not supported")


def _rope(reader: "_Fields", max_position: int) -> RopeConfig:
    parameters = reader.mapping("rope_parameters")  # transformers 5
    scaling = parameters or reader.mapping("rope_scaling")
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise reader.error("rope_parameters per layer type are not supported")
    rope = _Fields(scaling, reader.path)
    theta = rope.number("rope_theta", reader.number("rope_theta", _ROPE_DEFAULT_THETA))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise reader.error("partial_rotary_factor other than 1 is not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
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
    raise reader.error(f"rope type {kind!r} is not supported, only 'default', 'linear' and 'llama3'")


def _sliding_window(reader: "_Fields", architecture: str, num_layers: int) -> int | None:
    window = reader.optional_integer("sliding_window")
    if architecture == "llama" or window is None:
        return None
    if architecture in ("qwen2", "qwen3"):
        if not reader.flag("use_sliding_window"):
            return None
        first_windowed_layer = reader.integer("max_window_layers", num_layers)
        layer_types = reader.strings("layer_types") or [
            "sliding_attention" if layer >= first_windowed_layer else "full_attention" for layer in range(num_layers)
        ]
        if len(set(layer_types)) > 1:
            raise reader.error("a sliding window on only some of the layers is not supported")
        return window if layer_types[0] == "sliding_attention" else None
    return window


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("model", f"{path} is no JSON object")
    return content


class _Fields:
    """Typed access to a JSON object, with errors that name file and field."""

    def __init__(self, fields: Json, path: Path) -> None:
        self._fields = fields
        self.path = path

    def error(self, description: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self.path}: {description}")

    def get(self, name: str, default: object = None) -> object:
        """The value, with null counting as absent."""
        value = self._fields.get(name)
        return default if value is None else value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} must be a number, not {value!r}")
        return float(value)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{name} must be an integer, not {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def strings(self, name: str) -> list[str]:
        value = self.get(name, [])
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(f"{name} must be a list, not {value!r}")
        return [str(item) for item in value]

    def mapping(self, name: str) -> Json:
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.error(f"{name} must be an object, not {value!r}")
        return value

    def token_ids(self, name: str) -> frozenset[int]:
        value = self.get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self.error(f"{name} must be a token id or a list of them, not {value!r}")
        return frozenset(items)
