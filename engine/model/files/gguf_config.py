"""GGUF metadata to `ModelConfig`. Torch-free; refuses what the forward does not compute.

Llama 3's rope scaling is not in the metadata but in the tensor `rope_freqs.weight`, which `gguf_weights.py` reads.
Which tokens end a turn is found out in `kvrelay/text/roles.py`, for the gateway as well.
"""

from collections.abc import Iterator

import numpy as np

from engine.config import ModelConfig, RopeConfig, RopeScaling
from engine.model.files.config_checks import check_layer_count, check_model_config
from engine.model.files.gguf_file import GgufFile
from kvrelay.errors import InvalidRequest, shown
from kvrelay.text.gguf_vocab import read_gguf_vocabulary

_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_NEUTRAL_FACTORS = (
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "logit_scale",
    "residual_scale",
)
"""Keys that change what is computed unless they are 0 or 1, which say that there is nothing of the kind."""
_ROPE_NOTES = ("scaling.original_context_length", "scaling.finetuned")
"""Keys under `rope.` that tell where a scaling comes from and change nothing that is computed here."""
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
    if len(embedding.shape) != 2:
        raise reader.error(f"tensor {EMBEDDING_TENSOR} has shape {list(embedding.shape)}, which is no matrix")
    num_layers = reader.integer("block_count")
    check_layer_count(num_layers, len(file.tensors), f"{file.path}: {architecture}.block_count")
    vocabulary = read_gguf_vocabulary(file.metadata, file.path)
    return check_model_config(
        ModelConfig(
            architecture=architecture,
            vocab_size=embedding.shape[0],
            hidden_size=hidden_size,
            intermediate_size=reader.integer("feed_forward_length"),
            num_layers=num_layers,
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
            bos_token_id=vocabulary.bos_token_id,
            eos_token_ids=vocabulary.end_token_ids,
        ),
        str(file.path),
    )


def _refuse_variants(reader: "_Metadata") -> None:
    if reader.integer("expert_count", 0):
        raise reader.error("mixture-of-experts models are not supported")
    if (parts := reader.file.metadata.get("split.count", 1)) not in (0, 1):
        raise reader.error(f"split.count is {shown(parts)}: one of several files; merge them (gguf-split --merge)")
    for key in _NEUTRAL_FACTORS:
        if reader.number(key, 0.0) not in (0.0, 1.0):
            raise reader.error(f"{reader.architecture}.{key} of {reader.number(key):g} is not supported")


def _rope(reader: "_Metadata") -> RopeConfig:
    """Rotary settings in each spelling that llama.cpp reads; a key that it does not explain is refused by name."""
    theta = reader.number("rope.freq_base", 10000.0)
    kind = reader.text("rope.scaling.type", "linear")
    # The older key counts where the newer one is missing, and 0 stands for 1 in both.
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 0.0)) or 1.0
    if kind not in ("none", "linear"):
        raise reader.error(f"rope scaling type {shown(kind)} is not supported, only 'none' and 'linear'")
    known = ("dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor", *_ROPE_NOTES)
    for key in reader.keys("rope."):
        if key == "scaling.attn_factor" and reader.number("rope.scaling.attn_factor") == 1.0:
            continue
        if key not in known:
            raise reader.error(f"{reader.architecture}.rope.{shown(key)[1:-1]} is not supported")
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta=theta)
    return RopeConfig(theta=theta, scaling=RopeScaling.LINEAR, factor=factor)


class _Metadata:
    """Typed access to the keys of the file's architecture, with errors that name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise self.error(f"architecture {shown(architecture)} is not one of {', '.join(_ARCHITECTURES)}")
        self.architecture = str(architecture)

    def error(self, description: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self.file.path}: {description}")

    def keys(self, prefix: str) -> Iterator[str]:
        """The keys of the architecture that begin with `prefix`, without it."""
        start = f"{self.architecture}.{prefix}"
        return (key.removeprefix(start) for key in self.file.metadata if key.startswith(start))

    def integer(self, key: str, default: int | None = None) -> int:
        """`<architecture>.<key>`, where a list of equal values, one per layer, counts as the value."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{self.architecture}.{key} must be one integer, not {shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """`<architecture>.<key>`, an fp32 value in its shortest form: 1e-05, not 9.99999974e-06."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{self.architecture}.{key} must be a number, not {shown(value)}")
        if not abs(value) <= np.finfo(np.float32).max:  # NaN is not either
            raise self.error(f"{self.architecture}.{key} must be a finite fp32 number, not {shown(value)}")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str) -> str:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, str):
            raise self.error(f"{self.architecture}.{key} must be text, not {shown(value)}")
        return value
