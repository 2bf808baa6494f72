"""`DraftHead` beside a `LlamaModel`: the definition in `head_format.py` in eager PyTorch, fp32, on any device."""

import time
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from engine.kernels.interface import StepAttention
from engine.model.batch import StepBatch
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.spec import head_format as names
from engine.spec.head import HeadRows, HeadRun, RunLimits
from engine.spec.head_format import DraftHeadFile


class TorchDraftHead:
    """See the module."""

    def __init__(self, model: LlamaModel, file: DraftHeadFile) -> None:
        """Bring the head's weights to the target's device.

        Args:
            model: The target, which the head fits.
            file: From `load_head`.
        """
        self._model = model
        self._tap_layers = file.tap_layers
        self._eps = file.rms_norm_eps
        self._weights = {name: weight.to(model.device, torch.float32) for name, weight in file.weights.items()}
        self._vocab_ids: NDArray[np.int64] = file.vocab_ids.numpy().astype(np.int64)
        self._columns = torch.from_numpy(self._vocab_ids).to(model.device)

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """See `DraftHead.tap_layers`."""
        return self._tap_layers

    @property
    def vocab_ids(self) -> NDArray[np.int64]:
        """See `DraftHead.vocab_ids`."""
        return self._vocab_ids

    @property
    def hidden_size(self) -> int:
        """See `DraftHead.hidden_size`."""
        return self._model.config.hidden_size

    @torch.no_grad()
    def absorb(self, batch: StepBatch, taps: Tensor, carried: Tensor, kv_cache: KvCache) -> Tensor:
        """See `DraftHead.absorb`."""
        features = self._linear(names.FUSE, taps.flatten(1))
        if len(features):
            previous = features.roll(1, 0)
            previous[batch.query_start[:-1].to(features.device).long()] = carried
            attention = self._model.prepare_attention(batch, kv_cache)
            self._write_kv(batch, self._joined(batch, previous), attention, kv_cache)
        return features

    @torch.no_grad()
    def draft(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache) -> HeadRows:
        """See `DraftHead.draft`."""
        joined = self._joined(batch, previous)
        attention = self._model.prepare_attention(batch, kv_cache)
        query = self._write_kv(batch, joined, attention, kv_cache)
        attended = attention.paged_attention(query, kv_cache.tensor[self._layer]).flatten(1)
        hidden = previous + self._linear(names.O_PROJ, attended)
        normed = self._norm(names.MLP_NORM, hidden)
        gated = functional.silu(self._linear(names.GATE_PROJ, normed)) * self._linear(names.UP_PROJ, normed)
        hidden = hidden + self._linear(names.DOWN_PROJ, gated)
        logits = self._logits(hidden)
        best = logits.argmax(1)
        shares = logits.softmax(1).gather(1, best[:, None])[:, 0]
        return HeadRows(logits.cpu().numpy(), hidden, best.int().cpu().numpy(), shares.cpu().numpy())

    def run(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache, limits: RunLimits) -> HeadRun:
        """See `DraftHead.run`."""
        found: list[tuple[int, float]] = []
        reach = 1.0
        started, first_s = time.perf_counter(), 0.0
        while True:
            rows = self.draft(batch, previous, kv_cache)
            first_s = first_s or time.perf_counter() - started
            token_id, share = int(self._vocab_ids[rows.best[0]]), float(rows.shares[0])
            found.append((token_id, share))
            steps = len(limits.chances)
            reach *= limits.chances[min(int(share * steps), steps - 1)]
            is_last = len(found) == len(limits.least_reach) or token_id in limits.stop_ids
            if is_last or reach < limits.least_reach[len(found)]:
                return HeadRun(found, first_s)
            batch, previous = _behind(batch, token_id, kv_cache.layout.block_size), rows.features

    @property
    def _layer(self) -> int:
        return self._model.config.num_layers

    def _joined(self, batch: StepBatch, previous: Tensor) -> Tensor:
        """The layer's input [num_rows, 2 * hidden_size]: normed embedding and normed features."""
        embedded = functional.embedding(batch.token_ids.to(previous.device), self._model.weights.embedding)
        return torch.cat([self._norm(names.EMBEDDING_NORM, embedded), self._norm(names.FEATURE_NORM, previous)], dim=1)

    def _write_kv(self, batch: StepBatch, joined: Tensor, attention: StepAttention, kv_cache: KvCache) -> Tensor:
        """Write K and V of the rows; returns the rotated query [num_rows, num_heads, head_dim]."""
        head_dim = self._model.config.head_dim
        query, key, value = (
            self._linear(name, joined).unflatten(1, (-1, head_dim))
            for name in (names.Q_PROJ, names.K_PROJ, names.V_PROJ)
        )
        angles = batch.positions.to(joined.device).float()[:, None] * self._model.weights.inverse_frequencies
        rotation = angles.cos(), angles.sin()
        key = self._model.kernels.rope(key, *rotation)
        attention.write_kv(torch.stack([key, value], dim=1), kv_cache.tensor[self._layer])
        return self._model.kernels.rope(query, *rotation)

    def _logits(self, hidden: Tensor) -> Tensor:
        normed = self._norm(names.OUTPUT_NORM, hidden)
        missing = self._model.kernels.min_rows - len(normed)
        if missing > 0:
            normed = functional.pad(normed, (0, 0, 0, missing))
        return self._model.weights.lm_head(normed)[: len(hidden), self._columns]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return self._model.kernels.rms_norm(x, self._weights[name], self._eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._weights[name])


def _behind(batch: StepBatch, token_id: int, block_size: int) -> StepBatch:
    """The row behind a batch's only one."""
    positions = batch.positions + 1
    blocks = batch.block_tables[0, (positions // block_size).long()].long()
    return replace(
        batch,
        token_ids=torch.tensor([token_id]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        context_lens=batch.context_lens + 1,
    )
