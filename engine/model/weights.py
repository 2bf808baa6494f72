"""The parameters a Llama-family model must have, and bringing them from a file into the form the kernels want.

`engine/model/files/hf_weights.py` and `engine/model/files/gguf_weights.py` read the files; this module knows neither.
Every parameter must be there in its shape, and every tensor of the file must be used: a checkpoint of another kind is
refused, not half loaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.interface import Kernels, Linear
from kvrelay.errors import InvalidRequest, shown

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


class WeightReader(Protocol):
    """An open checkpoint. Parameters go by their Hugging Face names; each format has its own for the same thing."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor in the files that is a parameter, by its stored name."""

    def stored_name(self, parameter: str) -> str:
        """The name in the files of a parameter."""

    def read(self, parameter: str) -> Tensor:
        """The parameter's values, fp32 on the CPU; not to be changed. Called from several threads."""

    def read_first_row(self, parameter: str) -> Tensor:
        """Row 0 of a matrix, or a whole vector; fp32 on the CPU."""

    def rope_factors(self) -> Tensor | None:
        """[head_dim / 2] divisors of the rotary frequencies, where the files have them."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [hidden_size]
    qkv: Linear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: q heads, k heads, v heads
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    attention_output: Linear  # num_heads * head_dim -> hidden_size
    post_attention_norm: Tensor  # [hidden_size]
    gate_up: Linear  # hidden_size -> 2 * intermediate_size: gate, up
    down: Linear  # intermediate_size -> hidden_size


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """All parameters of a model, on its device."""

    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    lm_head: Linear  # hidden_size -> vocab_size
    inverse_frequencies: Tensor  # [head_dim / 2]


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters that a model of this config has, by Hugging Face name."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, config.hidden_size)
    query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (config.hidden_size,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (config.hidden_size,)
        for name, size in (("q_proj", query_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{attention}.{name}.weight"] = (size, config.hidden_size)
            if config.attention_bias:
                shapes[f"{attention}.{name}.bias"] = (size,)
        if config.qk_norm:
            shapes[f"{attention}.q_norm.weight"] = (config.head_dim,)
            shapes[f"{attention}.k_norm.weight"] = (config.head_dim,)
        shapes[f"{attention}.o_proj.weight"] = (config.hidden_size, query_size)
        shapes[f"{mlp}.gate_proj.weight"] = (config.intermediate_size, config.hidden_size)
        shapes[f"{mlp}.up_proj.weight"] = (config.intermediate_size, config.hidden_size)
        shapes[f"{mlp}.down_proj.weight"] = (config.hidden_size, config.intermediate_size)
    return shapes


def check_complete(config: ModelConfig, reader: WeightReader) -> None:
    """Raise `InvalidRequest` unless the checkpoint has exactly the model's parameters, in their shapes."""
    unused = dict(reader.shapes)
    for parameter, shape in parameter_shapes(config).items():
        stored = reader.stored_name(parameter)
        found = unused.pop(stored, None)
        if found is None:
            raise InvalidRequest("model", f"tensor {stored} is missing")
        if found != shape:
            raise InvalidRequest("model", f"tensor {stored} has shape {list(found)} instead of {list(shape)}")
    if unused:
        name = shown(min(unused))[1:-1]
        raise InvalidRequest("model", f"tensor {name} has no use in this model ({len(unused)} such tensors)")


def load_layer(
    reader: WeightReader, config: ModelConfig, layer: int, kernels: Kernels, device: torch.device
) -> LayerWeights:
    """Read one layer, joining projections that share their input into one product."""
    prefix = f"model.layers.{layer}"

    def vector(name: str) -> Tensor:
        return _owned(reader.read(f"{prefix}.{name}"), device)

    def linear(*names: str, has_bias: bool = False) -> Linear:
        weight = torch.cat([reader.read(f"{prefix}.{name}.weight") for name in names])
        bias = torch.cat([reader.read(f"{prefix}.{name}.bias") for name in names]) if has_bias else None
        return kernels.pack_linear(weight.to(device), None if bias is None else bias.to(device))

    return LayerWeights(
        input_norm=vector("input_layernorm.weight"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=config.attention_bias),
        q_norm=vector("self_attn.q_norm.weight") if config.qk_norm else None,
        k_norm=vector("self_attn.k_norm.weight") if config.qk_norm else None,
        attention_output=linear("self_attn.o_proj"),
        post_attention_norm=vector("post_attention_layernorm.weight"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj"),
        down=linear("mlp.down_proj"),
    )


def load_ends(
    reader: WeightReader, config: ModelConfig, kernels: Kernels, device: torch.device
) -> tuple[Tensor, Tensor, Linear]:
    """Read what is not in a layer: embedding [vocab_size, hidden_size], final norm [hidden_size] and lm_head."""
    embedding = _owned(reader.read(EMBEDDING), device)
    head = embedding if config.tie_embeddings else _owned(reader.read(LM_HEAD), device)
    return embedding, _owned(reader.read(FINAL_NORM), device), kernels.pack_linear(head, None)


def rope_factors(config: ModelConfig, reader: WeightReader) -> Tensor | None:
    """The checkpoint's own factors of rotary frequencies [head_dim / 2] fp32; None = it has none.

    Raises:
        InvalidRequest: They have another shape, or are no divisors; names the field `model`.
    """
    factors = reader.rope_factors()
    if factors is None:
        return None
    if factors.shape != (config.head_dim // 2,):
        raise InvalidRequest("model", f"rotary factors have shape {list(factors.shape)}, not [{config.head_dim // 2}]")
    if not bool((factors.isfinite() & (factors > 0)).all()):
        raise InvalidRequest("model", "rotary factors must be positive and finite")
    return factors


def weights_fingerprint(config: ModelConfig, reader: WeightReader, inverse_frequencies: Tensor) -> str:
    """Hash of what decides a model's KV: geometry, rotary frequencies, and a sample of every parameter.

    The same whether the weights come from safetensors or GGUF, as long as their values are equal; ids and limits that
    do not change KV (eos, longest context) are left out. The sample is the first row of each parameter.
    """
    digest = xxhash.xxh3_64()
    geometry = (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.sliding_window)
    digest.update(repr(geometry).encode())
    digest.update(inverse_frequencies.cpu().numpy().tobytes())
    for parameter, shape in sorted(parameter_shapes(config).items()):
        digest.update(f"{parameter}{shape}".encode())
        digest.update(reader.read_first_row(parameter).numpy().tobytes())
    return digest.hexdigest()


def _owned(values: Tensor, device: torch.device) -> Tensor:
    # The reader's tensors may be views of a mapped file, which should not stay open behind a running model.
    return values.to(device, copy=True)
