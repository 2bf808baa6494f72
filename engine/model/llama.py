"""The Llama-family forward over a paged KV cache: Llama 2/3, SmolLM2, Mistral, Qwen2 and Qwen3.

One step is embedding, layers, norm and lm_head, the last two only for the rows whose logits are wanted. All attention
goes through the cache, also to the step's own tokens, so that it reads what a later step would read. The operations
are those of `engine/kernels`; planning, sampling and block ownership are elsewhere.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import ModelConfig
from engine.kernels.interface import AttentionGeometry, Kernels, StepAttention
from engine.model.batch import StepBatch
from engine.model.interface import LayerTaps
from engine.model.kv_cache import KvCache
from engine.model.weights import LayerWeights, LlamaWeights


class LlamaModel:
    """`TappedModel` in eager PyTorch, fp32."""

    def __init__(
        self, config: ModelConfig, weights: LlamaWeights, fingerprint: str, kernels: Kernels, device: torch.device
    ) -> None:
        """Take over loaded weights; `loader.load_model` is the way to them."""
        self._config = config
        self._weights = weights
        self._fingerprint = fingerprint
        self._kernels = kernels
        self._device = device

    @property
    def config(self) -> ModelConfig:
        """See `LanguageModel.config`."""
        return self._config

    @property
    def fingerprint(self) -> str:
        """See `LanguageModel.fingerprint`."""
        return self._fingerprint

    @property
    def device(self) -> torch.device:
        """See `LanguageModel.device`."""
        return self._device

    @property
    def weights(self) -> LlamaWeights:
        """Its parameters, for whatever shares them; not to be changed."""
        return self._weights

    @property
    def kernels(self) -> Kernels:
        """What it computes with."""
        return self._kernels

    def prepare_attention(self, batch: StepBatch, kv_cache: KvCache) -> StepAttention:
        """Plan a step's attention, the same for every layer."""
        return self._kernels.prepare_attention(self._geometry(batch, kv_cache))

    @torch.no_grad()
    def forward(
        self,
        batch: StepBatch,
        kv_cache: KvCache,
        on_layer: Callable[[int], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `TappedModel.forward`."""
        weights = self._weights
        if batch.token_ids.shape[0] == 0:
            return weights.embedding.new_empty(0, self._config.vocab_size)
        attention = self.prepare_attention(batch, kv_cache)
        hidden = functional.embedding(self._padded(batch.token_ids.to(self._device)), weights.embedding)
        angles = self._padded(batch.positions.to(self._device)).float()[:, None] * weights.inverse_frequencies
        rotation = angles.cos(), angles.sin()
        for index, layer in enumerate(weights.layers):
            layer_cache = kv_cache.tensor[index]
            query = self._write_layer_kv(layer, hidden, rotation, attention, layer_cache)
            if on_layer is not None:
                on_layer(index)
            attended = attention.paged_attention(query, layer_cache).flatten(1)
            hidden = hidden.add_(layer.attention_output(attended))
            hidden = hidden.add_(self._mlp(layer, hidden))
            if taps is not None and index in taps.layers:
                taps.values[:, taps.layers.index(index)] = hidden[: taps.values.shape[0]]
        return self._logits(hidden, batch.logit_rows.to(self._device))

    def _write_layer_kv(
        self,
        layer: LayerWeights,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: StepAttention,
        layer_cache: Tensor,
    ) -> Tensor:
        """Project, rotate and write K and V of the step; return the rotated query [num_rows, num_heads, head_dim]."""
        config, kernels = self._config, self._kernels
        normed = kernels.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        heads = layer.qkv(normed).view(hidden.shape[0], -1, config.head_dim)  # q heads, k heads, v heads
        query, key, value = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query.copy_(kernels.rms_norm(query, layer.q_norm, config.rms_norm_eps))
            key.copy_(kernels.rms_norm(key, layer.k_norm, config.rms_norm_eps))
        rotated = kernels.rope(heads[:, : config.num_heads + config.num_kv_heads], *rotation)
        rotated_query: Tensor = rotated[:, : config.num_heads]
        attention.write_kv(torch.stack([rotated[:, config.num_heads :], value], dim=1), layer_cache)
        return rotated_query

    def _mlp(self, layer: LayerWeights, hidden: Tensor) -> Tensor:
        normed = self._kernels.rms_norm(hidden, layer.post_attention_norm, self._config.rms_norm_eps)
        return layer.down(self._kernels.silu_mul(layer.gate_up(normed)))

    def _logits(self, hidden: Tensor, logit_rows: Tensor) -> Tensor:
        num_logit_rows = logit_rows.shape[0]
        if num_logit_rows == 0:
            return hidden.new_empty(0, self._config.vocab_size)
        rows = hidden.index_select(0, self._padded(logit_rows))
        normed = self._kernels.rms_norm(rows, self._weights.final_norm, self._config.rms_norm_eps)
        return self._weights.lm_head(normed)[:num_logit_rows]

    def _padded(self, rows: Tensor) -> Tensor:
        # Index 0 is a valid token, position and row; what the padding computes is never read.
        missing = self._kernels.min_rows - rows.shape[0]
        return functional.pad(rows, (0, missing)) if missing > 0 else rows

    def _geometry(self, batch: StepBatch, kv_cache: KvCache) -> AttentionGeometry:
        config = self._config
        return AttentionGeometry(
            query_start=batch.query_start.cpu(),
            context_lens=batch.context_lens.cpu(),
            block_tables=batch.block_tables.cpu(),
            slot_mapping=batch.slot_mapping.to(self._device),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=kv_cache.layout.block_size,
            sliding_window=config.sliding_window,
        )
