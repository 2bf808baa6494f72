"""Every reservation of a decode worker, and what happens to each frame that names one.

Synchronous: `handle_frame` checks lease, epoch, ticket, digest, offsets and coverage and then writes, all in one call
on the event loop. That is the fence: when `release`, `supersede`, `end_session` or `tick` has returned, no write of the
old epoch is in flight and none can follow, so the caller may hand the blocks to somebody else. It allocates and frees
no block. `importer.py` feeds it from connections.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, assert_never

import structlog

from engine.cache.layout import KvLayout
from engine.clock import Clock
from engine.types import BlockId, Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.blocks import BlockRange, BlockSink
from kv_transfer.device import DeviceBytes
from kv_transfer.frame import Frame, FrameError, FrameKind, seal, verify
from kv_transfer.handoff.landing import part_of, write_layer
from kv_transfer.handoff.lease import Lease, LeaseTable
from kv_transfer.handoff.messages import Commit, Credit, Open, Rejection
from kv_transfer.handoff.receiver import (
    DEFAULT_WINDOW_BYTES,
    Accept,
    CommitArrived,
    CommitHandoff,
    Ended,
    GrantCredit,
    KvArrived,
    Opened,
    ReceiverHandoff,
    ReceiverInstruction,
    ReceiverState,
    Reject,
    ReportFailure,
    WriterFailed,
    WriteTokens,
)
from kvrelay.errors import ChecksumMismatch, EngineError, InvalidRequest, LeaseExpired, PeerUnavailable, TransferError

MAX_REMEMBERED_COMMITS = 1024
"""Commits whose acknowledgement is repeated when COMMIT arrives again."""

CommitCallback = Callable[[LeaseId, Epoch, bytes, TransferStats], None]
FailureCallback = Callable[[LeaseId, Epoch, EngineError], None]

_log = structlog.get_logger(__name__)


class Writer(Protocol):
    """One connected exporter, as the table sees it."""

    @property
    def writer_id(self) -> int:
        """Different for every connection of this process."""
        ...

    @property
    def source(self) -> KvLayout:
        """Layout of what it sends."""
        ...

    @property
    def transport(self) -> str:
        """Scheme of its connection."""
        ...

    def reply(self, frame: Frame) -> None:
        """Queue a frame for it; never blocks, and does nothing when it is gone."""
        ...


@dataclass(slots=True)
class _Import:
    """One reservation: its blocks and the attempt that may fill them."""

    lease_id: LeaseId
    epoch: Epoch
    block_ids: tuple[BlockId, ...]
    start_token: int
    num_tokens: int
    attempt: ReceiverHandoff
    writer: Writer | None = None
    opened_at: float = 0.0
    committed: Commit | None = field(default=None)


class ImportTable:
    """See the module.

    Invariants (`check_invariants`): a reservation is listed exactly as long as its lease; its epoch is the lease's; no
    block belongs to two reservations.
    """

    def __init__(
        self,
        sink: BlockSink,
        leases: LeaseTable,
        on_commit: CommitCallback,
        on_failed: FailureCallback,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        clock: Clock,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        verify_digests: bool = True,
    ) -> None:
        self._sink = sink
        self._leases = leases
        self._on_commit = on_commit
        self._on_failed = on_failed
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._clock = clock
        self._window_bytes = window_bytes
        self._verify_digests = verify_digests
        self._imports: dict[LeaseId, _Import] = {}
        self._held: set[BlockId] = set()
        self._commits: OrderedDict[tuple[LeaseId, Epoch], tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._imports)

    def reserve(
        self, block_ids: Sequence[BlockId], start_token: int, num_tokens: int, session_id: str, ttl_s: float
    ) -> KvHandle:
        """See `Importer.reserve`."""
        layout = self._sink.layout
        if not 0 <= start_token < num_tokens or start_token % layout.block_size:
            raise InvalidRequest(
                "start_token", f"{start_token} must be a multiple of {layout.block_size} and below {num_tokens}"
            )
        needed = layout.num_blocks(num_tokens) - start_token // layout.block_size
        if len(block_ids) < needed or len(set(block_ids)) != len(block_ids):
            raise InvalidRequest("block_ids", f"{needed} different blocks are needed, not {len(set(block_ids))}")
        if not self._held.isdisjoint(block_ids):
            raise InvalidRequest("block_ids", "a block already belongs to another reservation")
        lease = self._leases.grant(session_id, ttl_s)
        attempt = ReceiverHandoff(layout, start_token, num_tokens, self._window_bytes)
        entry = _Import(lease.lease_id, lease.epoch, tuple(block_ids), start_token, num_tokens, attempt)
        self._imports[lease.lease_id] = entry
        self._held.update(block_ids)
        return self._handle(entry, lease)

    def has_begun(self, lease_id: LeaseId) -> bool:
        """Whether KV of the present attempt has come."""
        entry = self._imports.get(lease_id)
        return entry is not None and entry.attempt.num_frames > 0

    def supersede(self, lease_id: LeaseId) -> KvHandle:
        """See `Importer.supersede`."""
        lease = self._leases.supersede(lease_id)
        entry = self._imports[lease_id]
        self._end(entry, ReceiverState.SUPERSEDED)
        entry.epoch, entry.writer = lease.epoch, None
        entry.attempt = ReceiverHandoff(self._sink.layout, entry.start_token, entry.num_tokens, self._window_bytes)
        return self._handle(entry, lease)

    def release(self, lease_id: LeaseId) -> bool:
        """See `Importer.release`."""
        if self._leases.release(lease_id) is None:
            return False
        self._forget(lease_id, ReceiverState.RELEASED)
        return True

    def end_session(self, session_id: str) -> list[LeaseId]:
        """See `Importer.end_session`."""
        ended = [lease.lease_id for lease in self._leases.end_session(session_id)]
        for lease_id in ended:
            self._forget(lease_id, ReceiverState.RELEASED)
        return ended

    def tick(self) -> list[LeaseId]:
        """See `Importer.tick`."""
        expired = self._leases.expire()
        for lease in expired:
            self._forget(lease.lease_id, ReceiverState.EXPIRED)
            error = LeaseExpired(f"no commit within the lease's {lease.ttl_s:g} s")
            self._call(self._on_failed, lease.lease_id, lease.epoch, error)
        return [lease.lease_id for lease in expired]

    def writer_lost(self, writer: Writer, error: EngineError) -> None:
        """Fail every attempt that this connection was writing. Their leases stand for the next epoch."""
        for entry in list(self._imports.values()):
            if entry.attempt.writer_id == writer.writer_id:
                self._execute(entry, writer, entry.attempt.handle(WriterFailed(writer.writer_id, error)))

    def handle_frame(self, writer: Writer, frame: Frame) -> None:
        """Act on one frame after HELLO: write it, or refuse it. Raises nothing that a peer could cause."""
        header = frame.header
        try:
            self._dispatch(writer, frame)
        except EngineError as error:
            if isinstance(error, LeaseExpired):
                self.tick()  # what a frame finds expired is expired for everybody, and reported once
            # Neither a wrong lease nor a wrong payload says anything about the other hand-offs of the connection.
            entry = self._imports.get(header.lease_id)
            if entry is not None and entry.epoch == header.epoch and entry.attempt.writer_id == writer.writer_id:
                self._execute(entry, writer, entry.attempt.handle(WriterFailed(writer.writer_id, error)))
            else:
                self._reject(writer, header.lease_id, header.epoch, error)

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if the table contradicts itself or the lease table."""
        self._leases.check_invariants()
        if len(self._imports) != len(self._leases):
            raise RuntimeError("leases and reservations disagree")
        held = [block for entry in self._imports.values() for block in entry.block_ids]
        if len(held) != len(set(held)) or set(held) != self._held:
            raise RuntimeError("a block belongs to two reservations, or to none")
        for lease_id in self._imports:
            if lease_id not in self._leases:
                raise RuntimeError(f"reservation {lease_id:x} outlived its lease")

    def _dispatch(self, writer: Writer, frame: Frame) -> None:
        header = frame.header
        if header.incarnation != self._incarnation:
            raise PeerUnavailable(f"worker {self._worker_id} was restarted since the reservation was made")
        if header.kind is FrameKind.KV:
            entry = self._checked(header.lease_id, header.epoch)
            blocks = BlockRange(header.first_block, header.num_blocks, header.layer_start, header.num_layers)
            payload = frame.payload if frame.device is None else frame.device
            event = KvArrived(writer.writer_id, blocks, header.payload_bytes, header.digest, self._is_intact(frame))
            self._execute(entry, writer, entry.attempt.handle(event), payload)
            return
        if not self._is_intact(frame):
            raise ChecksumMismatch(f"a {header.kind.name} frame does not have the digest that its header names")
        match header.kind:
            case FrameKind.OPEN:
                opening = Open.decode(frame.payload)
                self._leases.open(header.lease_id, header.epoch, opening.ticket)
                entry = self._imports[header.lease_id]
                opened = Opened(writer.writer_id, writer.source, opening.start_token, opening.num_tokens)
                self._execute(entry, writer, entry.attempt.handle(opened))
            case FrameKind.COMMIT:
                commit = Commit.decode(frame.payload)
                remembered = self._commits.get((header.lease_id, header.epoch))
                if remembered is not None:
                    if remembered == (writer.writer_id, commit.digest):
                        self._reply(writer, FrameKind.COMMITTED, header.lease_id, header.epoch)
                    return
                entry = self._checked(header.lease_id, header.epoch)
                self._execute(entry, writer, entry.attempt.handle(CommitArrived(writer.writer_id, commit)))
            case FrameKind.ABORT:
                entry = self._checked(header.lease_id, header.epoch)
                error = Rejection.decode(frame.payload).to_error()
                self._execute(entry, writer, entry.attempt.handle(WriterFailed(writer.writer_id, error)))
            case _:
                raise FrameError(f"a sender does not send {header.kind.name}")

    def _checked(self, lease_id: LeaseId, epoch: Epoch) -> _Import:
        self._leases.check(lease_id, epoch)
        return self._imports[lease_id]

    def _is_intact(self, frame: Frame) -> bool:
        if not self._verify_digests:
            return True
        try:
            verify(frame)
        except ChecksumMismatch:
            return False
        return True

    def _execute(
        self,
        entry: _Import,
        writer: Writer,
        instructions: list[ReceiverInstruction],
        payload: memoryview | DeviceBytes | None = None,
    ) -> None:
        for instruction in instructions:
            match instruction:
                case WriteTokens():
                    if payload is not None and not self._write(entry, writer, instruction, payload):
                        return
                    self._leases.keep_alive(entry.lease_id)
                case Accept():
                    entry.writer, entry.opened_at = writer, self._clock.now()
                    self._leases.keep_alive(entry.lease_id)
                    credit = Credit(instruction.window_bytes).encode()
                    self._reply(writer, FrameKind.ACCEPTED, entry.lease_id, entry.epoch, credit)
                case GrantCredit():
                    credit = Credit(instruction.num_bytes).encode()
                    self._reply(writer, FrameKind.CREDIT, entry.lease_id, entry.epoch, credit)
                case CommitHandoff():
                    self._commit(entry, writer, instruction.commit)
                case Reject():
                    self._reject(writer, entry.lease_id, entry.epoch, instruction.error)
                case ReportFailure():
                    self._call(self._on_failed, entry.lease_id, entry.epoch, instruction.error)
                case _:
                    assert_never(instruction)

    def _write(self, entry: _Import, writer: Writer, write: WriteTokens, payload: memoryview | DeviceBytes) -> bool:
        layer_bytes = write.blocks.num_blocks * write.source.block_bytes
        try:
            for index, layer in enumerate(write.blocks.layers):
                part = part_of(payload, index * layer_bytes, (index + 1) * layer_bytes)
                write_layer(self._sink, layer, entry.block_ids, entry.start_token, write, part)
        except Exception as error:
            # The sink is another component (a device may be behind it): its failure ends this attempt, not the loop.
            _log.exception("kv_transfer.write_failed", lease_id=entry.lease_id)
            failure = TransferError(f"the decode worker could not write its blocks: {type(error).__name__}")
            self._execute(entry, writer, entry.attempt.handle(WriterFailed(writer.writer_id, failure)))
            return False
        return True

    def _commit(self, entry: _Import, writer: Writer, commit: Commit) -> None:
        self._leases.release(entry.lease_id)
        self._forget(entry.lease_id, ReceiverState.RELEASED)
        now = self._clock.now()
        total_ns = round((now - entry.opened_at) * 1e9)
        stats = TransferStats(commit.num_bytes, entry.attempt.num_frames, total_ns, commit.exposed_ns, writer.transport)
        try:
            self._on_commit(entry.lease_id, entry.epoch, commit.record, stats)
        except EngineError as error:
            self._reject(writer, entry.lease_id, entry.epoch, error)
            return
        except Exception:
            # A bug in the service costs this hand-off, not the others of the connection.
            _log.exception("kv_transfer.callback_failed", lease_id=entry.lease_id)
            self._reject(writer, entry.lease_id, entry.epoch, TransferError("the decode worker could not take the KV"))
            return
        self._commits[entry.lease_id, entry.epoch] = (writer.writer_id, commit.digest)
        while len(self._commits) > MAX_REMEMBERED_COMMITS:
            self._commits.popitem(last=False)
        self._reply(writer, FrameKind.COMMITTED, entry.lease_id, entry.epoch)

    def _forget(self, lease_id: LeaseId, state: ReceiverState) -> None:
        entry = self._imports.pop(lease_id)
        self._held.difference_update(entry.block_ids)
        self._end(entry, state)

    def _end(self, entry: _Import, state: ReceiverState) -> None:
        instructions = entry.attempt.handle(Ended(state))
        if entry.writer is not None:
            self._execute(entry, entry.writer, instructions)

    def _handle(self, entry: _Import, lease: Lease) -> KvHandle:
        return KvHandle(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            ticket=lease.ticket,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            start_token=entry.start_token,
            num_tokens=entry.num_tokens,
            layout_fingerprint=self._sink.layout.fingerprint,
        )

    def _reject(self, writer: Writer, lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
        self._reply(writer, FrameKind.REJECTED, lease_id, epoch, Rejection.of(error).encode())

    def _reply(self, writer: Writer, kind: FrameKind, lease_id: LeaseId, epoch: Epoch, payload: bytes = b"") -> None:
        writer.reply(seal(kind, lease_id, epoch, self._incarnation, payload))

    def _call(self, callback: FailureCallback, lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
        try:
            callback(lease_id, epoch, error)
        except Exception:
            # As above: the fence already stands, whatever the service makes of the news.
            _log.exception("kv_transfer.callback_failed", lease_id=lease_id)
