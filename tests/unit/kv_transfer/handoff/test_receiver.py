"""The receiving state machine: events in, instructions out."""

import pytest

from kv_transfer.blocks import BlockRange
from kv_transfer.handoff.coverage import Coverage
from kv_transfer.handoff.messages import Commit
from kv_transfer.handoff.receiver import (
    TERMINAL,
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
from tests.fakes_transport import tiny_layout

LAYOUT = tiny_layout(num_layers=2)
BLOCK = LAYOUT.block_bytes
WINDOW = 8 * BLOCK
OPENED = Opened(1, LAYOUT, 16, 40)


def machine(state: ReceiverState = ReceiverState.RESERVED) -> ReceiverHandoff:
    """A hand-off of tokens [16, 40): blocks 1 and 2 of two layers, brought into a state."""
    handoff = ReceiverHandoff(LAYOUT, 16, 40, WINDOW)
    if state is not ReceiverState.RESERVED:
        handoff.handle(OPENED)
    match state:
        case ReceiverState.RECEIVING:
            handoff.handle(kv(1, 1, 0, 1))
        case ReceiverState.COMMITTED:
            handoff.handle(kv(1, 2, 0, 2))
            handoff.handle(commit(kv(1, 2, 0, 2)))
        case ReceiverState.FAILED:
            handoff.handle(WriterFailed(1, TransferError("lost")))
        case ReceiverState.RELEASED | ReceiverState.EXPIRED | ReceiverState.SUPERSEDED:
            handoff.handle(Ended(state))
    assert handoff.state is state
    return handoff


def kv(
    first_block: int, num_blocks: int, layer: int, num_layers: int, *, digest: int = 5, intact: bool = True
) -> KvArrived:
    blocks = BlockRange(first_block, num_blocks, layer, num_layers)
    return KvArrived(1, blocks, blocks.num_cells * BLOCK, digest, intact)


def commit(*frames: KvArrived, writer_id: int = 1) -> CommitArrived:
    coverage = Coverage(2, 1, 2)
    for frame in frames:
        coverage.add(frame.blocks, frame.digest)
    num_bytes = sum(frame.payload_bytes for frame in frames)
    return CommitArrived(writer_id, Commit(num_bytes, len(frames), coverage.digest(), 0, b"record"))


def errors(instructions: list[ReceiverInstruction]) -> list[tuple[type, type[EngineError]]]:
    return [(type(i), type(i.error)) for i in instructions if isinstance(i, Reject | ReportFailure)]


def test_the_way_of_a_good_handoff() -> None:
    handoff = machine()
    assert handoff.handle(OPENED) == [Accept(WINDOW)]
    first = kv(1, 2, 0, 1)
    assert handoff.handle(first) == [WriteTokens(first.blocks, 16, 24, LAYOUT), GrantCredit(2 * BLOCK)]
    assert handoff.state is ReceiverState.RECEIVING
    second = kv(2, 1, 1, 1)
    assert handoff.handle(second) == [WriteTokens(second.blocks, 32, 8, LAYOUT)]
    third = kv(1, 1, 1, 1)
    assert handoff.handle(third)[0] == WriteTokens(third.blocks, 16, 16, LAYOUT)
    done = commit(first, second, third)
    assert handoff.handle(done) == [CommitHandoff(done.commit)]
    assert (handoff.state, handoff.num_bytes, handoff.num_frames) == (ReceiverState.COMMITTED, 4 * BLOCK, 3)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_nothing_is_written_in_a_terminal_state(state: ReceiverState) -> None:
    handoff = machine(state)
    for event in (kv(1, 1, 1, 1), kv(2, 1, 0, 1), commit(kv(1, 2, 0, 2)), OPENED, Opened(2, LAYOUT, 16, 40)):
        for instruction in handoff.handle(event):
            assert isinstance(instruction, Reject)
    assert handoff.handle(WriterFailed(1, TransferError("late"))) == []
    assert handoff.state is state


def test_a_commit_is_never_undone() -> None:
    handoff = machine(ReceiverState.COMMITTED)
    for state in (ReceiverState.RELEASED, ReceiverState.EXPIRED, ReceiverState.SUPERSEDED):
        assert handoff.handle(Ended(state)) == []
    assert handoff.state is ReceiverState.COMMITTED


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (ReceiverState.EXPIRED, LeaseExpired),
        (ReceiverState.SUPERSEDED, StaleEpoch),
        (ReceiverState.RELEASED, LeaseUnknown),
    ],
)
def test_the_writer_is_told_how_its_attempt_ended(state: ReceiverState, error: type[EngineError]) -> None:
    assert errors(machine(ReceiverState.RECEIVING).handle(Ended(state))) == [(Reject, error)]
    assert machine().handle(Ended(state)) == []
    failed = machine(ReceiverState.FAILED)
    assert failed.handle(Ended(state)) == []
    assert failed.state is state


def test_the_ticket_serves_one_writer() -> None:
    handoff = machine(ReceiverState.OPENED)
    assert handoff.handle(OPENED) == []  # the same OPEN again
    assert errors(handoff.handle(Opened(2, LAYOUT, 16, 40))) == [(Reject, StaleEpoch)]
    stranger = KvArrived(2, BlockRange(1, 1, 0, 1), BLOCK, 5, True)
    assert errors(handoff.handle(stranger)) == [(Reject, StaleEpoch)]
    assert errors(handoff.handle(commit(writer_id=2))) == [(Reject, StaleEpoch)]
    assert handoff.handle(WriterFailed(2, TransferError("not mine"))) == []
    assert handoff.state is ReceiverState.OPENED


def test_frames_before_open_are_refused() -> None:
    handoff = machine()
    assert errors(handoff.handle(kv(1, 1, 0, 1))) == [(Reject, StaleEpoch)]
    assert errors(handoff.handle(commit(kv(1, 2, 0, 2)))) == [(Reject, StaleEpoch)]
    assert handoff.state is ReceiverState.RESERVED


@pytest.mark.parametrize(("start", "end"), [(0, 40), (16, 39), (16, 41), (32, 40)])
def test_a_claim_for_other_tokens_is_refused(start: int, end: int) -> None:
    handoff = machine()
    assert errors(handoff.handle(Opened(1, LAYOUT, start, end))) == [(Reject, TransferError)]
    assert handoff.handle(OPENED) == [Accept(WINDOW)]


def test_a_claim_with_a_layout_that_cannot_be_converted_is_refused() -> None:
    assert errors(machine().handle(Opened(1, tiny_layout(num_layers=3), 16, 40))) == [(Reject, LayoutMismatch)]


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (kv(1, 1, 1, 1, intact=False), ChecksumMismatch),
        (kv(0, 1, 1, 1), TransferError),  # the cached prefix
        (kv(2, 2, 1, 1), TransferError),  # past the end
        (kv(1, 1, 1, 2), TransferError),  # past the last layer
        (kv(1, 1, 0, 1, digest=6), TransferError),  # the same place, other content
        (kv(1, 2, 0, 1), TransferError),  # overlaps
        (KvArrived(1, BlockRange(1, 1, 1, 1), BLOCK - 1, 5, True), TransferError),
        (KvArrived(1, BlockRange(1, 1, 1, 1), BLOCK * 2, 5, True), TransferError),
    ],
)
def test_a_bad_frame_fails_the_attempt_and_is_not_written(frame: KvArrived, error: type[EngineError]) -> None:
    handoff = machine(ReceiverState.RECEIVING)
    assert errors(handoff.handle(frame)) == [(Reject, error), (ReportFailure, error)]
    assert handoff.state is ReceiverState.FAILED


def test_the_same_frame_again_is_not_written_twice() -> None:
    handoff = machine(ReceiverState.RECEIVING)
    assert handoff.handle(kv(1, 1, 0, 1)) == []
    assert handoff.num_bytes == BLOCK


def test_a_writer_beyond_its_credit_fails() -> None:
    handoff = ReceiverHandoff(LAYOUT, 16, 40, 3 * BLOCK)
    handoff.handle(OPENED)
    assert errors(handoff.handle(kv(1, 2, 0, 2))) == [(Reject, TransferError), (ReportFailure, TransferError)]


def test_credit_comes_back_in_quarters_of_the_window_and_not_for_repeated_frames() -> None:
    handoff = machine(ReceiverState.OPENED)
    assert not any(isinstance(i, GrantCredit) for i in handoff.handle(kv(1, 1, 0, 1)))
    assert handoff.handle(kv(1, 1, 0, 1)) == []
    assert handoff.handle(kv(2, 1, 0, 1))[-1] == GrantCredit(2 * BLOCK)


def test_a_commit_with_a_hole_is_refused() -> None:
    handoff = machine(ReceiverState.RECEIVING)
    assert errors(handoff.handle(commit(kv(1, 2, 0, 2)))) == [
        (Reject, CoverageIncomplete),
        (ReportFailure, CoverageIncomplete),
    ]


def test_a_commit_that_names_other_frames_is_refused() -> None:
    handoff = machine(ReceiverState.OPENED)
    handoff.handle(kv(1, 2, 0, 2))
    assert errors(handoff.handle(commit(kv(1, 2, 0, 2, digest=99))))[0] == (Reject, ChecksumMismatch)


def test_a_lost_writer_is_reported_but_nobody_is_left_to_be_told() -> None:
    handoff = machine(ReceiverState.RECEIVING)
    assert errors(handoff.handle(WriterFailed(1, PeerUnavailable("gone")))) == [(ReportFailure, PeerUnavailable)]


def test_larger_source_blocks_are_cut_at_the_start_and_the_end() -> None:
    source = tiny_layout(num_layers=2, block_size=32)
    handoff = ReceiverHandoff(LAYOUT, 16, 70, 1 << 20)
    handoff.handle(Opened(1, source, 16, 70))
    whole = BlockRange(0, 3, 0, 2)
    written = handoff.handle(KvArrived(1, whole, 6 * source.block_bytes, 5, True))
    assert written == [WriteTokens(whole, 16, 54, source)]
    middle = ReceiverHandoff(LAYOUT, 16, 70, 1 << 20)
    middle.handle(Opened(1, source, 16, 70))
    one = BlockRange(1, 1, 0, 1)
    assert middle.handle(KvArrived(1, one, source.block_bytes, 5, True)) == [WriteTokens(one, 32, 32, source)]
