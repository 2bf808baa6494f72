"""The sending state machine: events in, instructions out."""

import pytest

from kv_transfer.blocks import BlockRange
from kv_transfer.handoff.sender import (
    AbortRequested,
    Accepted,
    Acknowledged,
    CreditGranted,
    Failed,
    Finished,
    FinishRequested,
    KvSent,
    LayerReady,
    SendAbort,
    SendCommit,
    SenderHandoff,
    SenderInstruction,
    SenderState,
    SendKv,
)
from kvrelay.errors import CoverageIncomplete, LayoutMismatch, PeerUnavailable, RequestCancelled, TransferError
from tests.fakes_transport import tiny_layout

LAYOUT = tiny_layout(num_layers=3)
BLOCK = LAYOUT.block_bytes


def machine(
    *,
    start: int = 0,
    end: int = 40,
    layerwise: bool = True,
    at_least: int = 0,
    frame: int = 100 * BLOCK,
    window: int | None = 1000 * BLOCK,
) -> SenderHandoff:
    handoff = SenderHandoff(LAYOUT, start, end, min_frame_bytes=at_least if layerwise else None)
    if window is not None:
        assert handoff.handle(Accepted(window, frame)) == []
    return handoff


def drain(handoff: SenderHandoff, instructions: list[SenderInstruction]) -> list[SenderInstruction]:
    """Carry out every `SendKv` as it comes and return all instructions."""
    seen = []
    todo = list(instructions)
    while todo:
        instruction = todo.pop(0)
        seen.append(instruction)
        if isinstance(instruction, SendKv):
            blocks = instruction.blocks
            todo += handoff.handle(KvSent(blocks, blocks.num_cells * BLOCK, 7))
    return seen


def kv(first_block: int, num_blocks: int, layer: int, num_layers: int = 1) -> SendKv:
    return SendKv(BlockRange(first_block, num_blocks, layer, num_layers))


def test_layers_leave_as_they_become_ready() -> None:
    handoff = machine()
    sent: list[SenderInstruction] = []
    for layer in range(3):
        sent += drain(handoff, handoff.handle(LayerReady(layer, 40)))
    assert sent == [kv(0, 3, 0), kv(0, 3, 1), kv(0, 3, 2)]
    (last,) = handoff.handle(FinishRequested(b"record"))
    assert isinstance(last, SendCommit)
    assert (last.num_bytes, last.num_frames, last.record) == (9 * BLOCK, 3, b"record")
    states = [handoff.state]
    assert handoff.handle(Acknowledged()) == [Finished(None)]
    states.append(handoff.state)
    assert states == [SenderState.COMMITTING, SenderState.DONE]


def test_one_frame_set_waits_for_the_last_layer() -> None:
    handoff = machine(layerwise=False)
    assert handoff.handle(LayerReady(0, 40)) == []
    assert handoff.handle(LayerReady(1, 40)) == []
    assert drain(handoff, handoff.handle(LayerReady(2, 40))) == [kv(0, 3, 0, 3)]


def test_layers_that_pile_up_go_together() -> None:
    """While one frame is on its way the next layers become ready: they share a frame."""
    handoff = machine()
    first = handoff.handle(LayerReady(0, 40))
    assert first == [kv(0, 3, 0)]
    assert handoff.handle(LayerReady(1, 40)) == []
    assert handoff.handle(LayerReady(2, 40)) == []
    assert handoff.handle(KvSent(BlockRange(0, 3, 0, 1), 3 * BLOCK, 7)) == [kv(0, 3, 1, 2)]


def test_only_full_blocks_leave_before_the_end() -> None:
    handoff = machine(end=40)
    assert handoff.handle(LayerReady(0, 15)) == []
    assert drain(handoff, handoff.handle(LayerReady(0, 33))) == [kv(0, 2, 0)]
    assert drain(handoff, handoff.handle(LayerReady(0, 39))) == []
    assert drain(handoff, handoff.handle(LayerReady(0, 40))) == [kv(2, 1, 0)]


def test_only_blocks_from_the_start_token_leave() -> None:
    handoff = machine(start=32, end=64)
    assert handoff.handle(LayerReady(0, 32)) == []
    assert drain(handoff, handoff.handle(LayerReady(0, 64))) == [kv(2, 2, 0)]


def test_frames_keep_to_the_transports_size() -> None:
    handoff = machine(frame=2 * BLOCK, end=80)
    assert drain(handoff, handoff.handle(LayerReady(0, 80))) == [kv(0, 2, 0), kv(2, 2, 0), kv(4, 1, 0)]
    tiny = machine(frame=1, end=32)
    assert drain(tiny, tiny.handle(LayerReady(0, 32))) == [kv(0, 1, 0), kv(1, 1, 0)]


def test_layers_wait_for_company_until_they_make_a_frame() -> None:
    handoff = machine(at_least=5 * BLOCK)
    assert handoff.handle(LayerReady(0, 40)) == []
    assert drain(handoff, handoff.handle(LayerReady(1, 40))) == [kv(0, 3, 0, 2)]
    assert drain(handoff, handoff.handle(LayerReady(2, 40))) == [kv(0, 3, 2)]  # the last ones wait for nobody


def test_a_frame_that_cannot_grow_waits_for_nothing() -> None:
    handoff = machine(at_least=100 * BLOCK, frame=4 * BLOCK)
    assert drain(handoff, handoff.handle(LayerReady(0, 40))) == [kv(0, 3, 0)]


def test_what_a_chunk_leaves_over_goes_with_the_next_chunk() -> None:
    handoff = machine(at_least=4 * BLOCK, end=64)
    assert handoff.handle(LayerReady(0, 32)) == []
    assert drain(handoff, handoff.handle(LayerReady(1, 32))) == [kv(0, 2, 0, 2)]
    assert handoff.handle(LayerReady(2, 32)) == []
    assert handoff.handle(LayerReady(0, 64)) == []
    assert drain(handoff, handoff.handle(LayerReady(1, 64))) == [kv(2, 2, 0, 2)]
    assert drain(handoff, handoff.handle(LayerReady(2, 64))) == [kv(0, 4, 2)]


def test_nothing_leaves_beyond_credit() -> None:
    handoff = machine(window=4 * BLOCK, end=64)
    assert drain(handoff, handoff.handle(LayerReady(0, 64))) == [kv(0, 2, 0), kv(2, 2, 0)]
    assert drain(handoff, handoff.handle(LayerReady(1, 64))) == []
    assert drain(handoff, handoff.handle(CreditGranted(BLOCK))) == []
    assert drain(handoff, handoff.handle(CreditGranted(BLOCK))) == [kv(0, 2, 1)]


def test_a_window_that_takes_no_block_is_refused() -> None:
    handoff = SenderHandoff(LAYOUT, 0, 40, min_frame_bytes=0)
    abort, finished = handoff.handle(Accepted(BLOCK, BLOCK))
    assert isinstance(abort, SendAbort)
    assert isinstance(finished, Finished)
    assert handoff.state is SenderState.FAILED


def test_layers_ready_before_acceptance_leave_after_it() -> None:
    handoff = machine(window=None)
    for layer in range(3):
        assert handoff.handle(LayerReady(layer, 40)) == []
    assert handoff.handle(FinishRequested(b"")) == []
    everything = drain(handoff, handoff.handle(Accepted(1000 * BLOCK, 100 * BLOCK)))
    assert everything[0] == kv(0, 3, 0, 3)
    assert isinstance(everything[1], SendCommit)
    assert handoff.handle(Accepted(1000 * BLOCK, 100 * BLOCK)) == []  # again


def test_finishing_too_early_is_an_error() -> None:
    handoff = machine()
    handoff.handle(LayerReady(0, 40))
    abort, finished = handoff.handle(FinishRequested(b""))
    assert isinstance(abort, SendAbort)
    assert isinstance(finished, Finished)
    assert isinstance(finished.error, CoverageIncomplete)


def test_a_failed_handoff_sends_nothing_more() -> None:
    for event in (Failed(PeerUnavailable("lost")), AbortRequested(RequestCancelled("left"))):
        handoff = machine()
        handoff.handle(LayerReady(0, 40))
        ended = handoff.handle(event)
        assert ended[-1] == Finished(event.error)
        assert isinstance(ended[0], SendAbort) is isinstance(event, AbortRequested)
        for late in (
            KvSent(BlockRange(0, 3, 0, 1), 3 * BLOCK, 7),
            LayerReady(1, 40),
            CreditGranted(BLOCK),
            Acknowledged(),
            FinishRequested(b""),
            event,
        ):
            assert handoff.handle(late) == []
        assert handoff.state is SenderState.FAILED


def test_an_acknowledgement_before_the_commit_is_an_error() -> None:
    handoff = machine()
    (finished,) = handoff.handle(Acknowledged())
    assert isinstance(finished, Finished)
    assert isinstance(finished.error, TransferError)


def test_misuse_is_noticed() -> None:
    handoff = machine()
    with pytest.raises(LayoutMismatch):
        handoff.handle(LayerReady(3, 40))
    with pytest.raises(LayoutMismatch):
        handoff.handle(LayerReady(-1, 40))
    with pytest.raises(TransferError):
        handoff.handle(KvSent(BlockRange(0, 1, 0, 1), BLOCK, 7))
