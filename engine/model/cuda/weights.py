"""Brings a checkpoint's parameters straight to the device, in the weight format asked for; one layer at a time.

Reading the files is the matter of `weights.WeightReader`. int8, fp8 and int4 are made here by rounding to nearest; a
GGUF file's own Q4_0 and Q4_1 blocks are kept bit for bit where the format is int4.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels import reference_quant
from engine.kernels.triton.int4_weight import Int4Weight, from_gguf_q4_0, from_gguf_q4_1, pack_int4
from engine.model.cuda.linear import ByteLinear, DenseLinear, DeviceLinear, Int4Linear, WeightFormat
from engine.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD, WeightReader

_INT4_GROUPS = (128, 64, 32)
_GGUF_PACKERS: dict[str, Callable[[Tensor], Int4Weight]] = {"Q4_0": from_gguf_q4_0, "Q4_1": from_gguf_q4_1}
_GGUF_VALUES = 32
"""Values of a block in either type."""


class QuantizedBlocks(Protocol):
    """A checkpoint's own 4-bit blocks."""

    def type_name(self, parameter: str) -> str:
        """GGUF's name of the parameter's type, such as `Q4_0`."""

    def rows(self, parameter: str) -> npt.NDArray[np.uint8]:
        """[out_features, bytes of a row], rows in the order of the parameter."""


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One decoder layer on the device."""

    input_norm: Tensor  # [hidden_size]
    qkv: DeviceLinear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim: q heads, k heads, v heads
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    attention_output: DeviceLinear  # num_heads * head_dim -> hidden_size
    post_attention_norm: Tensor  # [hidden_size]
    gate_up: DeviceLinear  # hidden_size -> 2 * intermediate_size: gate, up
    down: DeviceLinear  # intermediate_size -> hidden_size

    @property
    def linears(self) -> tuple[DeviceLinear, ...]:
        """All linear layers."""
        return self.qkv, self.attention_output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All parameters of a model on its device."""

    embedding: Tensor  # [vocab_size, hidden_size] in the activation type
    layers: tuple[DeviceLayer, ...]
    final_norm: Tensor  # [hidden_size]
    lm_head: DenseLinear  # hidden_size -> vocab_size
    inverse_frequencies: Tensor  # [head_dim / 2] fp32


@dataclass(frozen=True, slots=True)
class DeviceWeightLoader:
    """Makes device weights from one checkpoint."""

    config: ModelConfig
    reader: WeightReader
    device: torch.device
    dtype: torch.dtype
    """Type of activations, and of dense weights."""
    weight_format: WeightFormat
    blocks: QuantizedBlocks | None = None
    """The checkpoint's own 4-bit blocks; None = it has none."""

    def load(self, inverse_frequencies: Tensor, progress: Callable[[int, int], None] | None = None) -> DeviceWeights:
        """Read everything.

        Args:
            inverse_frequencies: [head_dim / 2] fp32, from `rope.inverse_frequencies`.
            progress: Called on this thread with (layers loaded, layers in all) after each.
        """
        layers: list[DeviceLayer] = []
        for layer in range(self.config.num_layers):
            layers.append(self._layer(f"model.layers.{layer}"))
            if progress is not None:
                progress(layer + 1, self.config.num_layers)
        embedding = self.reader.read(EMBEDDING).to(self.device, self.dtype, copy=True)
        tied = self.config.tie_embeddings
        lm_head = embedding if tied else self.reader.read(LM_HEAD).to(self.device, self.dtype, copy=True)
        return DeviceWeights(
            embedding=embedding,
            layers=tuple(layers),
            final_norm=self._vector(FINAL_NORM),
            lm_head=DenseLinear(lm_head, None),
            inverse_frequencies=inverse_frequencies.to(self.device, torch.float32),
        )

    def _layer(self, prefix: str) -> DeviceLayer:
        config = self.config

        def matrix(*names: str, has_bias: bool = False) -> DeviceLinear:
            return self._linear([f"{prefix}.{name}" for name in names], has_bias=has_bias)

        return DeviceLayer(
            input_norm=self._vector(f"{prefix}.input_layernorm.weight"),
            qkv=matrix("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", has_bias=config.attention_bias),
            q_norm=self._vector(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=self._vector(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
            attention_output=matrix("self_attn.o_proj"),
            post_attention_norm=self._vector(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
            down=matrix("mlp.down_proj"),
        )

    def _vector(self, parameter: str) -> Tensor:
        return self.reader.read(parameter).to(self.device, torch.float32, copy=True)

    def _linear(self, names: list[str], *, has_bias: bool) -> DeviceLinear:
        bias = None
        if has_bias:
            bias = torch.cat([self.reader.read(f"{name}.bias") for name in names]).to(self.device, self.dtype)
        weights = [f"{name}.weight" for name in names]
        if self.weight_format is WeightFormat.INT4 and (packed := self._own_blocks(weights)) is not None:
            return Int4Linear(packed.to(self.device), bias)
        joined = torch.cat([self.reader.read(weight).to(self.device) for weight in weights])
        return make_linear(joined, bias, self.weight_format, self.dtype)

    def _own_blocks(self, parameters: list[str]) -> Int4Weight | None:
        """The checkpoint's blocks of joined matrices, if all are of one 4-bit type."""
        if self.blocks is None:
            return None
        types = {self.blocks.type_name(parameter) for parameter in parameters}
        pack = _GGUF_PACKERS.get(types.pop()) if len(types) == 1 else None
        if pack is None:
            return None
        rows = torch.from_numpy(np.concatenate([self.blocks.rows(parameter) for parameter in parameters]))
        in_features = self.reader.shapes[self.reader.stored_name(parameters[0])][1]
        return pack(rows.view(rows.shape[0], in_features // _GGUF_VALUES, -1))


def make_linear(weight: Tensor, bias: Tensor | None, weight_format: WeightFormat, dtype: torch.dtype) -> DeviceLinear:
    """Bring a weight into a format.

    Args:
        weight: [out_features, in_features] of a floating dtype, on its device.
        bias: [out_features] or None.
        weight_format: The format; int4 needs rows of whole groups of 32 and leaves other matrices dense.
        dtype: Type of dense weights.
    """
    if weight_format is WeightFormat.INT8:
        return ByteLinear(*reference_quant.quantize_rows(weight, torch.int8), bias)
    if weight_format is WeightFormat.FP8:
        return ByteLinear(*reference_quant.quantize_rows(weight, torch.float8_e4m3fn), bias)
    group = next((group for group in _INT4_GROUPS if weight.shape[1] % group == 0), None)
    if weight_format is WeightFormat.INT4 and group is not None:
        return Int4Linear(quantize_int4(weight, group), bias)
    return DenseLinear(weight.to(dtype).contiguous(), bias)


def quantize_int4(weight: Tensor, group: int) -> Int4Weight:
    """Round a weight [out_features, in_features] to 4 bits: per group, the least value becomes 0 and the largest 15.

    scale = (max - min) / 15        zero = round(-min / scale)        q = round(w / scale) + zero
    """
    groups = weight.float().unflatten(1, (-1, group))  # [out_features, num_groups, group]
    # A range that holds 0 keeps the zero point between 0 and 15.
    least = groups.amin(-1).clamp(max=0.0)
    largest = groups.amax(-1).clamp(min=0.0)
    scales = ((largest - least) / 15.0).half().float()
    steps = torch.where(scales > 0, scales, 1.0)
    zeros = (-least / steps).round().clamp(0, 15)
    values = ((groups / steps[..., None]).round() + zeros[..., None]).clamp(0, 15)
    return pack_int4(values.flatten(1).to(torch.uint8), scales.T.half(), zeros=zeros.T.to(torch.int8))
