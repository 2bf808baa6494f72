"""The naive model that hand-offs are checked against: sets of what arrived, who owns a block, and a sink that insists.

Used by tests/property/test_handoff.py, which carries every frame by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from engine.cache.layout import KvLayout
from engine.types import BlockId, Epoch, Incarnation, LeaseId
from engine.worker_types import KvHandle
from kv_transfer.blocks import BlockRange
from kv_transfer.frame import Frame, FrameKind, seal
from kv_transfer.handoff.messages import Commit, Credit, Rejection
from kv_transfer.handoff.sender import (
    Accepted,
    Acknowledged,
    CreditGranted,
    Failed,
    Finished,
    KvSent,
    SendAbort,
    SendCommit,
    SenderEvent,
    SenderHandoff,
    SendKv,
)
from kvrelay.errors import EngineError
from tests.fakes_transport import FakeClock, tiny_layout

LAYOUT = tiny_layout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=8)
NUM_BLOCKS = 12
TTL_S = 5.0
WINDOW_BYTES = 6 * LAYOUT.block_bytes
INCARNATION = Incarnation(9)


def content(attempt_id: int, layer: int, block_index: int) -> bytes:
    """What one block of an attempt holds: different for every attempt, layer and block."""
    word = (attempt_id * 64 + layer * 16 + block_index).to_bytes(4, "little")
    return word * (LAYOUT.block_bytes // 4)


def blocks_of(blocks: BlockRange) -> range:
    """The block indexes of a range."""
    return range(blocks.first_block, blocks.first_block + blocks.num_blocks)


@dataclass
class Attempt:
    """One sender, its channel, and what the model knows of it."""

    attempt_id: int
    handle: KvHandle
    sender: SenderHandoff
    writer_id: int
    committed: list[tuple[LeaseId, Epoch]]
    """What decode has committed, of all attempts."""
    source: KvLayout = LAYOUT
    transport: str = "model"
    to_receiver: list[Frame] = field(default_factory=list)
    to_sender: list[Frame] = field(default_factory=list)
    is_cut: bool = False
    verdict: list[EngineError | None] = field(default_factory=list)
    is_open: bool = False
    """Model: an intact OPEN arrived in time."""
    is_spoilt: bool = False
    """Model: something arrived after OPEN that must fail the attempt."""
    arrived: set[tuple[int, int]] = field(default_factory=set)
    """Model: intact (layer, block) cells that arrived after OPEN and in time."""

    def reply(self, frame: Frame) -> None:
        if not self.is_cut:
            self.to_sender.append(frame)

    def frame(self, kind: FrameKind, payload: bytes = b"") -> Frame:
        handle = self.handle
        return seal(kind, handle.lease_id, handle.epoch, handle.incarnation, payload)

    def take(self, event: SenderEvent) -> None:
        """Give the sender an event and carry out what it wants."""
        todo = self.sender.handle(event)
        while todo:
            instruction = todo.pop(0)
            assert not self.verdict, "something was to be done after the end"
            match instruction:
                case SendKv(blocks):
                    cells = [(layer, block) for layer in blocks.layers for block in blocks_of(blocks)]
                    payload = b"".join(content(self.attempt_id, layer, block) for layer, block in cells)
                    handle = self.handle
                    frame = seal(
                        FrameKind.KV,
                        handle.lease_id,
                        handle.epoch,
                        handle.incarnation,
                        payload,
                        layer_start=blocks.layer_start,
                        num_layers=blocks.num_layers,
                        first_block=blocks.first_block,
                        num_blocks=blocks.num_blocks,
                    )
                    self.to_receiver.append(frame)
                    todo += self.sender.handle(KvSent(blocks, len(payload), frame.header.digest))
                case SendCommit(num_bytes, num_frames, digest, record):
                    commit = Commit(num_bytes, num_frames, digest, 0, record)
                    self.to_receiver.append(self.frame(FrameKind.COMMIT, commit.encode()))
                case SendAbort(error):
                    payload = Rejection.of(error).encode()
                    self.to_receiver.append(self.frame(FrameKind.ABORT, payload))
                case Finished(error):
                    self.verdict.append(error)
                    if error is None:
                        assert (self.handle.lease_id, self.handle.epoch) in self.committed

    def answer(self, frame: Frame) -> None:
        match frame.header.kind:
            case FrameKind.ACCEPTED:
                window = Credit.decode(frame.payload).num_bytes
                self.take(Accepted(window, 3 * LAYOUT.block_bytes))
            case FrameKind.CREDIT:
                self.take(CreditGranted(Credit.decode(frame.payload).num_bytes))
            case FrameKind.COMMITTED:
                self.take(Acknowledged())
            case _:
                self.take(Failed(Rejection.decode(frame.payload).to_error()))


@dataclass
class Reservation:
    """One sequence on decode and the blocks it holds."""

    lease_id: LeaseId
    session: str
    block_ids: list[BlockId]
    num_tokens: int
    expires_at: float
    attempts: list[Attempt] = field(default_factory=list)
    is_live: bool = True
    """Model: neither committed, released, expired nor revoked."""
    epoch: int = 1


class Owners(Protocol):
    """Who may write what right now."""

    clock: FakeClock
    writing: Attempt | None

    def owner_of(self, block: BlockId) -> Reservation | None:
        """The reservation that holds a block."""
        ...


class CheckedSink:
    """Blocks that refuse any write but by their present owner."""

    layout = LAYOUT

    def __init__(self, machine: Owners) -> None:
        self._machine = machine
        self.data = np.zeros((LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.block_bytes), np.uint8)

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], payload: memoryview) -> None:
        owner = self._machine.writing
        assert owner is not None, "a block was written while no frame was being handled"
        for index, block in enumerate(block_ids):
            reservation = self._machine.owner_of(block)
            assert reservation is not None, "a free block, or a running sequence's, was written"
            assert reservation.epoch == owner.handle.epoch
            assert reservation.lease_id == owner.handle.lease_id
            assert self._machine.clock.now() < reservation.expires_at, "written after the lease ran out"
            part = payload[index * LAYOUT.block_bytes : (index + 1) * LAYOUT.block_bytes]
            self.data[layer, block] = np.frombuffer(part, np.uint8)

    def write_converted(self, *_: object) -> None:
        raise AssertionError("the layouts are equal")

    def read_blocks(self, *_: object) -> None:
        raise AssertionError("the receiver reads nothing")
