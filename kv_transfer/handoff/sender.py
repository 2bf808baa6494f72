"""The sending side of one hand-off attempt as a state machine without input or output.

`SenderHandoff.handle` takes an event and returns instructions; `export.py` carries them out in order. It decides which
blocks go into the next frame: whatever is final and unsent, several layers at once when that is cheaper or when the
link lags behind compute. States and transitions are drawn in `docs/handoff.md`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from engine.cache.layout import KvLayout
from kv_transfer.blocks import BlockRange
from kv_transfer.handoff.coverage import Coverage
from kvrelay.errors import CoverageIncomplete, EngineError, LayoutMismatch, TransferError


class SenderState(StrEnum):
    """Where an attempt stands."""

    OPENING = "opening"
    """OPEN is on its way; layers may already become ready."""
    STREAMING = "streaming"
    """Accepted; blocks leave as they become final."""
    COMMITTING = "committing"
    """Everything was sent; waiting for COMMITTED."""
    DONE = "done"
    """Decode owns the KV."""
    FAILED = "failed"
    """Refused, lost or aborted; nothing is sent any more."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The receiver took the claim."""

    window_bytes: int
    """First credit."""
    max_frame_bytes: int
    """Payload size that suits the transport; frames are whole blocks of at most this (one block at least)."""


@dataclass(frozen=True, slots=True)
class CreditGranted:
    """The receiver takes that many more payload bytes."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class LayerReady:
    """KV of tokens `[.., num_tokens)` of one layer is final."""

    layer: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvSent:
    """The frame of the last `SendKv` was handed to the transport."""

    blocks: BlockRange
    payload_bytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class FinishRequested:
    """Compute is over; this record belongs to the commit."""

    record: bytes


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """COMMITTED arrived."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The receiver refused, the link was lost, or time ran out."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """This side gives up."""

    error: EngineError


SenderEvent = Accepted | CreditGranted | LayerReady | KvSent | FinishRequested | Acknowledged | Failed | AbortRequested


@dataclass(frozen=True, slots=True)
class SendKv:
    """Send these blocks in one frame, then report `KvSent`."""

    blocks: BlockRange


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Send COMMIT."""

    num_bytes: int
    num_frames: int
    digest: int
    record: bytes


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the receiver that this attempt is given up."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class Finished:
    """The hand-off is over; None = committed."""

    error: EngineError | None


SenderInstruction = SendKv | SendCommit | SendAbort | Finished


class SenderHandoff:
    """One attempt to send the KV of tokens `[start_token, num_tokens)`.

    Invariants: `SendKv` only in STREAMING, one at a time, within credit, each block of each layer once and only when it
    is final; `SendCommit` once and only after all of them; `Finished` exactly once, last.
    """

    def __init__(self, source: KvLayout, start_token: int, num_tokens: int, *, min_frame_bytes: int | None) -> None:
        """Make a machine in OPENING.

        Args:
            source: Layout of the blocks that are sent.
            start_token: First token to send.
            num_tokens: Tokens of the prompt.
            min_frame_bytes: While compute goes on, a frame waits until it has that many bytes or is as large as frames
                get. 0 = each layer leaves as it becomes ready; None = nothing leaves before everything is ready.
        """
        self._source = source
        self._num_tokens = num_tokens
        self._max_frame_bytes = source.block_bytes
        self._min_frame_bytes = min_frame_bytes
        first_block = start_token // source.block_size
        self._end_block = source.num_blocks(num_tokens)
        self._ready = [first_block] * source.num_layers
        """Per layer: blocks below this index are final."""
        self._sent = [first_block] * source.num_layers
        """Per layer: blocks below this index were sent."""
        self._coverage = Coverage(source.num_layers, first_block, self._end_block - first_block)
        self._credit = 0
        self._in_flight: BlockRange | None = None
        self._record: bytes | None = None
        self.state = SenderState.OPENING
        self.num_bytes = 0
        """Payload bytes sent."""

    @property
    def num_frames(self) -> int:
        """KV frames sent."""
        return self._coverage.num_frames

    @property
    def is_all_ready(self) -> bool:
        """Whether every layer's KV is final."""
        return all(ready == self._end_block for ready in self._ready)

    def handle(self, event: SenderEvent) -> list[SenderInstruction]:
        """Take one event and return what is to be done, in order."""
        if self.state in (SenderState.DONE, SenderState.FAILED):
            return []
        match event:
            case Accepted():
                return self._on_accepted(event)
            case CreditGranted():
                self._credit += event.num_bytes
                return self._next()
            case LayerReady():
                return self._on_layer_ready(event)
            case KvSent():
                return self._on_kv_sent(event)
            case FinishRequested():
                return self._on_finish(event)
            case Acknowledged():
                if self.state is not SenderState.COMMITTING:
                    return self._fail(TransferError("COMMITTED arrived before COMMIT was sent"))
                self.state = SenderState.DONE
                return [Finished(None)]
            case Failed():
                return self._fail(event.error)
            case AbortRequested():
                return [SendAbort(event.error), *self._fail(event.error)]
            case _:
                assert_never(event)

    def _on_accepted(self, event: Accepted) -> list[SenderInstruction]:
        if self.state is not SenderState.OPENING:
            return []  # a duplicate
        if event.window_bytes < 2 * self._source.block_bytes:
            error = TransferError(f"a window of {event.window_bytes} bytes cannot take one block")
            return [SendAbort(error), *self._fail(error)]
        self.state = SenderState.STREAMING
        self._credit = event.window_bytes
        # The receiver may hold back a quarter of the window, so a frame of up to half of it always gets through.
        self._max_frame_bytes = max(min(event.max_frame_bytes, event.window_bytes // 2), self._source.block_bytes)
        return self._next()

    def _on_layer_ready(self, event: LayerReady) -> list[SenderInstruction]:
        if not 0 <= event.layer < self._source.num_layers:
            raise LayoutMismatch(f"layer {event.layer} of a model with {self._source.num_layers}")
        is_last = event.num_tokens >= self._num_tokens
        # Before the end a partly filled block is not final: the next chunk goes on writing it.
        ready = self._end_block if is_last else event.num_tokens // self._source.block_size
        self._ready[event.layer] = max(self._ready[event.layer], ready)
        return self._next()

    def _on_kv_sent(self, event: KvSent) -> list[SenderInstruction]:
        if event.blocks != self._in_flight:
            raise TransferError("a frame was reported as sent that was not asked for")
        self._in_flight = None
        self._coverage.add(event.blocks, event.digest)
        self.num_bytes += event.payload_bytes
        return self._next()

    def _on_finish(self, event: FinishRequested) -> list[SenderInstruction]:
        if not self.is_all_ready:
            error = CoverageIncomplete("finish was asked for before every layer's KV was ready")
            return [SendAbort(error), *self._fail(error)]
        self._record = event.record
        return self._next()

    def _next(self) -> list[SenderInstruction]:
        if self.state is not SenderState.STREAMING or self._in_flight is not None:
            return []
        if self._coverage.is_complete:
            if self._record is None:
                return []
            self.state = SenderState.COMMITTING
            return [SendCommit(self.num_bytes, self.num_frames, self._coverage.digest(), self._record)]
        blocks = self._pick()
        if blocks is None or blocks.num_cells * self._source.block_bytes > self._credit:
            return []
        self._credit -= blocks.num_cells * self._source.block_bytes
        self._in_flight = blocks
        for layer in blocks.layers:
            self._sent[layer] = blocks.first_block + blocks.num_blocks
        return [SendKv(blocks)]

    def _pick(self) -> BlockRange | None:
        """Return the next frame's blocks: the first layer with final unsent blocks, and those after it alike.

        None = nothing is unsent, or it waits for more.
        """
        num_layers = self._source.num_layers
        start = next((layer for layer in range(num_layers) if self._sent[layer] < self._ready[layer]), None)
        if start is None:
            return None
        max_cells = self._max_frame_bytes // self._source.block_bytes
        first, end = self._sent[start], self._ready[start]
        num_blocks = min(end - first, max_cells)
        stop = start + 1
        if num_blocks == end - first:
            while (
                stop < num_layers
                and (self._sent[stop], self._ready[stop]) == (first, end)
                and (stop + 1 - start) * num_blocks <= max_cells
            ):
                stop += 1
        blocks = BlockRange(first, num_blocks, start, stop - start)
        return blocks if self._may_leave(blocks, max_cells) else None

    def _may_leave(self, blocks: BlockRange, max_cells: int) -> bool:
        if self.is_all_ready:
            return True
        if self._min_frame_bytes is None:
            return False
        is_full = blocks.num_cells + blocks.num_blocks > max_cells
        return is_full or blocks.num_cells * self._source.block_bytes >= self._min_frame_bytes

    def _fail(self, error: EngineError) -> list[SenderInstruction]:
        self.state = SenderState.FAILED
        return [Finished(error)]
