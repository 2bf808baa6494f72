"""A Llama-family forward in plain PyTorch that rounds activations as the native kernels do: the oracle of their model.

One dense prompt, no cache, float64 where the kernels take sums in fp32. What remains between the two are roundings that
fall to the other side, so this tells a wrong operation from the cost of 8 bits, which a plain forward cannot.
"""

from pathlib import Path

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels import reference
from engine.model.files.open import open_weights
from engine.model.rope import inverse_frequencies
from engine.model.weights import EMBEDDING, FINAL_NORM, LM_HEAD, WeightReader

_GROUP = 32


class QuantizedOracle:
    """The model of a checkpoint whose matrices are Q4_0, Q4_1 or Q8_0, or become Q8_0."""

    def __init__(self, path: Path, *, is_requantized: bool = False) -> None:
        """Open a checkpoint.

        Args:
            path: Its file or folder.
            is_requantized: Whether its matrices are rounded to Q8_0 first.
        """
        self.config: ModelConfig
        self._reader: WeightReader
        self.config, self._reader = open_weights(str(path))
        self._is_requantized = is_requantized

    def logits(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, vocab_size] float64."""
        config = self.config
        hidden = self._matrix(EMBEDDING)[token_ids]
        frequencies = inverse_frequencies(config.rope, config.head_dim, self._reader.rope_factors())
        angles = (torch.arange(len(token_ids)).float()[:, None] * frequencies).double()
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}"
            normed = self._norm(hidden, f"{prefix}.input_layernorm.weight")
            query = self._heads(normed, f"{prefix}.self_attn.q", angles)
            key = self._heads(normed, f"{prefix}.self_attn.k", angles)
            value = self._heads(normed, f"{prefix}.self_attn.v", None)
            hidden = hidden + self._linear(self._attend(query, key, value), f"{prefix}.self_attn.o_proj")
            normed = self._norm(hidden, f"{prefix}.post_attention_layernorm.weight")
            gate_up = [self._linear(normed, f"{prefix}.mlp.{name}_proj") for name in ("gate", "up")]
            hidden = hidden + self._linear(reference.silu_mul(torch.cat(gate_up, -1)), f"{prefix}.mlp.down_proj")
        head = EMBEDDING if config.tie_embeddings else LM_HEAD
        logits: Tensor = _rounded(self._norm(hidden, FINAL_NORM)) @ self._matrix(head).T
        return logits

    def _heads(self, normed: Tensor, stem: str, angles: Tensor | None) -> Tensor:
        """[num_tokens, heads, head_dim], normed and rotated."""
        config = self.config
        flat = self._linear(normed, f"{stem}_proj")
        if config.attention_bias:
            flat = flat + self._reader.read(f"{stem}_proj.bias").double()
        heads: Tensor = flat.unflatten(-1, (-1, config.head_dim))
        if angles is None:
            return heads
        if config.qk_norm:
            heads = self._norm(heads, f"{stem}_norm.weight")
        return reference.rope(heads, angles.cos(), angles.sin())

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        group_size = self.config.num_heads // self.config.num_kv_heads
        keys, values = (kv.repeat_interleave(group_size, dim=1).transpose(0, 1) for kv in (key, value))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * self.config.head_dim**-0.5
        positions = torch.arange(len(query))
        is_visible = positions[None] <= positions[:, None]
        if self.config.sliding_window is not None:
            is_visible &= positions[None] > positions[:, None] - self.config.sliding_window
        weights = torch.softmax(scores.masked_fill(~is_visible, -torch.inf), dim=-1)
        return (weights @ values).transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, parameter: str) -> Tensor:
        return reference.rms_norm(x, self._reader.read(parameter).double(), self.config.rms_norm_eps)

    def _linear(self, x: Tensor, stem: str) -> Tensor:
        product: Tensor = _rounded(x) @ self._matrix(f"{stem}.weight").T
        return product

    def _matrix(self, parameter: str) -> Tensor:
        values = self._reader.read(parameter)
        return _requantized(values) if self._is_requantized else values.double()


def _requantized(weight: Tensor) -> Tensor:
    """To Q8_0: int8 in groups of 32 with a scale in fp16."""
    groups: Tensor = weight.unflatten(-1, (-1, _GROUP))
    steps = (groups.abs().amax(-1, keepdim=True) / 127).half().double()
    quants: Tensor = (groups.double() / steps).round().clamp(-127, 127)
    return (quants * steps).flatten(-2)


def _rounded(x: Tensor) -> Tensor:
    """To int8 per row and group of 32 inputs, and back."""
    groups: Tensor = x.unflatten(-1, (-1, _GROUP))
    steps = groups.abs().amax(-1, keepdim=True) / 127
    quants: Tensor = torch.where(steps > 0, groups / steps, 0.0).round()
    return (quants * steps).flatten(-2)


def two_digits(values: Tensor, most: int) -> Tensor:
    """Round to whole multiples of 1 / `most` of the largest magnitude in the last dimension."""
    step = values.abs().amax(-1, keepdim=True) / most
    return torch.where(step > 0, (values / step).round() * step, 0.0)


def int8_attention(
    query: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor, value_scales: Tensor, seen: slice
) -> Tensor:
    """Attention of one query head as the native kernels define it for an int8 cache, see attention_int8.h.

    Args:
        query: [head_dim] fp32, not scaled.
        keys: [num_tokens, head_dim] int8, and so `values`.
        key_scales: [num_tokens], and so `value_scales`.
        values: See `keys`.
        value_scales: See `key_scales`.
        seen: The positions that the query sees.

    Returns:
        [head_dim] float64.
    """
    scaled = two_digits((query * (1.0 / torch.tensor(query.shape[-1]).sqrt())).double(), 127 * 128)
    scores = (keys.double() @ scaled) * key_scales.double()
    total, sums = torch.zeros((), dtype=torch.float64), torch.zeros(query.shape[-1], dtype=torch.float64)
    largest = scores[seen].max()
    for start in range(seen.start // 256 * 256, seen.stop, 256):
        part = slice(max(start, seen.start), min(start + 256, seen.stop))
        weights = (scores[part] - scores[part].max()).exp()
        share = (scores[part].max() - largest).exp()
        sums += share * (two_digits(weights * value_scales[part], 127 * 128 + 127) @ values[part].double())
        total += share * weights.sum()
    return sums / total
