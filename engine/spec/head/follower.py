"""HeadFollower: keeps a draft head's view of every sequence in step with the target.

The head absorbs the hidden states of all that stands, and of each sequence the head's state behind its newest token is
remembered: the head needs it to draft on and the hand-off to carry it. Prefill's are absorbed behind their step,
since KV leaves then; a decoded token's wait until the head is to draft or a block is full and may be shared. Sequences
for which drafting does not pay are given up, so that a head that does not draft costs next to nothing. Drafts nothing;
`drafter.py` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.batch import SequenceRows, StepBatch, build_batch
from engine.model.interface import LayerTaps, TappedModel
from engine.model.kv_cache import KvCache
from engine.scheduler.plan import ScheduledChunk
from engine.sequence import Sequence as EngineSequence
from engine.spec.head.port import DraftHead
from engine.types import RequestId
from kvrelay.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class _Newest:
    num_tokens: int
    """The state is that behind position `num_tokens - 1`."""
    state: Tensor  # [state_size] fp32


@dataclass(slots=True)
class _Waiting:
    """Tokens of a sequence that the head has yet to absorb: positions from `start` on."""

    start: int
    carried: Tensor  # [state_size] fp32, the state before
    token_ids: list[int]
    taps: list[Tensor]  # [tokens of a step, tap layers, hidden_size] fp32

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class HeadFollower:
    """See the module. Lives on the engine's thread.

    Invariant: tokens that wait are of the block after the last full one, so what others can share is absorbed, unless
    its sequence was given up: whoever shares that gets worse drafts, never other tokens.
    """

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
        self._waiting: dict[RequestId, _Waiting] = {}
        self._not_followed: set[RequestId] = set()
        """Sequences of which the head's KV is missing, or not worth keeping up."""
        self._step: Tensor | None = None
        """States behind the rows of the step, where they were absorbed at once."""
        self._taps = torch.empty(0)

    def forward(
        self, batch: StepBatch, chunks: Sequence[ScheduledChunk], on_layer: Callable[[int], None] | None
    ) -> Tensor:
        """Run a step of the target, and the head behind it where that cannot wait; returns the target's logits.

        Args:
            batch: The step.
            chunks: What its sequences are.
            on_layer: As in `LanguageModel.forward`; the head's layer is reported last.
        """
        if not any(self.can_draft(chunk.sequence.request_id) or not _is_decode(chunk) for chunk in chunks):
            return self._model.forward(batch, self.kv_cache)  # nobody to follow, nobody to hand off
        head = self.head
        shape = (batch.token_ids.shape[0], len(head.tap_layers), head.hidden_size)
        taps = LayerTaps(head.tap_layers, torch.empty(shape, device=self._model.device))
        logits = self._model.forward(batch, self.kv_cache, on_layer, taps)
        self._taps, self._step = taps.values, None
        if not all(_is_decode(chunk) for chunk in chunks):
            self._absorb_step(batch, chunks)
        if on_layer is not None:
            on_layer(self._model.config.num_layers)
        return logits

    def _absorb_step(self, batch: StepBatch, chunks: Sequence[ScheduledChunk]) -> None:
        self.catch_up([chunk.sequence for chunk in chunks if _is_decode(chunk)])
        carried = torch.zeros(len(chunks), self.head.state_size, device=self._model.device)
        for index, chunk in enumerate(chunks):
            request_id = chunk.sequence.request_id
            self._waiting.pop(request_id, None)  # of a sequence that was preempted and is computed anew
            state = self.state_before(request_id, chunk.start)
            if state is not None:
                carried[index] = state
            elif chunk.start == 0:
                self._not_followed.discard(request_id)
        self._step = self.head.absorb(batch, self._taps, carried, self.kv_cache)

    def settle(self, chunks: Sequence[ScheduledChunk], num_accepted: Sequence[int]) -> None:
        """Take in which tokens of the step stand.

        Args:
            chunks: As given to `forward`.
            num_accepted: How many drafts of each chunk were accepted.
        """
        row = 0
        full: list[EngineSequence] = []
        for chunk, accepted in zip(chunks, num_accepted, strict=True):
            request_id = chunk.sequence.request_id
            if self._step is not None:
                state = self._step[row + chunk.num_tokens - 1 + accepted].clone()  # the other rows need not stay
                self._newest[request_id] = _Newest(chunk.end + accepted, state)
            elif self.can_draft(request_id) and self._wait(chunk, accepted, row):
                full.append(chunk.sequence)
            row += chunk.num_rows
        self._step = None
        self.catch_up(full)

    def _wait(self, chunk: ScheduledChunk, num_accepted: int, row: int) -> bool:
        """Let a decoded token and its accepted drafts wait; returns whether they fill a block."""
        request_id = chunk.sequence.request_id
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.end != chunk.start:
            carried = self.state_before(request_id, chunk.start)
            if carried is None:
                carried = torch.zeros(self.head.state_size, device=self._model.device)
            waiting = self._waiting[request_id] = _Waiting(chunk.start, carried, [], [])
        waiting.token_ids += [chunk.sequence.token_ids[chunk.start], *chunk.draft_token_ids[:num_accepted]]
        taps = self._taps[row : row + 1 + num_accepted]
        waiting.taps.append(taps.clone() if chunk.draft_token_ids else taps)  # rejected drafts' rows need not stay
        block_size = self.kv_cache.layout.block_size
        return waiting.end // block_size > waiting.start // block_size

    def catch_up(self, sequences: Sequence[EngineSequence]) -> int:
        """Let the head absorb what waits of these sequences, so that it can draft behind their newest tokens.

        Returns:
            The most steps that one of them had waited for.
        """
        parts: list[SequenceRows] = []
        taken: list[tuple[RequestId, _Waiting]] = []
        for sequence in sequences:
            waiting = self._waiting.pop(sequence.request_id, None)
            if waiting is not None and waiting.end <= len(sequence.block_table) * self.kv_cache.layout.block_size:
                parts.append(SequenceRows(waiting.token_ids, waiting.start, sequence.block_table, 0))
                taken.append((sequence.request_id, waiting))
        if not taken:
            return 0
        batch = build_batch(parts, self.kv_cache.layout.block_size)
        taps = torch.cat([values for _, waiting in taken for values in waiting.taps])
        carried = torch.stack([waiting.carried for _, waiting in taken])
        states = self.head.absorb(batch, taps, carried, self.kv_cache)
        row = 0
        for request_id, waiting in taken:
            row += len(waiting.token_ids)
            self._newest[request_id] = _Newest(waiting.end, states[row - 1].clone())
        return max(len(waiting.taps) for _, waiting in taken)

    def state_before(self, request_id: RequestId, position: int) -> Tensor | None:
        """Return the state [state_size] before a position, or None when it is not known or waits: `catch_up`."""
        newest = self._newest.get(request_id)
        return newest.state if newest is not None and newest.num_tokens == position else None

    def can_draft(self, request_id: RequestId) -> bool:
        """Whether the head's KV of the sequence is here, as far as one can know."""
        return request_id not in self._not_followed

    def give_up(self, request_id: RequestId) -> None:
        """Stop following a sequence that is not worth drafting for, until it is computed anew."""
        self.forget(request_id)
        self._not_followed.add(request_id)

    def export(self, request_id: RequestId) -> bytes:
        """Return the newest state for the hand-off, fp32 little-endian; empty when there is none."""
        newest = self._newest.get(request_id)
        if newest is None:
            return b""
        return newest.state.cpu().numpy().astype("<f4").tobytes()

    def take_over(self, request_id: RequestId, num_tokens: int, state: bytes) -> None:
        """Take over a sequence whose KV was imported.

        Args:
            request_id: The sequence.
            num_tokens: Its tokens, all computed.
            state: What `export` gave on the other side; empty = the other side has no such head, so that the head's
                KV did not come either and the sequence is not drafted for.
        """
        values = np.frombuffer(state, "<f4") if len(state) == 4 * self.head.state_size else None
        if values is None or not np.isfinite(values).all():
            self._not_followed.add(request_id)
            return
        tensor = torch.from_numpy(values.astype(np.float32)).to(self._model.device)
        self._newest[request_id] = _Newest(num_tokens, tensor)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended. Unknown ids are ignored."""
        self._newest.pop(request_id, None)
        self._waiting.pop(request_id, None)
        self._not_followed.discard(request_id)


def _is_decode(chunk: ScheduledChunk) -> bool:
    """Whether a chunk's KV stays here and is not shared before its block is full."""
    return chunk.num_tokens == 1 and chunk.samples and not chunk.sequence.is_handoff
