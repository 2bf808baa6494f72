"""One step of a Llama-family model on the device: the launches, in order, and nothing else.

Per layer: add + norm, q k v product, rotation + KV write, attention, output product, add + norm, gate and up product,
SwiGLU, down product. The residual stream is fp32: 4 bytes a value cost little beside the weights, fp16 models do not
overflow, and the small additions of late layers are kept. Reads no device memory on the host, so that a CUDA graph can
hold a step. What a step's inputs are is the matter of `model.py` and `graphs.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from engine.config import ModelConfig
from engine.kernels.triton.activation import silu_mul, silu_mul_quantize
from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.norms import add_rms_norm, add_rms_norm_quantize, rms_norm
from engine.kernels.triton.rope_kv import rope_and_write_kv
from engine.model.cuda.attention import StepAttention
from engine.model.cuda.linear import DeviceLinear, LinearSettings
from engine.model.cuda.weights import DeviceLayer, DeviceWeights


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step on the device, padding behind them."""

    token_ids: Tensor
    """[num_rows] int64; any valid token for padding."""
    positions: Tensor
    """[num_rows] int64."""
    slot_mapping: Tensor
    """[num_rows] int64; not read for padding."""
    num_tokens: Tensor
    """[1] int32: rows from this one on are padding."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model's parameters and how to multiply them."""

    config: ModelConfig
    weights: DeviceWeights
    settings: LinearSettings


def run_step(
    model: DeviceModel,
    rows: StepRows,
    attention: StepAttention,
    caches: Sequence[LayerCache],
    logit_rows: Tensor | None,
    on_layer: Callable[[int], None] | None = None,
) -> Tensor:
    """Write the step's KV and compute logits.

    Args:
        model: The model.
        rows: The step's rows.
        attention: Planned for these rows.
        caches: One per layer.
        logit_rows: [n] int64, the rows whose logits are wanted; None = all.
        on_layer: Called when the launches that write a layer's KV are queued, on this thread.

    Returns:
        [n, vocab_size] fp32.
    """
    weights, config = model.weights, model.config
    residual = functional.embedding(rows.token_ids, weights.embedding).float()
    angles = rows.positions.float()[:, None] * weights.inverse_frequencies
    cos, sin = angles.cos(), angles.sin()
    added: Tensor | None = None  # what the last layer adds to the residual stream, until a norm does so
    for index, layer in enumerate(weights.layers):
        qkv = _normed_product(model, layer.qkv, added, residual, layer.input_norm)
        query = rope_and_write_kv(
            qkv,
            cos,
            sin,
            caches[index],
            rows.slot_mapping,
            rows.num_tokens,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.rms_norm_eps,
        )
        if on_layer is not None:
            on_layer(index)
        attended = attention(query, caches[index]).flatten(1)
        added = layer.attention_output(attended, model.settings)
        added = _mlp(model, layer, added, residual)
    return _logits(model, added, residual, logit_rows)


def _normed_product(
    model: DeviceModel, linear: DeviceLinear, added: Tensor | None, residual: Tensor, norm: Tensor
) -> Tensor:
    """Add to the residual stream, norm it, and multiply; rows are quantized by the norm where the weight is 8-bit."""
    eps, settings = model.config.rms_norm_eps, model.settings
    if linear.input_dtype is not None:
        elements, scales = add_rms_norm_quantize(added, residual, norm, eps, linear.input_dtype)
        return linear.multiply_quantized(elements, scales, settings)
    if added is None:
        return linear(rms_norm(residual, norm, eps, out_dtype=settings.dtype), settings)
    return linear(add_rms_norm(added, residual, norm, eps, out_dtype=settings.dtype), settings)


def _mlp(model: DeviceModel, layer: DeviceLayer, added: Tensor, residual: Tensor) -> Tensor:
    gate_up = _normed_product(model, layer.gate_up, added, residual, layer.post_attention_norm)
    if layer.down.input_dtype is not None:
        elements, scales = silu_mul_quantize(gate_up, layer.down.input_dtype)
        return layer.down.multiply_quantized(elements, scales, model.settings)
    return layer.down(silu_mul(gate_up), model.settings)


def _logits(model: DeviceModel, added: Tensor | None, residual: Tensor, logit_rows: Tensor | None) -> Tensor:
    if logit_rows is not None:
        residual = residual.index_select(0, logit_rows)
        added = None if added is None else added.index_select(0, logit_rows)
    eps, dtype, norm = model.config.rms_norm_eps, model.settings.dtype, model.weights.final_norm
    if added is None:
        normed = rms_norm(residual, norm, eps, out_dtype=dtype)
    else:
        normed = add_rms_norm(added, residual, norm, eps, out_dtype=dtype)
    return model.weights.lm_head.logits(normed, model.settings)
