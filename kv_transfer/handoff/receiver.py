"""The receiving side of one hand-off attempt as a state machine without input or output.

`ReceiverHandoff.handle` takes an event and returns instructions; `import_table.py` checks the lease first and then
carries them out. One machine lives for one epoch. States and transitions are drawn in `docs/handoff.md`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from engine.cache.layout import KvLayout
from kv_transfer.blocks import BlockRange
from kv_transfer.handoff.coverage import Coverage
from kv_transfer.handoff.messages import Commit
from kvrelay.errors import (
    ChecksumMismatch,
    CoverageIncomplete,
    EngineError,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    PeerUnavailable,
    StaleEpoch,
    TransferError,
)

DEFAULT_WINDOW_BYTES = 64 << 20
"""Payload bytes a sender may have sent that were not yet credited."""


class ReceiverState(StrEnum):
    """Where an attempt stands."""

    RESERVED = "reserved"
    """Blocks are held, nobody has claimed them."""
    OPENED = "opened"
    """A writer showed the ticket."""
    RECEIVING = "receiving"
    """At least one frame was written."""
    COMMITTED = "committed"
    """Complete and verified: the blocks belong to the sequence."""
    FAILED = "failed"
    """This attempt cannot finish; the reservation still stands for the next epoch."""
    RELEASED = "released"
    """The holder gave the reservation up."""
    EXPIRED = "expired"
    """The lease ran out."""
    SUPERSEDED = "superseded"
    """A newer epoch took over."""


TERMINAL = frozenset(ReceiverState) - {ReceiverState.RESERVED, ReceiverState.OPENED, ReceiverState.RECEIVING}
"""States in which nothing is ever written again."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A writer showed a valid ticket."""

    writer_id: int
    """The connection it came over."""
    source: KvLayout
    start_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A KV frame of this epoch arrived."""

    writer_id: int
    blocks: BlockRange
    payload_bytes: int
    digest: int
    is_intact: bool
    """Whether header and payload match the digest."""


@dataclass(frozen=True, slots=True)
class CommitArrived:
    """The writer says that everything was sent."""

    writer_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class WriterFailed:
    """The writer gave up, its connection was lost, or what it sent was damaged."""

    writer_id: int
    error: EngineError


@dataclass(frozen=True, slots=True)
class Ended:
    """The reservation ends for this attempt."""

    state: ReceiverState
    """RELEASED, EXPIRED or SUPERSEDED."""


ReceiverEvent = Opened | KvArrived | CommitArrived | WriterFailed | Ended


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """Write `[token_start, token_start + num_tokens)` of each layer of `blocks` from the frame's payload."""

    blocks: BlockRange
    token_start: int
    num_tokens: int
    source: KvLayout


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the writer that it may send `window_bytes`."""

    window_bytes: int


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Tell the writer that it may send `num_bytes` more."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class CommitHandoff:
    """Coverage and digest hold: pass the blocks to the sequence, then acknowledge."""

    commit: Commit


@dataclass(frozen=True, slots=True)
class Reject:
    """Tell the writer why it is refused."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class ReportFailure:
    """Tell the owner of the reservation that this attempt failed."""

    error: EngineError


ReceiverInstruction = WriteTokens | Accept | GrantCredit | CommitHandoff | Reject | ReportFailure


class ReceiverHandoff:
    """One attempt to fill one reservation.

    Invariants: `WriteTokens` only in OPENED or RECEIVING, only for the one writer, each cell once and inside
    `[start_token, num_tokens)`; `CommitHandoff` at most once and only with full coverage; a terminal state is final.
    """

    def __init__(
        self, target: KvLayout, start_token: int, num_tokens: int, window_bytes: int = DEFAULT_WINDOW_BYTES
    ) -> None:
        self._target = target
        self._start_token = start_token
        self._num_tokens = num_tokens
        self._window_bytes = window_bytes
        self._allowance = 0
        """Credit granted and not used."""
        self._owed_credit = 0
        self._writer: Opened | None = None
        self._coverage: Coverage | None = None
        self.state = ReceiverState.RESERVED
        self.num_bytes = 0
        """Payload bytes written."""

    @property
    def writer_id(self) -> int | None:
        """The connection that claimed this attempt; None = nobody yet."""
        return None if self._writer is None else self._writer.writer_id

    @property
    def num_frames(self) -> int:
        """KV frames written."""
        return 0 if self._coverage is None else self._coverage.num_frames

    def handle(self, event: ReceiverEvent) -> list[ReceiverInstruction]:
        """Take one event and return what is to be done, in order."""
        match event:
            case Opened():
                return self._on_opened(event)
            case KvArrived():
                return self._on_kv(event)
            case CommitArrived():
                return self._on_commit(event)
            case WriterFailed():
                if self.state in TERMINAL or event.writer_id != self.writer_id:
                    return []
                return self._fail(event.error)
            case Ended():
                return self._on_ended(event)
            case _:
                assert_never(event)

    def _on_opened(self, event: Opened) -> list[ReceiverInstruction]:
        if self._writer is not None:
            if event == self._writer and self.state not in TERMINAL:
                return []  # the same OPEN again
            return [Reject(StaleEpoch("this epoch was already opened by a writer"))]
        if self.state in TERMINAL:
            return [Reject(StaleEpoch(f"this epoch is {self.state}"))]
        if (event.start_token, event.num_tokens) != (self._start_token, self._num_tokens):
            wanted = f"[{self._start_token}, {self._num_tokens})"
            return [
                Reject(TransferError(f"reserved for tokens {wanted}, not [{event.start_token}, {event.num_tokens})"))
            ]
        try:
            self._target.check_convertible(event.source)
        except LayoutMismatch as error:
            return [Reject(error)]
        first_block = self._start_token // event.source.block_size
        num_blocks = event.source.num_blocks(self._num_tokens) - first_block
        self._writer = event
        self._coverage = Coverage(event.source.num_layers, first_block, num_blocks)
        self._allowance = self._window_bytes
        self.state = ReceiverState.OPENED
        return [Accept(self._window_bytes)]

    def _on_kv(self, event: KvArrived) -> list[ReceiverInstruction]:
        if self.state in TERMINAL:
            return []  # the writer was already told why
        writer, coverage = self._writer, self._coverage
        if writer is None or coverage is None or event.writer_id != writer.writer_id:
            return [Reject(StaleEpoch("this writer has not opened the reservation"))]
        if not event.is_intact:
            return self._fail(ChecksumMismatch("a KV frame does not have the digest that its header names"))
        expected_bytes = event.blocks.num_cells * writer.source.block_bytes
        if event.payload_bytes != expected_bytes:
            return self._fail(TransferError(f"a frame of {expected_bytes} bytes carries {event.payload_bytes}"))
        try:
            is_new = coverage.add(event.blocks, event.digest)
        except TransferError as error:
            return self._fail(error)
        if not is_new:
            return []  # the same frame again
        self._allowance -= event.payload_bytes
        if self._allowance < 0:
            return self._fail(TransferError("the writer sent more than it had credit for"))
        self.state = ReceiverState.RECEIVING
        self.num_bytes += event.payload_bytes
        instructions: list[ReceiverInstruction] = [self._write(event.blocks, writer.source)]
        self._owed_credit += event.payload_bytes
        if self._owed_credit * 4 >= self._window_bytes:
            instructions.append(GrantCredit(self._owed_credit))
            self._allowance += self._owed_credit
            self._owed_credit = 0
        return instructions

    def _write(self, blocks: BlockRange, source: KvLayout) -> WriteTokens:
        # Whole source blocks travel. The first may begin before start_token (source blocks can be larger than
        # target blocks) and the last may end after num_tokens; only [token_start, token_end) is ever written.
        token_start = max(blocks.first_block * source.block_size, self._start_token)
        token_end = min((blocks.first_block + blocks.num_blocks) * source.block_size, self._num_tokens)
        return WriteTokens(blocks, token_start, token_end - token_start, source)

    def _on_commit(self, event: CommitArrived) -> list[ReceiverInstruction]:
        if self.state in TERMINAL:
            return []
        coverage = self._coverage
        if coverage is None or event.writer_id != self.writer_id:
            return [Reject(StaleEpoch("this writer has not opened the reservation"))]
        if not coverage.is_complete:
            missing = f"{coverage.num_missing} blocks (counted per layer) are missing"
            return self._fail(CoverageIncomplete(f"commit after {coverage.num_frames} frames, but {missing}"))
        if event.commit.num_bytes != self.num_bytes or event.commit.digest != coverage.digest():
            return self._fail(ChecksumMismatch("the frames that arrived are not the ones that COMMIT names"))
        self.state = ReceiverState.COMMITTED
        return [CommitHandoff(event.commit)]

    def _on_ended(self, event: Ended) -> list[ReceiverInstruction]:
        if self.state in TERMINAL and self.state is not ReceiverState.FAILED:
            return []
        had_writer = self._writer is not None and self.state is not ReceiverState.FAILED
        self.state = event.state
        if not had_writer:
            return []
        match event.state:
            case ReceiverState.EXPIRED:
                return [Reject(LeaseExpired("the lease ran out of time"))]
            case ReceiverState.SUPERSEDED:
                return [Reject(StaleEpoch("a newer attempt owns the reservation"))]
            case _:
                return [Reject(LeaseUnknown("the reservation was released"))]

    def _fail(self, error: EngineError) -> list[ReceiverInstruction]:
        self.state = ReceiverState.FAILED
        if isinstance(error, PeerUnavailable):
            return [ReportFailure(error)]  # nobody is left to be told
        return [Reject(error), ReportFailure(error)]
