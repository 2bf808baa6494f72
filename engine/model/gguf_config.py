"""GGUF metadata to `ModelConfig`. Torch-free; refuses what the forward does not compute.

Llama 3's rope scaling is not in the metadata but in the tensor `rope_freqs.weight`, which `gguf_weights.py` reads.
"""

import numpy as np

from engine.config import ModelConfig, RopeConfig, RopeScaling
from engine.errors import InvalidRequest
from engine.model.config_checks import check_model_config
from engine.model.gguf_file import GgufFile

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
EMBEDDING_TENSOR = "token_embd.weight"
OUTPUT_TENSOR = "output.weight"
FIRST_QUERY_BIAS = "blk.0.attn_q.bias"


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Read the model's shape from an open GGUF file.

    Raises:
        InvalidRequest: A key is missing or wrong, or asks for what this engine does not compute. Names `model`.
    """
    reader = _Metadata(file)
    architecture = reader.architecture
    _refuse_variants(reader)
    hidden_size, num_heads = reader.integer("embedding_length"), reader.integer("attention.head_count")
    head_dim = reader.integer("attention.key_length", hidden_size // max(num_heads, 1))
    if (value_dim := reader.integer("attention.value_length", head_dim)) != head_dim:
        raise reader.error(f"keys of {head_dim} and values of {value_dim} elements are not supported")
    if (rotary_dim := reader.integer("rope.dimension_count", head_dim)) != head_dim:
        raise reader.error(f"rotating {rotary_dim} of {head_dim} elements is not supported")
    if (embedding := file.tensors.get(EMBEDDING_TENSOR)) is None:
        raise reader.error(f"tensor {EMBEDDING_TENSOR} is missing")
    eos_ids = (file.metadata.get(key) for key in _EOS_KEYS)
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    return check_model_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=reader.integer("feed_forward_length"),
            num_layers=reader.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=reader.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=reader.number("attention.layer_norm_rms_epsilon"),
            max_position=reader.integer("context_length"),
            rope=_rope(reader),
            tie_embeddings=OUTPUT_TENSOR not in file.tensors,
            attention_bias=architecture == "qwen2" or FIRST_QUERY_BIAS in file.tensors,
            qk_norm=architecture == "qwen3",
            sliding_window=reader.integer("attention.sliding_window", 0) or None,
            bos_token_id=bos_id if isinstance(bos_id, int) else None,
            eos_token_ids=frozenset(eos_id for eos_id in eos_ids if isinstance(eos_id, int)),
        ),
        str(file.path),
    )


def _refuse_variants(reader: "_Metadata") -> None:
    if reader.integer("expert_count", 0):
        raise reader.error("mixture-of-experts models are not supported")
    if (parts := reader.file.metadata.get("split.count", 1)) not in (0, 1):
        raise reader.error(f"is one of {parts} parts; merge them first (gguf-split --merge)")


def _rope(reader: "_Metadata") -> RopeConfig:
    theta = reader.number("rope.freq_base", 10000.0)
    kind = reader.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=reader.number("rope.scaling.factor"))
    raise reader.error(f"rope scaling type {kind!r} is not supported, only 'none' and 'linear'")


class _Metadata:
    """Typed access to the keys of the file's architecture, with errors that name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise self.error(f"architecture {architecture!r} is not one of {', '.join(_ARCHITECTURES)}")
        self.architecture = str(architecture)

    def error(self, description: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self.file.path}: {description}")

    def integer(self, key: str, default: int | None = None) -> int:
        """`<architecture>.<key>`, where a list of equal values, one per layer, counts as the value."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{self.architecture}.{key} must be one integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """`<architecture>.<key>`, an fp32 value in its shortest form: 1e-05, not 9.99999974e-06."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{key} must be a number, not {value!r}")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise self.error(f"{self.architecture}.{key} must be text, not {value!r}")
        return value
