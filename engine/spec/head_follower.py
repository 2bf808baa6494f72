"""HeadFollower: keeps a draft head's view of every sequence in step with the target.

Behind each step of the target it lets the head absorb the step's hidden states, and remembers of each sequence the
features of the newest token that stands: the head needs them to draft on, the next step to go on, and the hand-off to
carry them. Drafts nothing; `eagle.py` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import InvalidRequest
from engine.model.batch import StepBatch
from engine.model.interface import LayerTaps, TappedModel
from engine.model.kv_cache import KvCache
from engine.scheduler.plan import ScheduledChunk
from engine.spec.head import DraftHead
from engine.types import RequestId


@dataclass(frozen=True, slots=True)
class _Newest:
    num_tokens: int
    """The features are those of position `num_tokens - 1`."""
    features: Tensor  # [hidden_size] fp32


class HeadFollower:
    """See the module. Lives on the engine's thread."""

    def __init__(self, model: TappedModel, head: DraftHead, kv_cache: KvCache) -> None:
        """Join a head to its target.

        Args:
            model: The target.
            head: Beside it.
            kv_cache: The target's, with one layer more for the head.

        Raises:
            InvalidRequest: The cache has no such layer; names `kv_cache`.
        """
        if kv_cache.layout.num_layers != model.config.num_layers + 1:
            raise InvalidRequest("kv_cache", "must have one layer more than the model, for the draft head")
        self.head = head
        self.kv_cache = kv_cache
        self._model = model
        self._newest: dict[RequestId, _Newest] = {}
        self._strangers: set[RequestId] = set()
        self._step: Tensor | None = None

    def forward(
        self, batch: StepBatch, chunks: Sequence[ScheduledChunk], on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """Run a step of the target, and the head behind it; returns the target's logits.

        Args:
            batch: The step.
            chunks: What its sequences are.
            on_layer: As in `LanguageModel.forward`; the head's layer is reported last.
        """
        head, hidden_size = self.head, self.head.hidden_size
        shape = (batch.token_ids.shape[0], len(head.tap_layers), hidden_size)
        taps = LayerTaps(head.tap_layers, torch.empty(shape, device=self._model.device))
        logits = self._model.forward(batch, self.kv_cache, on_layer, taps)
        carried = torch.zeros(len(chunks), hidden_size, device=self._model.device)
        for index, chunk in enumerate(chunks):
            features = self.features_before(chunk.sequence.request_id, chunk.start)
            if features is not None:
                carried[index] = features
            elif chunk.start == 0:
                self._strangers.discard(chunk.sequence.request_id)
        self._step = head.absorb(batch, taps.values, carried, self.kv_cache)
        if on_layer is not None:
            on_layer(self._model.config.num_layers)
        return logits

    def settle(self, chunks: Sequence[ScheduledChunk], num_accepted: Sequence[int]) -> None:
        """Remember the newest features of each sequence of the step.

        Args:
            chunks: As given to `forward`.
            num_accepted: How many drafts of each chunk were accepted.
        """
        step, self._step = self._step, None
        if step is None:
            return
        row = 0
        for chunk, accepted in zip(chunks, num_accepted, strict=True):
            features = step[row + chunk.num_tokens - 1 + accepted].clone()  # the step's other rows need not stay
            self._newest[chunk.sequence.request_id] = _Newest(chunk.end + accepted, features)
            row += chunk.num_rows

    def features_before(self, request_id: RequestId, position: int) -> Tensor | None:
        """Return the features [hidden_size] of position - 1, or None when they are not known."""
        newest = self._newest.get(request_id)
        return newest.features if newest is not None and newest.num_tokens == position else None

    def can_draft(self, request_id: RequestId) -> bool:
        """Whether the head's KV of the sequence is here, as far as one can know."""
        return request_id not in self._strangers

    def export(self, request_id: RequestId) -> bytes:
        """Return the newest features for the hand-off, fp32 little-endian; empty when there are none."""
        newest = self._newest.get(request_id)
        if newest is None:
            return b""
        return newest.features.cpu().numpy().astype("<f4").tobytes()

    def take_over(self, request_id: RequestId, num_tokens: int, features: bytes) -> None:
        """Take over a sequence whose KV was imported.

        Args:
            request_id: The sequence.
            num_tokens: Its tokens, all computed.
            features: What `export` gave on the other side; empty = the other side has no such head, so that the head's
                KV did not come either and the sequence is not drafted for.
        """
        values = np.frombuffer(features, "<f4") if len(features) == 4 * self.head.hidden_size else None
        if values is None or not np.isfinite(values).all():
            self._strangers.add(request_id)
            return
        tensor = torch.from_numpy(values.astype(np.float32)).to(self._model.device)
        self._newest[request_id] = _Newest(num_tokens, tensor)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended. Unknown ids are ignored."""
        self._newest.pop(request_id, None)
        self._strangers.discard(request_id)
