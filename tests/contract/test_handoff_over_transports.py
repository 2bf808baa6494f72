"""Whole hand-offs over every transport: right tokens, refused damage, fenced writers, nothing left behind."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.transports.port import Transport
from kvrelay.errors import ChecksumMismatch, CoverageIncomplete, LeaseExpired, PeerUnavailable, StaleEpoch
from tests.fakes_handoff import Tiers, blocks, run_tiers, until
from tests.fakes_transport import NO_FAULTS, Fault, FaultPlan, LossyTransport, tiny_layout
from tests.transports import TRANSPORTS

#: Frames of the exporter before the first KV frame: HELLO, OPEN.
FIRST_KV = 2
#: Blocks of 16 KiB, so that frames are larger than what transports send inline.
LAYOUT = tiny_layout(num_layers=4, num_kv_heads=4, head_dim=32)

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> Transport:
    name = request.param
    assert isinstance(name, str)
    return TRANSPORTS[name]()


async def hand_off(tiers: Tiers, number: int, *, is_layerwise: bool) -> None:
    """Move a sequence of its own length and content, in chunks, and check every token."""
    num_tokens = 17 + 5 * number
    mine, theirs = blocks(*range(number * 6, number * 6 + 6)), blocks(*range(58 - number * 6, 64 - number * 6))
    handle = tiers.importer.reserve(theirs, 0, num_tokens, f"session-{number}", 30.0)
    async with tiers.exporter.begin(handle, is_layerwise=is_layerwise) as export:
        tiers.compute(export, mine, num_tokens, seed=number, chunk=20)
        await export.finish(bytes([number]))
    assert tiers.sink.wrong_tokens(theirs, 0, num_tokens, seed=number) == []


@pytest.mark.parametrize("is_layerwise", [True, False])
async def test_many_concurrent_handoffs_share_one_connection(transport: Transport, is_layerwise: bool) -> None:
    async with run_tiers(LAYOUT, LAYOUT, transport, window_bytes=1 << 17) as tiers:
        await asyncio.gather(*(hand_off(tiers, number, is_layerwise=is_layerwise) for number in range(10)))
        assert sorted(commit[2] for commit in tiers.commits) == [bytes([number]) for number in range(10)]
        assert {commit[3].transport for commit in tiers.commits} == {transport.scheme}
        assert tiers.exporter.transport_of(tiers.peer.worker_id) == transport.scheme
        assert tiers.importer.num_reservations == 0


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.DROP, Fault.CUT])
@pytest.mark.parametrize("index", [0, 1, 3])
async def test_damage_is_refused_and_the_next_epoch_brings_the_right_tokens(
    transport: Transport, fault: Fault, index: int
) -> None:
    lossy = LossyTransport(transport, FaultPlan({FIRST_KV + index: fault}))
    async with run_tiers(LAYOUT, LAYOUT, lossy) as tiers:
        target = blocks(1, 2, 3)
        handle = tiers.importer.reserve(target, 0, 40, "session", 30.0)
        error = {Fault.BIT_FLIP: ChecksumMismatch, Fault.DROP: CoverageIncomplete, Fault.CUT: PeerUnavailable}[fault]
        with pytest.raises(error):
            await tiers.hand_off(handle, blocks(5, 6, 7), 40, seed=1, is_layerwise=True)
        await until(lambda: bool(tiers.failures))
        assert tiers.commits == []
        lossy.to_listener = NO_FAULTS
        successor = tiers.importer.supersede(handle.lease_id)
        # A cut connection is made anew; the one with the damaged frame is still in use and has had its fault.
        await tiers.hand_off(successor, blocks(5, 6, 7), 40, seed=2)
        assert tiers.sink.wrong_tokens(target, 0, 40, seed=2) == []
        assert [commit[1] for commit in tiers.commits] == [2]


async def test_fenced_writers_change_no_byte(transport: Transport) -> None:
    async with run_tiers(LAYOUT, LAYOUT, transport) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 5.0)
        stale = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.source.fill(blocks(5, 6), 20, seed=1)
        stale.layer_ready(0, 20, blocks(5, 6))
        await until(lambda: tiers.sink.num_writes == 1)
        successor = tiers.importer.supersede(handle.lease_id)
        before = tiers.sink.bytes.copy()
        for layer in (1, 2, 3):
            stale.layer_ready(layer, 20, blocks(5, 6))
        with pytest.raises(StaleEpoch):
            await stale.finish(b"")
        with pytest.raises(StaleEpoch):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1)
        tiers.clock.advance(5.0)
        with pytest.raises(LeaseExpired):
            await tiers.hand_off(successor, blocks(5, 6), 20, seed=1)
        assert np.array_equal(tiers.sink.bytes, before)
        assert tiers.commits == []
        assert [type(failure[2]) for failure in tiers.failures] == [LeaseExpired]


async def test_an_exporter_that_closes_ends_its_handoffs_on_both_sides(transport: Transport) -> None:
    async with run_tiers(LAYOUT, LAYOUT, transport) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 5.0)
        export = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.source.fill(blocks(5, 6), 20, seed=1)
        export.layer_ready(0, 20, blocks(5, 6))
        await until(lambda: tiers.sink.num_writes == 1)
        await tiers.exporter.close()
        assert isinstance(export.error, PeerUnavailable)
        await until(lambda: bool(tiers.failures), 5.0)
        assert isinstance(tiers.failures[0][2], PeerUnavailable)
        with pytest.raises(PeerUnavailable):
            tiers.exporter.begin(replace(handle, epoch=handle.epoch))
