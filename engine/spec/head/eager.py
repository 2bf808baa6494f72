"""`DraftHead` beside a `LlamaModel`: the definition in `format.py` in eager PyTorch, fp32, on any device."""

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
from engine.spec.head import format as names
from engine.spec.head.format import DraftHeadFile, num_finding_kv_heads
from engine.spec.head.port import NUM_STATE_TOKENS, HeadRows, HeadRun, RunLimits


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

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return self.hidden_size + NUM_STATE_TOKENS

    @torch.no_grad()
    def absorb(self, batch: StepBatch, taps: Tensor, carried: Tensor, kv_cache: KvCache) -> Tensor:
        """See `DraftHead.absorb`."""
        features = self._linear(names.FUSE, taps.flatten(1))
        if not len(features):
            return features.new_empty(0, self.state_size)
        firsts = batch.query_start[:-1].to(features.device).long()

        def before(states: Tensor) -> Tensor:
            previous = states.roll(1, 0)
            previous[firsts] = carried
            return previous

        # Each row's older token is the newer one of the row before it, which the first of these fills in.
        states = self._states(features, batch, features.new_zeros(len(features), self.state_size))
        states = self._states(features, batch, before(states))
        attention = self._model.prepare_attention(batch, kv_cache)
        self._write_kv(batch, before(states), attention, kv_cache)
        return states

    @torch.no_grad()
    def draft(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache) -> HeadRows:
        """See `DraftHead.draft`."""
        attention = self._model.prepare_attention(batch, kv_cache)
        query = self._write_kv(batch, previous, attention, kv_cache)
        attended = attention.paged_attention(query, kv_cache.tensor[self._layer]).flatten(1)
        hidden = previous[:, : self.hidden_size] + self._linear(names.O_PROJ, attended)
        normed = self._norm(names.MLP_NORM, hidden)
        gated = functional.silu(self._linear(names.GATE_PROJ, normed)) * self._linear(names.UP_PROJ, normed)
        hidden = hidden + self._linear(names.DOWN_PROJ, gated)
        logits = self._logits(hidden)
        best = logits.argmax(1)
        shares = logits.softmax(1).gather(1, best[:, None])[:, 0]
        states = self._states(hidden, batch, previous)
        return HeadRows(logits.cpu().numpy(), states, best.int().cpu().numpy(), shares.cpu().numpy())

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
            batch, previous = _behind(batch, token_id, kv_cache.layout.block_size), rows.states

    @property
    def _layer(self) -> int:
        return self._model.config.num_layers

    def _states(self, features: Tensor, batch: StepBatch, previous: Tensor) -> Tensor:
        """The states behind rows [num_rows, state_size], from their features and the states before them."""
        newest = batch.token_ids[:, None].to(features.device) + 1
        return torch.cat([features, newest.float(), previous[:, self.hidden_size : -1]], dim=1)

    def _embedded(self, token_ids: Tensor) -> Tensor:
        """Normed embeddings; ids of another vocabulary, which states from elsewhere may hold, count as none."""
        is_token = (token_ids >= 0) & (token_ids < self._model.config.vocab_size)
        embedded = functional.embedding(token_ids.where(is_token, 0), self._model.weights.embedding)
        return self._norm(names.EMBEDDING_NORM, embedded) * is_token[:, None]

    def _write_kv(self, batch: StepBatch, previous: Tensor, attention: StepAttention, kv_cache: KvCache) -> Tensor:
        """Write K and V of the rows; returns the query [num_rows, num_heads, head_dim]."""
        head_dim, hidden = self._model.config.head_dim, self.hidden_size
        own = self._embedded(batch.token_ids.to(previous.device))
        joined = torch.cat([own, self._norm(names.FEATURE_NORM, previous[:, :hidden])], dim=1)
        query, key, value = (
            self._linear(name, joined).unflatten(1, (-1, head_dim))
            for name in (names.Q_PROJ, names.K_PROJ, names.V_PROJ)
        )
        angles = batch.positions.to(joined.device).float()[:, None] * self._model.weights.inverse_frequencies
        rotation = angles.cos(), angles.sin()
        key, query = self._model.kernels.rope(key, *rotation), self._model.kernels.rope(query, *rotation)
        if num_finding_kv_heads(self._model.config):
            newest, older = (self._embedded(ids.nan_to_num().long() - 1) for ids in previous[:, hidden:].unbind(1))
            found = self._linear(names.FIND_KEY, torch.cat([newest, older], dim=1)).unflatten(1, (-1, head_dim))
            key = torch.cat([found, key], dim=1)
            sought = self._linear(names.FIND_QUERY, torch.cat([own, newest], dim=1)).unflatten(1, (-1, head_dim))
            query = torch.cat([sought, query], dim=1)
        attention.write_kv(torch.stack([key, value], dim=1), kv_cache.tensor[self._layer])
        return query

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
