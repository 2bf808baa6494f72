"""A hand-off from exporter to importer over the in-process transport, with numpy caches on both sides."""

import asyncio

import numpy as np
import pytest

from engine.config import KvDtype
from kv_transfer.transports.inproc import InprocTransport
from kvrelay.errors import (
    ChecksumMismatch,
    CoverageIncomplete,
)
from tests.fakes_handoff import blocks, run_tiers
from tests.fakes_transport import Fault, FaultPlan, LossyTransport, tiny_layout, token_kv

pytestmark = pytest.mark.usefixtures("no_leaks")

#: Frames of the exporter before the first KV frame: HELLO, OPEN.
FIRST_KV = 2


@pytest.mark.parametrize("is_layerwise", [True, False])
@pytest.mark.parametrize(("num_tokens", "chunk"), [(1, 8), (16, 16), (50, 64), (50, 7), (64, 20)])
async def test_handoff_moves_every_token_and_the_record(is_layerwise: bool, num_tokens: int, chunk: int) -> None:
    async with run_tiers() as tiers:
        source_blocks, target_blocks = blocks(9, 3, 40, 7), blocks(20, 1, 33, 2)
        handle = tiers.importer.reserve(target_blocks, 0, num_tokens, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=is_layerwise) as export:
            tiers.compute(export, source_blocks, num_tokens, seed=1, chunk=chunk)
            stats = await export.finish(b"record")
        assert tiers.sink.wrong_tokens(target_blocks, 0, num_tokens, seed=1) == []
        assert [(commit[0], commit[1], commit[2]) for commit in tiers.commits] == [(handle.lease_id, 1, b"record")]
        layout = tiers.source.layout
        assert stats.num_bytes == layout.num_blocks(num_tokens) * layout.block_bytes * layout.num_layers
        assert tiers.commits[0][3].num_bytes == stats.num_bytes
        assert stats.transport == "inproc"
        assert tiers.failures == []
        assert len(tiers.leases) == 0


async def test_only_the_suffix_that_decode_lacks_travels() -> None:
    async with run_tiers() as tiers:
        source_blocks = blocks(0, 1, 2, 3)
        cached, reserved = blocks(10, 11), blocks(12, 13)
        before = tiers.sink.bytes.copy()
        handle = tiers.importer.reserve(reserved, 32, 60, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, source_blocks, 60, seed=3)
            stats = await export.finish(b"")
        layout = tiers.source.layout
        assert stats.num_bytes == 2 * layout.block_bytes * layout.num_layers
        assert tiers.sink.wrong_tokens(cached + reserved, 32, 60, seed=3) == []
        untouched = [block for block in range(64) if block not in reserved]
        assert np.array_equal(tiers.sink.bytes[:, untouched], before[:, untouched])


@pytest.mark.parametrize("start_token", [0, 16, 32, 48])
@pytest.mark.parametrize("num_tokens", [49, 64, 70])
@pytest.mark.parametrize(("source_size", "target_size"), [(16, 32), (32, 16), (64, 16), (8, 32)])
@pytest.mark.parametrize("source_dtype", [KvDtype.FP32, KvDtype.BF16])
async def test_block_size_and_dtype_are_converted(
    start_token: int, num_tokens: int, source_size: int, target_size: int, source_dtype: KvDtype
) -> None:
    start_token -= start_token % target_size
    source = tiny_layout(block_size=source_size, dtype=source_dtype)
    target = tiny_layout(block_size=target_size, dtype=KvDtype.BF16)
    async with run_tiers(source, target) as tiers:
        table = blocks(*range(30, 30 + target.num_blocks(num_tokens)))
        reserved = table[start_token // target_size :]
        tiers.sink.bytes[:] = 0x55
        before = tiers.sink.bytes.copy()
        handle = tiers.importer.reserve(reserved, start_token, num_tokens, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, blocks(*range(source.num_blocks(num_tokens))), num_tokens, seed=2, chunk=20)
            await export.finish(b"")
        assert tiers.sink.wrong_tokens(table, start_token, num_tokens, seed=2) == []
        untouched = [block for block in range(64) if block not in reserved]
        assert np.array_equal(tiers.sink.bytes[:, untouched], before[:, untouched])


async def test_int8_scales_travel_with_blocks_that_are_cut() -> None:
    """A cached prefix that ends inside a larger int8 source block: elements and scales of the rest are cut out."""
    source = tiny_layout(block_size=32, dtype=KvDtype.INT8)
    async with run_tiers(source, tiny_layout(block_size=8)) as tiers:
        table = blocks(*range(20, 30))
        handle = tiers.importer.reserve(table[1:], 8, 70, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, blocks(4, 9, 2), 70, seed=5)
            await export.finish(b"")
        for layer in range(source.num_layers):
            for token in range(8, 70):
                wanted = token_kv(source, 5, layer, token)
                assert np.abs(tiers.sink.get_token(layer, table, token) - wanted).max() <= 0.51
        assert not tiers.sink.bytes[:, table[0]].any()


async def test_concurrent_handoffs_over_one_connection_do_not_mix() -> None:
    async with run_tiers(window_bytes=8192) as tiers:

        async def hand_off(number: int) -> None:
            mine, theirs = blocks(number * 4, number * 4 + 1), blocks(63 - number * 4, 62 - number * 4)
            handle = tiers.importer.reserve(theirs, 0, 20 + number, f"session-{number}", 30.0)
            async with tiers.exporter.begin(handle) as export:
                await asyncio.sleep(0.001 * (number % 3))
                tiers.compute(export, mine, 20 + number, seed=number, chunk=9)
                await export.finish(bytes([number]))
            assert tiers.sink.wrong_tokens(theirs, 0, 20 + number, seed=number) == []

        await asyncio.gather(*(hand_off(number) for number in range(12)))
        assert sorted(commit[2] for commit in tiers.commits) == [bytes([number]) for number in range(12)]


async def test_commit_short_of_coverage_is_refused_and_leaves_the_lease_for_the_next_epoch() -> None:
    transport = LossyTransport(InprocTransport(), FaultPlan({FIRST_KV + 1: Fault.DROP}))
    async with run_tiers(transport=transport) as tiers:
        target = blocks(1, 2)
        handle = tiers.importer.reserve(target, 0, 20, "session", 30.0)
        with pytest.raises(CoverageIncomplete):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1, is_layerwise=True)
        assert tiers.commits == []
        assert [type(failure[2]) for failure in tiers.failures] == [CoverageIncomplete]
        successor = tiers.importer.supersede(handle.lease_id)
        assert successor.epoch == 2
        assert successor.ticket != handle.ticket
        async with tiers.exporter.begin(successor) as export:
            tiers.compute(export, blocks(5, 6), 20, seed=1)
            await export.finish(b"again")
        assert [commit[1:3] for commit in tiers.commits] == [(2, b"again")]
        assert tiers.sink.wrong_tokens(target, 0, 20, seed=1) == []


@pytest.mark.parametrize("fault", [Fault.BIT_FLIP, Fault.TRUNCATE])
@pytest.mark.parametrize("index", [0, 1, 2])
async def test_damaged_kv_is_refused(fault: Fault, index: int) -> None:
    transport = LossyTransport(InprocTransport(), FaultPlan({FIRST_KV + index: fault}))
    async with run_tiers(transport=transport) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        with pytest.raises(ChecksumMismatch):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1, is_layerwise=True)
        assert tiers.commits == []
        assert [type(failure[2]) for failure in tiers.failures] == [ChecksumMismatch]
        assert ChecksumMismatch.is_retryable


async def test_without_digests_damage_gets_through() -> None:
    """Negative control: it is the digest, and nothing else, that catches a flipped bit in the KV."""
    transport = LossyTransport(InprocTransport(), FaultPlan({FIRST_KV: Fault.BIT_FLIP}))
    async with run_tiers(transport=transport, verify_digests=False) as tiers:
        target = blocks(1, 2)
        handle = tiers.importer.reserve(target, 0, 20, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=True) as export:
            tiers.compute(export, blocks(5, 6), 20, seed=1)
            await export.finish(b"")
        assert len(tiers.sink.wrong_tokens(target, 0, 20, seed=1)) == 1


@pytest.mark.parametrize("fault", [Fault.DUPLICATE, Fault.REORDER, Fault.DELAY])
@pytest.mark.parametrize("index", [2, 3, 4])
async def test_repeated_reordered_and_late_frames_do_no_harm(fault: Fault, index: int) -> None:
    transport = LossyTransport(InprocTransport(), FaultPlan({index: fault}))
    async with run_tiers(transport=transport) as tiers:
        target = blocks(1, 2)
        handle = tiers.importer.reserve(target, 0, 20, "session", 30.0)
        export = tiers.exporter.begin(handle, is_layerwise=True)
        tiers.compute(export, blocks(5, 6), 20, seed=1)
        try:
            await export.finish(b"")
        except CoverageIncomplete:
            assert fault is Fault.REORDER  # COMMIT overtook a frame
        else:
            assert tiers.sink.wrong_tokens(target, 0, 20, seed=1) == []
            assert len(tiers.commits) == 1
