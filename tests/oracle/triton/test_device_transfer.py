"""Blocks from one device cache to another through UCX. Under the interpreter host memory stands for the device's."""

from dataclasses import replace

import pytest
import torch

from engine.config import KvDtype
from engine.model.kv_cache import KvCache
from kvrelay.errors import LayoutMismatch
from tests.oracle.triton.device_checks import LAYOUT, check_transfer, random_cache

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [KvDtype.FP16, KvDtype.INT8, KvDtype.FP8])
async def test_blocks_cross_ucx_in_device_memory(dtype: KvDtype, no_leaks: None) -> None:
    await check_transfer(CPU, dtype)


def test_device_blocks_are_those_that_the_host_reads() -> None:
    layout = replace(LAYOUT, dtype=KvDtype.FP8)
    cache = random_cache(layout, 9, CPU, seed=3)
    ids = [4, 0, 8]
    memory = cache.device_memory.take(len(ids) * layout.block_bytes)
    cache.read_device_blocks(1, ids, memory)
    buffer = bytearray(len(memory))
    cache.read_blocks(1, ids, memoryview(buffer))
    assert bytes(memory.to_host()) == bytes(buffer)
    cache.write_device_blocks(0, [1, 2, 3], memory)
    assert torch.equal(cache.bytes[0, [1, 2, 3]], cache.bytes[1, ids])


def test_other_sizes_and_blocks_outside_are_refused() -> None:
    cache = random_cache(LAYOUT, 4, CPU, seed=4)
    memory = cache.device_memory.take(LAYOUT.block_bytes)
    with pytest.raises(LayoutMismatch):
        cache.read_device_blocks(0, [1, 2], memory)
    with pytest.raises(LayoutMismatch):
        cache.write_device_blocks(0, [], memory)
    for layer, block in ((2, 0), (0, 4), (0, -1)):
        with pytest.raises(IndexError):
            cache.read_device_blocks(layer, [block], memory)
    assert KvCache(LAYOUT, 1, CPU).device_memory is None
