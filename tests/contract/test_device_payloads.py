"""Payloads that stay in device memory over UCX. Host memory stands for the device's: what UCX is given is the same."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.model.device_bytes import TensorBytes, TensorMemory
from engine.types import BlockId, Epoch, Incarnation, LeaseId
from kv_transfer.device import DeviceBytes
from kv_transfer.frame import Frame, FrameError, FrameKind, seal, verify
from kv_transfer.transports.port import Connection, Transport
from kv_transfer.transports.ucx.transport import UcxTransport
from kvrelay.errors import ChecksumMismatch, EngineError
from tests.fakes_handoff import Tiers, blocks, run_tiers
from tests.fakes_transport import ArrayCache, tiny_layout
from tests.transports import Accepted, connected, kv_frame, within

CPU = torch.device("cpu")
LAYOUT = tiny_layout(num_layers=4, num_kv_heads=4, head_dim=32)
"""Blocks of 16 KiB, larger than what is sent inline."""

pytestmark = pytest.mark.usefixtures("no_leaks")


class DeviceArrayCache(ArrayCache):
    """An `ArrayCache` that says it is on a device."""

    num_device_reads = 0
    num_device_writes = 0

    def read_device_blocks(self, layer: int, block_ids: Sequence[BlockId], out: DeviceBytes) -> None:
        self.num_device_reads += 1
        self.read_blocks(layer, block_ids, cast(npt.NDArray[np.uint8], out.array).data)

    def write_device_blocks(self, layer: int, block_ids: Sequence[BlockId], payload: DeviceBytes) -> None:
        self.num_device_writes += 1
        self.write_blocks(layer, block_ids, payload.to_host())


def transport(*, has_device: bool = True) -> UcxTransport:
    return UcxTransport(device=TensorMemory(CPU, None) if has_device else None)


class TwoEnds:
    """Connects with one transport and listens with another, so that only one side may have a device."""

    scheme = "ucx"

    def __init__(self, connecting: UcxTransport, listening: UcxTransport) -> None:
        self._connecting, self._listening = connecting, listening
        self.can_reach = connecting.can_reach
        self.connect = connecting.connect
        self.listen = listening.listen


async def run_one(tiers: Tiers, num_tokens: int = 70) -> None:
    mine, theirs = blocks(1, 5, 2, 7, 9), blocks(8, 3, 4, 11, 0)
    handle = tiers.importer.reserve(theirs, 0, num_tokens, "session", 30.0)
    async with tiers.exporter.begin(handle, is_layerwise=True) as export:
        tiers.compute(export, mine, num_tokens, seed=3, chunk=40)
        await export.finish(b"record")
    assert tiers.sink.wrong_tokens(theirs, 0, num_tokens, seed=3) == []
    assert [commit[2] for commit in tiers.commits] == [b"record"]


@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("receives", [True, False])
async def test_blocks_stay_on_the_device_only_where_both_sides_have_one(sends: bool, receives: bool) -> None:
    ends = TwoEnds(transport(has_device=sends), transport(has_device=receives))
    source, sink = DeviceArrayCache(LAYOUT, 64), DeviceArrayCache(LAYOUT, 64)
    async with run_tiers(LAYOUT, LAYOUT, cast(Transport, ends), source_cache=source, sink=sink) as tiers:
        await run_one(tiers)
    on_device = sends and receives
    assert (source.num_device_reads > 0, sink.num_device_writes > 0) == (on_device, on_device)


async def test_other_layouts_are_converted_on_the_host() -> None:
    target = replace(LAYOUT, block_size=8)
    source, sink = DeviceArrayCache(LAYOUT, 64), DeviceArrayCache(target, 64)
    async with run_tiers(LAYOUT, target, transport(), source_cache=source, sink=sink) as tiers:
        theirs = blocks(*range(20, 29))
        handle = tiers.importer.reserve(theirs, 0, 70, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            tiers.compute(export, blocks(1, 5, 2, 7, 9), 70, seed=3)
            await export.finish(b"")
        assert sink.wrong_tokens(theirs, 0, 70, seed=3) == []
    assert source.num_device_reads > 0
    assert sink.num_device_writes == 0


async def test_a_cache_on_the_host_is_not_asked_for_device_memory() -> None:
    """A transport with a device over a cache without one is a mistake of the set-up, told as an error."""
    async with run_tiers(LAYOUT, LAYOUT, transport()) as tiers:
        handle = tiers.importer.reserve(blocks(1, 2), 0, 20, "session", 30.0)
        with pytest.raises(EngineError, match="needs a KV cache on a device"):
            await tiers.hand_off(handle, blocks(5, 6), 20, seed=1, is_layerwise=True)


async def filled_frame(connection: Connection, num_bytes: int, seed: int) -> Frame:
    buffer = await connection.reserve(num_bytes)
    assert buffer.device is not None
    assert len(buffer.view) == 0
    cast(npt.NDArray[np.uint8], buffer.device.array)[:] = np.random.default_rng(seed).integers(
        0, 256, num_bytes, np.uint8
    )
    return seal(
        FrameKind.KV, LeaseId(7), Epoch(1), Incarnation(3), num_layers=1, first_block=seed, num_blocks=1, buffer=buffer
    )


@pytest.mark.parametrize("num_bytes", [4097, 65_539, 3 << 20])
async def test_bytes_arrive_in_device_memory_and_are_verified(num_bytes: int) -> None:
    accepted = Accepted.new()
    async with connected(transport(), accepted) as connection:
        listener = await within(5.0, accepted.connection)
        for seed in range(3):
            await connection.send(await filled_frame(connection, num_bytes, seed))
            frame = await within(5.0, listener.recv())
            assert frame.device is not None
            assert len(frame.payload) == 0
            wanted = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
            assert bytes(frame.device.to_host()) == wanted.tobytes()
            verify(frame)
            cast(npt.NDArray[np.uint8], frame.device.array)[num_bytes // 2] ^= 1
            with pytest.raises(ChecksumMismatch):
                verify(frame)
            frame.release()
        accepted.done.set()


async def test_frames_of_the_host_go_over_the_same_connection() -> None:
    accepted = Accepted.new()
    async with connected(transport(), accepted) as connection:
        listener = await within(5.0, accepted.connection)
        for size in (10, 4096, 4097, 300_000):
            await connection.send(kv_frame(bytes([size % 251]) * size))
            frame = await within(5.0, listener.recv())
            assert frame.device is None
            assert bytes(frame.payload) == bytes([size % 251]) * size
            verify(frame)
            frame.release()
        small = await connection.reserve(100)
        assert small.device is None
        small.release()
        accepted.done.set()


async def test_lent_memory_comes_back_and_waiting_is_bounded_by_the_bytes_in_flight() -> None:
    accepted = Accepted.new()
    memory = TensorMemory(CPU, None)
    async with connected(UcxTransport(device=memory), accepted) as connection:
        listener = await within(5.0, accepted.connection)
        size = 6 << 20
        lent = [await connection.reserve(size) for _ in range(2)]
        assert connection.reserve_now(size) is None
        for buffer in lent:
            buffer.release()
        assert memory.num_bytes == 2 * size
        await connection.send(await filled_frame(connection, size, 1))
        frame = await within(5.0, listener.recv())
        frame.release()
        await asyncio.sleep(0.05)
        assert memory.num_bytes == 2 * size
        accepted.done.set()


async def test_a_frame_of_another_connections_memory_is_refused() -> None:
    accepted = Accepted.new()
    async with connected(transport(), accepted) as connection:
        listener = await within(5.0, accepted.connection)
        frame = await filled_frame(connection, 5000, 1)
        with pytest.raises(FrameError):
            await listener.send(frame)
        assert frame.buffer is not None
        frame.buffer.release()
        accepted.done.set()


@pytest.mark.parametrize("num_bytes", [4096, 4099])
def test_fingerprint_changes_with_every_byte_and_every_swap(num_bytes: int) -> None:
    memory = TensorMemory(CPU, None).take(num_bytes)
    memory.tensor.copy_(torch.randint(0, 256, (num_bytes,), generator=torch.Generator().manual_seed(0)).byte())
    before = memory.fingerprint()
    assert memory.fingerprint() == before
    seen = {before}
    for place in (0, 1, 2, 3, 77, num_bytes - 1):
        memory.tensor[place] += 1
        seen.add(memory.fingerprint())
        memory.tensor[place] -= 1
    words = memory.tensor[:8].clone()
    memory.tensor[:4], memory.tensor[4:8] = words[4:], words[:4]
    seen.add(memory.fingerprint())
    assert len(seen) == 8


def test_parts_share_memory_and_kept_memory_is_used_again() -> None:
    pool = TensorMemory(CPU, None)
    memory = pool.take(1000)
    memory.part(10, 20).tensor.fill_(7)
    assert memory.tensor[9:21].tolist()[1:11] == [7] * 10
    address = memory.tensor.data_ptr()
    memory.part(0, 10).release()  # a part gives nothing back
    assert pool.num_bytes == 0
    memory.release()
    memory.release()
    assert pool.num_bytes == 256 << 10
    again = pool.take(999)
    assert again.tensor.data_ptr() == address
    assert pool.num_bytes == 0
    assert isinstance(again, TensorBytes)
