"""Sender and receiver of hand-offs over a channel that drops, repeats, reorders and damages, against a naive model.

No event loop: the test carries every frame itself. Whatever happens, in any order:
no block is written but by the attempt that owns it at that moment; nothing commits that is not whole; nothing is held
after the end. What the receiver does with a COMMIT is predicted by a model that only keeps sets.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.types import BlockId, Epoch, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.blocks import BlockRange
from kv_transfer.frame import Frame, FrameKind
from kv_transfer.handoff.import_table import ImportTable
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.handoff.messages import Open
from kv_transfer.handoff.sender import (
    AbortRequested,
    Failed,
    FinishRequested,
    LayerReady,
    SenderHandoff,
    SenderState,
)
from kvrelay.errors import CapacityError, EngineError, LeaseExpired, LeaseUnknown, PeerUnavailable, TransferError
from tests.fakes_transport import FakeClock, Fault, damage
from tests.handoff_model import (
    INCARNATION,
    LAYOUT,
    NUM_BLOCKS,
    TTL_S,
    WINDOW_BYTES,
    Attempt,
    CheckedSink,
    Reservation,
    blocks_of,
    content,
)

PICK = st.integers(0, 1 << 16)
CHANNEL_FAULTS = [None, None, None, None, Fault.DROP, Fault.DUPLICATE, Fault.REORDER, Fault.BIT_FLIP]


class HandoffMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.leases = LeaseTable(self.clock)
        self.sink = CheckedSink(self)
        self.table = ImportTable(
            self.sink,
            self.leases,
            self.on_commit,
            self.on_failed,
            worker_id=WorkerId("decode"),
            incarnation=INCARNATION,
            clock=self.clock,
            window_bytes=WINDOW_BYTES,
        )
        self.free = set(range(NUM_BLOCKS))
        self.reservations: list[Reservation] = []
        self.sequences: list[list[BlockId]] = []
        self.attempts: list[Attempt] = []
        self.committed: list[tuple[LeaseId, Epoch]] = []
        self.writing: Attempt | None = None

    # --- what decode's service does ---------------------------------------------------------------------------------

    def owner_of(self, block: BlockId) -> Reservation | None:
        return next((r for r in self.reservations if r.is_live and block in r.block_ids), None)

    def live(self, lease_id: LeaseId) -> Reservation | None:
        return next((r for r in self.reservations if r.is_live and r.lease_id == lease_id), None)

    def drop(self, reservation: Reservation) -> None:
        reservation.is_live = False
        self.free |= set(reservation.block_ids)

    def on_commit(self, lease_id: LeaseId, epoch: Epoch, record: bytes, stats: TransferStats) -> None:
        reservation = self.live(lease_id)
        assert reservation is not None, "a commit of a reservation that has ended"
        assert self.writing is not None
        assert (lease_id, epoch) == (self.writing.handle.lease_id, self.writing.handle.epoch)
        assert epoch == reservation.epoch
        assert record == self.writing.attempt_id.to_bytes(4, "little")
        for layer in range(LAYOUT.num_layers):
            for index in range(LAYOUT.num_blocks(reservation.num_tokens)):
                held = self.sink.data[layer, reservation.block_ids[index]].tobytes()
                assert held == content(self.writing.attempt_id, layer, index), "committed KV is not what was sent"
        self.committed.append((lease_id, epoch))
        reservation.is_live = False
        self.sequences.append(reservation.block_ids)

    def on_failed(self, lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
        reservation = self.live(lease_id)
        assert reservation is not None, "a failure of a reservation that has ended"
        assert epoch == reservation.epoch
        if isinstance(error, LeaseExpired):
            assert self.clock.now() >= reservation.expires_at
            self.drop(reservation)

    @rule(num_tokens=st.integers(1, 30), session=st.sampled_from(["a", "b"]), spare=st.integers(0, 1))
    def reserve(self, num_tokens: int, session: str, spare: int) -> None:
        needed = LAYOUT.num_blocks(num_tokens) + spare
        if needed > len(self.free):
            return
        block_ids = [BlockId(block) for block in sorted(self.free)[:needed]]
        self.free -= set(block_ids)
        handle = self.table.reserve(block_ids, 0, num_tokens, session, TTL_S)
        expires_at = self.clock.now() + TTL_S
        reservation = Reservation(handle.lease_id, session, block_ids, num_tokens, expires_at)
        self.reservations.append(reservation)
        self.begin(reservation, handle)

    def begin(self, reservation: Reservation, handle: KvHandle) -> None:
        attempt_id = len(self.attempts) + 1
        min_frame_bytes = (0, 2 * LAYOUT.block_bytes, None)[attempt_id % 3]
        sender = SenderHandoff(LAYOUT, 0, handle.num_tokens, min_frame_bytes=min_frame_bytes)
        attempt = Attempt(attempt_id, handle, sender, attempt_id, self.committed)
        self.attempts.append(attempt)
        reservation.attempts.append(attempt)
        claim = Open(handle.ticket, handle.start_token, handle.num_tokens)
        attempt.to_receiver.append(attempt.frame(FrameKind.OPEN, claim.encode()))

    @precondition(lambda self: self.reservations)
    @rule(number=PICK)
    def supersede(self, number: int) -> None:
        reservation = self.reservations[number % len(self.reservations)]
        is_valid = reservation.is_live and self.clock.now() < reservation.expires_at
        try:
            handle = self.table.supersede(reservation.lease_id)
        except (LeaseUnknown, LeaseExpired):
            assert not is_valid
            return
        assert is_valid
        reservation.epoch += 1
        reservation.expires_at = self.clock.now() + TTL_S
        assert handle.epoch == reservation.epoch
        self.begin(reservation, handle)

    @precondition(lambda self: self.reservations)
    @rule(number=PICK)
    def release(self, number: int) -> None:
        reservation = self.reservations[number % len(self.reservations)]
        assert self.table.release(reservation.lease_id) == reservation.is_live
        if reservation.is_live:
            self.drop(reservation)

    @rule(session=st.sampled_from(["a", "b"]))
    def end_session(self, session: str) -> None:
        expected = [r for r in self.reservations if r.is_live and r.session == session]
        assert set(self.table.end_session(session)) == {r.lease_id for r in expected}
        for reservation in expected:
            self.drop(reservation)

    @precondition(lambda self: self.sequences)
    @rule(number=PICK)
    def finish_sequence(self, number: int) -> None:
        self.free |= set(self.sequences.pop(number % len(self.sequences)))

    @rule(seconds=st.sampled_from([1.0, 2.0, 5.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def tick(self) -> None:
        due = {r.lease_id for r in self.reservations if r.is_live and self.clock.now() >= r.expires_at}
        assert set(self.table.tick()) == due
        assert not any(r.is_live for r in self.reservations if r.lease_id in due)

    # --- what prefill does ------------------------------------------------------------------------------------------

    def pick(self, number: int) -> Attempt:
        return self.attempts[number % len(self.attempts)]

    @precondition(lambda self: self.attempts)
    @rule(number=PICK, num_tokens=st.sampled_from([5, 8, 17, 30]))
    def compute_chunk(self, number: int, num_tokens: int) -> None:
        attempt = self.pick(number)
        for layer in range(LAYOUT.num_layers):
            attempt.take(LayerReady(layer, num_tokens))

    @precondition(lambda self: self.attempts)
    @rule(number=PICK, layer=st.integers(0, LAYOUT.num_layers - 1))
    def compute_layer(self, number: int, layer: int) -> None:
        attempt = self.pick(number)
        attempt.take(LayerReady(layer, attempt.handle.num_tokens))

    @precondition(lambda self: self.attempts)
    @rule(number=PICK)
    def finish(self, number: int) -> None:
        attempt = self.pick(number)
        if attempt.sender.is_all_ready and attempt.sender._record is None:
            attempt.take(FinishRequested(attempt.attempt_id.to_bytes(4, "little")))

    @precondition(lambda self: self.attempts)
    @rule(number=PICK)
    def abort(self, number: int) -> None:
        attempt = self.pick(number)
        attempt.take(AbortRequested(TransferError("given up")))

    # --- what the network does --------------------------------------------------------------------------------------

    @precondition(lambda self: self.attempts)
    @rule(number=PICK, fault=st.sampled_from(CHANNEL_FAULTS), bit=PICK)
    def deliver(self, number: int, fault: Fault | None, bit: int) -> None:
        attempt = self.pick(number)
        if attempt.to_receiver and not attempt.is_cut:
            self.pass_on(attempt, fault, bit)

    def pass_on(self, attempt: Attempt, fault: Fault | None, bit: int) -> None:
        queue = attempt.to_receiver
        frame = queue.pop(0)
        if fault is Fault.DROP:
            return
        if fault is Fault.REORDER:
            queue.insert(1, frame)
            return
        if fault is Fault.BIT_FLIP:
            frame = damage(frame, fault, bit)
        if fault is Fault.DUPLICATE:
            queue.insert(0, Frame(frame.header, frame.payload))
        self.arrive(attempt, frame, is_intact=fault is not Fault.BIT_FLIP)

    @precondition(lambda self: self.attempts)
    @rule(number=PICK)
    def deliver_everything(self, number: int) -> None:
        """A good moment of the network: everything passes in both directions until nothing moves."""
        self.settle(self.pick(number), {}, 0)

    def settle(self, attempt: Attempt, faults: dict[int, Fault], bit: int) -> None:
        for index in range(1000):
            if attempt.is_cut or not (attempt.to_receiver or attempt.to_sender):
                break
            if attempt.to_receiver:
                self.pass_on(attempt, faults.get(index), bit)
            if attempt.to_sender:
                attempt.answer(attempt.to_sender.pop(0))

    @precondition(lambda self: self.attempts)
    @rule(
        back=st.integers(0, 2),
        index=st.integers(0, 8),
        fault=st.sampled_from([None, Fault.BIT_FLIP, Fault.DROP, Fault.DUPLICATE, Fault.REORDER]),
        bit=PICK,
    )
    def run_to_the_end(self, back: int, index: int, fault: Fault | None, bit: int) -> None:
        """Compute and deliver all that one of the newest attempts still lacks, with one fault on the way."""
        attempt = self.attempts[-1 - min(back, len(self.attempts) - 1)]
        for num_tokens in (12, 30):
            for layer in range(LAYOUT.num_layers):
                attempt.take(LayerReady(layer, num_tokens))
        if attempt.sender._record is None:
            attempt.take(FinishRequested(attempt.attempt_id.to_bytes(4, "little")))
        self.settle(attempt, {} if fault is None else {index: fault}, bit)

    def arrive(self, attempt: Attempt, frame: Frame, *, is_intact: bool) -> None:
        """Hand a frame to the receiver and compare what it does with the model."""
        reservation = self.live(attempt.handle.lease_id)
        in_time = reservation is not None and self.clock.now() < reservation.expires_at
        is_current = in_time and reservation is not None and reservation.epoch == attempt.handle.epoch
        expects_commit = False
        if is_current and reservation is not None:
            expects_commit = self.model_frame(attempt, reservation, frame, is_intact=is_intact)
        before = len(self.committed)
        self.writing = attempt
        try:
            self.table.handle_frame(attempt, frame)
        finally:
            self.writing = None
        assert len(self.committed) - before == int(expects_commit), "the receiver and the model disagree on a commit"

    def model_frame(self, attempt: Attempt, reservation: Reservation, frame: Frame, *, is_intact: bool) -> bool:
        kind = frame.header.kind
        is_good = attempt.is_open and not attempt.is_spoilt
        if kind is FrameKind.OPEN:
            if is_intact and not attempt.is_open:
                attempt.is_open = True
                reservation.expires_at = self.clock.now() + TTL_S
            elif not is_intact and attempt.is_open:
                attempt.is_spoilt = True
            return False
        if not attempt.is_open:
            return False
        if not is_intact or kind is FrameKind.ABORT:
            attempt.is_spoilt = True
            return False
        if kind is FrameKind.KV:
            header = frame.header
            blocks = BlockRange(header.first_block, header.num_blocks, header.layer_start, header.num_layers)
            cells = {(layer, block) for layer in blocks.layers for block in blocks_of(blocks)}
            if is_good and not cells <= attempt.arrived:
                attempt.arrived |= cells
                reservation.expires_at = self.clock.now() + TTL_S
            return False
        is_whole = len(attempt.arrived) == LAYOUT.num_layers * LAYOUT.num_blocks(reservation.num_tokens)
        if not is_whole:
            attempt.is_spoilt = True
        return is_good and is_whole

    @precondition(lambda self: self.attempts)
    @rule(number=PICK, fault=st.sampled_from([None, None, None, Fault.DROP, Fault.DUPLICATE]))
    def deliver_reply(self, number: int, fault: Fault | None) -> None:
        attempt = self.pick(number)
        if not attempt.to_sender:
            return
        frame = attempt.to_sender.pop(0)
        if fault is Fault.DROP:
            return
        # A repeated credit would be a lie about the receiver's room; transports do not repeat, so it is not modelled.
        if fault is Fault.DUPLICATE and frame.header.kind is not FrameKind.CREDIT:
            attempt.to_sender.insert(0, frame)
        attempt.answer(frame)

    @precondition(lambda self: self.attempts)
    @rule(number=PICK)
    def cut(self, number: int) -> None:
        attempt = self.pick(number)
        if attempt.is_cut:
            return
        attempt.is_cut = True
        attempt.to_receiver.clear()
        attempt.to_sender.clear()
        if attempt.is_open:
            attempt.is_spoilt = True
        lost = PeerUnavailable("cut")
        self.table.writer_lost(attempt, lost)
        attempt.take(Failed(lost))

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def every_block_has_one_holder(self) -> None:
        self.table.check_invariants()
        held = [block for r in self.reservations if r.is_live for block in r.block_ids]
        running = [block for blocks in self.sequences for block in blocks]
        assert sorted([*self.free, *held, *running]) == list(range(NUM_BLOCKS))
        assert len(self.table) == sum(r.is_live for r in self.reservations)

    @invariant()
    def nothing_commits_twice(self) -> None:
        assert len(self.committed) == len({lease_id for lease_id, _ in self.committed})

    @invariant()
    def senders_agree_with_their_verdicts(self) -> None:
        for attempt in self.attempts:
            assert len(attempt.verdict) == (attempt.sender.state in (SenderState.DONE, SenderState.FAILED))

    def teardown(self) -> None:
        """After the last lease has run out nothing is held, and no frame still under way changes a byte."""
        self.clock.advance(TTL_S)
        before = self.sink.data.copy()
        for attempt in self.attempts:
            for frame in attempt.to_receiver:
                self.arrive(attempt, frame, is_intact=True)
        self.table.tick()
        assert len(self.table) == len(self.leases) == 0
        assert np.array_equal(self.sink.data, before)
        self.every_block_has_one_holder()


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_the_machine_reaches_commits() -> None:
    """Positive control: with a good network the same machinery commits."""
    machine = HandoffMachine()
    machine.reserve(20, "a", 1)
    machine.deliver_everything(0)
    machine.compute_chunk(0, 17)
    machine.compute_chunk(0, 30)
    machine.finish(0)
    machine.deliver_everything(0)
    assert len(machine.committed) == 1
    assert machine.attempts[0].verdict == [None]
    machine.teardown()


def test_a_service_without_room_refuses_the_commit() -> None:
    machine = HandoffMachine()

    def refuse(lease_id: LeaseId, epoch: Epoch, record: bytes, stats: TransferStats) -> None:
        raise CapacityError("no room")

    machine.table._on_commit = refuse
    machine.reserve(5, "a", 0)
    machine.deliver_everything(0)
    machine.compute_chunk(0, 30)
    machine.finish(0)
    attempt = machine.attempts[0]
    machine.writing = attempt
    for frame in attempt.to_receiver:
        machine.table.handle_frame(attempt, frame)
    attempt.answer(attempt.to_sender[-1])
    assert [type(error) for error in attempt.verdict] == [CapacityError]
    assert len(machine.leases) == 0
