"""What the engine asks of a model, and the seam behind which other implementations sit.

`engine/model/llama.py` is the plain one; `loader.load_model` makes it. A native CPU model that does a whole step in one
call and a model of CUDA graphs are further classes with the same two members that matter: `fingerprint` and `forward`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.batch import StepBatch
from engine.model.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class LayerTaps:
    """Where a step's hidden states go, for whoever looks at them beside the logits (a draft head)."""

    layers: tuple[int, ...]
    """Indices of the layers whose output is wanted: the residual stream behind them, no norm applied."""
    values: Tensor
    """[num_tokens, len(layers), hidden_size] fp32 on the model's device, contiguous; filled by `forward`."""


class LanguageModel(Protocol):
    """A decoder over a paged KV cache."""

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly when two models write the same KV for the same tokens."""

    @property
    def device(self) -> torch.device:
        """Where the weights are, and where the KV cache must be."""

    def forward(self, batch: StepBatch, kv_cache: KvCache, on_layer: Callable[[int], None] | None = None) -> Tensor:
        """Run one step: write the batch's KV into the cache and return the logits asked for.

        Called by the engine thread only, once a step. The blocks named in the batch belong to the caller; the model
        keeps no reference to them.

        Args:
            batch: The step's tokens. May be empty of logit rows.
            kv_cache: The cache on `device`, of this model's geometry.
            on_layer: Called on the calling thread with the layer's index as soon as this step's KV of that layer is in
                the cache, layers in order, each once. It must return quickly.

        Returns:
            [num_logit_rows, vocab_size] fp32 on `device`, a new tensor that the caller may change.
        """


class TappedModel(LanguageModel, Protocol):
    """A model that can also hand out hidden states."""

    def forward(
        self,
        batch: StepBatch,
        kv_cache: KvCache,
        on_layer: Callable[[int], None] | None = None,
        taps: LayerTaps | None = None,
    ) -> Tensor:
        """See `LanguageModel.forward`.

        Args:
            batch: As there.
            kv_cache: As there.
            on_layer: As there.
            taps: Filled with the hidden states of all rows, not only those whose logits are wanted; None = not wanted.
        """
