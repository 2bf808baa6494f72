"""How hand-offs end otherwise than well: expiry, fencing, release, lost peers, refusals. In one process."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from engine.types import BlockId, Incarnation, WorkerId
from engine.worker_types import TransferPeer
from kv_transfer.transports.inproc import InprocTransport
from kvrelay.errors import (
    CapacityError,
    CoverageIncomplete,
    EngineError,
    InvalidRequest,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    PeerUnavailable,
    RequestCancelled,
    StaleEpoch,
    TransferError,
)
from tests.fakes_handoff import DECODE, blocks, run_tiers, until
from tests.fakes_transport import NO_FAULTS, Fault, FaultPlan, LossyTransport, tiny_layout

pytestmark = pytest.mark.usefixtures("no_leaks")


def _is_open(importer: object) -> bool:
    table = importer._table  # type: ignore[attr-defined]  # the moment of opening shows nowhere else
    return any(entry.writer is not None for entry in table._imports.values())


async def test_a_writer_that_comes_after_expiry_changes_no_byte() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 5.0)
        export = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.source.fill(blocks(5, 6), 20, seed=1)
        export.layer_ready(0, 20, blocks(5, 6))
        await until(lambda: tiers.sink.num_writes == 1)
        tiers.clock.advance(5.0)
        before = tiers.sink.bytes.copy()
        for layer in (1, 2):  # the lease has run out, though nobody has called tick() yet
            export.layer_ready(layer, 20, blocks(5, 6))
        with pytest.raises(LeaseExpired):
            await export.finish(b"")
        assert np.array_equal(tiers.sink.bytes, before)
        assert tiers.importer.tick() == []
        # Reported once: this report is what makes the service free the blocks.
        assert [type(failure[2]) for failure in tiers.failures] == [LeaseExpired]
        with pytest.raises(LeaseExpired):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1)
        assert np.array_equal(tiers.sink.bytes, before)
        assert tiers.commits == []


async def test_expiry_tells_the_sender_and_then_the_service() -> None:
    async with run_tiers() as tiers:
        told: list[EngineError] = []
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 5.0)
        export = tiers.exporter.begin(handle, on_failed=told.append)
        await until(lambda: tiers.clock.now() > 0 and _is_open(tiers.importer))
        tiers.clock.advance(4.9)
        assert tiers.importer.tick() == []
        tiers.clock.advance(0.2)
        assert tiers.importer.tick() == [handle.lease_id]
        assert [(failure[0], type(failure[2])) for failure in tiers.failures] == [(handle.lease_id, LeaseExpired)]
        assert tiers.importer.num_reservations == 0
        await until(lambda: bool(told))
        assert isinstance(told[0], LeaseExpired)
        assert isinstance(export.error, LeaseExpired)


async def test_frames_keep_the_lease_alive() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 5.0)
        async with tiers.exporter.begin(handle, is_layerwise=True) as export:
            tiers.source.fill(blocks(5, 6), 20, seed=1)
            for layer in range(3):
                tiers.clock.advance(3.0)
                export.layer_ready(layer, 20, blocks(5, 6))
                await until(lambda written=layer + 1: tiers.sink.num_writes == written)  # type: ignore[misc]  # default argument binds the loop variable
                assert tiers.importer.tick() == []
            await export.finish(b"")
        assert len(tiers.commits) == 1


async def test_superseding_fences_the_attempt_under_way() -> None:
    async with run_tiers() as tiers:
        target = blocks(1, 2)
        handle = tiers.importer.reserve(target, 0, 20, "session", 30.0)
        old = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.source.fill(blocks(5, 6), 20, seed=1)
        old.layer_ready(0, 20, blocks(5, 6))
        await until(lambda: tiers.sink.num_writes == 1)
        successor = tiers.importer.supersede(handle.lease_id)
        async with tiers.exporter.begin(successor) as new:
            tiers.compute(new, blocks(7, 8), 20, seed=2)
            for layer in (1, 2):
                old.layer_ready(layer, 20, blocks(5, 6))
            await new.finish(b"new")
            with pytest.raises(StaleEpoch):
                await old.finish(b"old")
        assert [commit[1:3] for commit in tiers.commits] == [(2, b"new")]
        assert tiers.sink.wrong_tokens(target, 0, 20, seed=2) == []
        assert tiers.failures == []


async def test_release_stops_a_transfer_and_nothing_is_written_afterwards() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        export = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.source.fill(blocks(5, 6), 20, seed=1)
        export.layer_ready(0, 20, blocks(5, 6))
        await until(lambda: tiers.sink.num_writes == 1)
        assert tiers.importer.release(handle.lease_id)
        assert not tiers.importer.release(handle.lease_id)
        before = tiers.sink.bytes.copy()
        for layer in (1, 2):
            export.layer_ready(layer, 20, blocks(5, 6))
        with pytest.raises(LeaseUnknown):
            await export.finish(b"")
        assert np.array_equal(tiers.sink.bytes, before)
        assert tiers.failures == []  # whoever released it knows


async def test_ending_a_session_ends_its_reservations_only() -> None:
    async with run_tiers() as tiers:
        first = tiers.importer.reserve(blocks(1), 0, 5, "a", 30.0)
        second = tiers.importer.reserve(blocks(2), 0, 5, "b", 30.0)
        third = tiers.importer.reserve(blocks(3), 0, 5, "a", 30.0)
        assert sorted(tiers.importer.end_session("a")) == sorted([first.lease_id, third.lease_id])
        assert tiers.importer.end_session("a") == []
        with pytest.raises(LeaseUnknown):
            await tiers.hand_off(first, blocks(5), 5, seed=1)
        async with tiers.exporter.begin(second) as export:
            tiers.compute(export, blocks(5), 5, seed=1)
            await export.finish(b"")
        assert [commit[0] for commit in tiers.commits] == [second.lease_id]


@pytest.mark.parametrize("phase", ["opening", "streaming", "computed"])
async def test_leaving_an_export_early_tells_decode(phase: str) -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=True) as export:
            await until(lambda: _is_open(tiers.importer))
            if phase != "opening":
                tiers.source.fill(blocks(5, 6), 20, seed=1)
                export.layer_ready(0, 20, blocks(5, 6))
            if phase == "computed":
                tiers.compute(export, blocks(5, 6), 20, seed=1)
        assert isinstance(export.error, RequestCancelled)
        await until(lambda: bool(tiers.failures))
        assert tiers.failures[0][0] == handle.lease_id
        assert isinstance(tiers.failures[0][2], TransferError)
        reads = tiers.source.num_reads
        export.layer_ready(1, 20, blocks(5, 6))
        await asyncio.sleep(0.01)
        assert tiers.source.num_reads == reads
        assert tiers.commits == []


async def test_cancelling_finish_aborts_the_export() -> None:
    transport = LossyTransport(InprocTransport(), to_client=FaultPlan({1: Fault.STALL}))
    async with run_tiers(transport=transport) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        export = tiers.exporter.begin(handle)
        tiers.compute(export, blocks(5, 6), 20, seed=1)
        finishing = asyncio.ensure_future(export.finish(b""))
        await until(lambda: _is_open(tiers.importer))
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
        await until(lambda: bool(tiers.failures))
        assert isinstance(export.error, RequestCancelled)


async def test_a_silent_decode_worker_is_an_error_in_time() -> None:
    transport = LossyTransport(InprocTransport(), to_client=FaultPlan({1: Fault.STALL}))
    async with run_tiers(transport=transport, commit_timeout_s=0.05) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, blocks(5, 6), 20, seed=1)
            with pytest.raises(PeerUnavailable, match="no commit within"):
                await export.finish(b"")


@pytest.mark.parametrize("index", [1, 2, 3, 4, 5])
async def test_a_lost_connection_fails_the_attempt_on_both_sides_and_the_next_one_works(index: int) -> None:
    transport = LossyTransport(InprocTransport(), FaultPlan({index: Fault.CUT}))
    async with run_tiers(transport=transport) as tiers:
        target = blocks(1, 2)
        handle = tiers.importer.reserve(target, 0, 20, "session", 30.0)
        with pytest.raises(PeerUnavailable):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1, is_layerwise=True)
        if index > 1:  # before OPEN arrived there is no attempt to fail
            await until(lambda: bool(tiers.failures))
            assert isinstance(tiers.failures[0][2], PeerUnavailable)
        transport.to_listener = NO_FAULTS
        successor = tiers.importer.supersede(handle.lease_id)
        async with tiers.exporter.begin(successor) as export:
            tiers.compute(export, blocks(5, 6), 20, seed=1)
            await export.finish(b"")
        assert tiers.sink.wrong_tokens(target, 0, 20, seed=1) == []


async def test_a_restarted_or_unknown_decode_worker_is_refused_at_once() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        with pytest.raises(PeerUnavailable, match="restarted"):
            tiers.exporter.begin(replace(handle, incarnation=Incarnation(78)))
        with pytest.raises(PeerUnavailable, match="not known"):
            tiers.exporter.begin(replace(handle, worker_id=WorkerId("decode-9")))
        with pytest.raises(LayoutMismatch):
            tiers.exporter.begin(replace(handle, layout_fingerprint="0" * 16))


async def test_a_peer_that_vanishes_from_the_registry_fails_its_exports() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        export = tiers.exporter.begin(handle)
        await until(lambda: _is_open(tiers.importer))
        tiers.exporter.update_peers([])
        await until(lambda: export.error is not None)
        with pytest.raises(PeerUnavailable):
            await export.finish(b"")
        with pytest.raises(PeerUnavailable):
            tiers.exporter.begin(handle)


async def test_a_restarted_peer_behind_the_same_address_is_noticed() -> None:
    async with run_tiers() as tiers:
        restarted = replace(tiers.peer, incarnation=Incarnation(78))
        tiers.exporter.update_peers([restarted])
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        async with tiers.exporter.begin(replace(handle, incarnation=Incarnation(78))) as export:
            with pytest.raises(PeerUnavailable):
                await export.finish(b"")


@pytest.mark.parametrize(
    "other",
    [
        tiny_layout(num_layers=4),
        tiny_layout(num_kv_heads=1),
        tiny_layout(head_dim=8),
        tiny_layout(model_fingerprint="another"),
    ],
)
async def test_workers_with_other_geometry_are_refused_with_the_reason(other: object) -> None:
    assert isinstance(other, type(tiny_layout()))
    async with run_tiers(other) as tiers:
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        with pytest.raises(LayoutMismatch, match="differs"):
            tiers.exporter.begin(handle)
        # An exporter that believes otherwise is refused by decode itself.
        lie = TransferPeer(DECODE, tiers.peer.incarnation, tiers.peer.addresses, other)
        tiers.exporter.update_peers([lie])
        async with tiers.exporter.begin(replace(handle, layout_fingerprint=other.fingerprint)) as export:
            with pytest.raises(LayoutMismatch, match="differs"):
                await export.finish(b"")
        assert tiers.sink.num_writes == 0


async def test_a_wrong_ticket_opens_nothing_and_a_ticket_works_once() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        forged = replace(handle, ticket=bytes(16))
        with pytest.raises(LeaseUnknown):
            await tiers.hand_off(forged, blocks(5), 5, seed=1)
        assert tiers.sink.num_writes == 0
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, blocks(5), 5, seed=1)
            await export.finish(b"")
        with pytest.raises(LeaseUnknown):
            await tiers.hand_off(handle, blocks(5), 5, seed=1)
        assert len(tiers.commits) == 1


async def test_finish_before_every_layer_is_ready_is_refused() -> None:
    async with run_tiers() as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.source.fill(blocks(5, 6), 20, seed=1)
            export.layer_ready(0, 20, blocks(5, 6))
            export.layer_ready(1, 19, blocks(5, 6))
            await until(lambda: _is_open(tiers.importer))
            with pytest.raises(CoverageIncomplete):
                await export.finish(b"")
        await until(lambda: bool(tiers.failures))
        assert tiers.commits == []


async def test_partial_blocks_wait_until_they_are_final() -> None:
    """With 20 of 40 tokens computed only the first block is final; the second is read once it is full."""
    async with run_tiers() as tiers:
        target = blocks(1, 2, 3)
        handle = tiers.importer.reserve(target, 0, 40, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=True) as export:
            mine = blocks(5, 6, 7)
            tiers.source.fill(mine, 20, seed=1)
            for layer in range(3):
                export.layer_ready(layer, 20, mine[:2])
            await until(lambda: tiers.sink.num_writes == 3)
            await asyncio.sleep(0.01)
            assert tiers.sink.num_writes == 3
            tiers.compute(export, mine, 40, seed=1)
            await export.finish(b"")
        assert tiers.sink.wrong_tokens(target, 0, 40, seed=1) == []


async def test_a_commit_that_the_service_refuses_is_an_error_for_the_sender() -> None:
    async with run_tiers() as tiers:

        def refuse(*_: object) -> None:
            raise CapacityError("no room for the sequence")

        tiers.importer._table._on_commit = refuse
        handle = tiers.importer.reserve(blocks(1), 0, 5, "session", 30.0)
        with pytest.raises(CapacityError):
            await tiers.hand_off(handle, blocks(5), 5, seed=1)
        assert tiers.importer.num_reservations == 0


async def test_a_sink_or_source_that_fails_ends_one_handoff_only() -> None:
    async with run_tiers() as tiers:
        bad = tiers.importer.reserve([BlockId(1000)], 0, 5, "session", 30.0)  # outside the sink's cache
        good = tiers.importer.reserve(blocks(2), 0, 5, "session", 30.0)
        with pytest.raises(TransferError, match="could not write"):
            await tiers.hand_off(bad, blocks(5), 5, seed=1)
        async with tiers.exporter.begin(good) as export:
            tiers.compute(export, blocks(5), 5, seed=1)
            await export.finish(b"")
        unreadable = tiers.importer.reserve(blocks(3), 0, 5, "session", 30.0)
        async with tiers.exporter.begin(unreadable) as export:
            for layer in range(3):
                export.layer_ready(layer, 5, [BlockId(1000)])
            with pytest.raises(TransferError, match="reading or sending blocks failed: IndexError"):
                await export.finish(b"")
        assert [commit[0] for commit in tiers.commits] == [good.lease_id]


async def test_reservations_are_checked() -> None:
    async with run_tiers() as tiers:
        tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        for block_ids, start, end in [
            (blocks(3), 0, 20),  # too few
            (blocks(3, 3), 0, 20),  # one twice
            (blocks(2, 3), 0, 20),  # one already reserved
            (blocks(3, 4), 8, 20),  # not at a block's start
            (blocks(3, 4), 32, 32),  # nothing to send
        ]:
            with pytest.raises(InvalidRequest):
                tiers.importer.reserve(block_ids, start, end, "session", 30.0)
        assert tiers.importer.num_reservations == 1
