"""Copies of KV between caches of any types and block sizes."""

import pytest
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.kernels import reference_quant
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.model.kv_cache import KvCache

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def filled(num_blocks: int, heads: int, block_size: int, dim: int, dtype: torch.dtype, seed: int) -> LayerCache:
    rows = torch.zeros(num_blocks, block_bytes(heads, block_size, dim, dtype), dtype=torch.uint8)
    cache = LayerCache.from_bytes(rows, heads, block_size, dim, dtype)
    values = torch.randn(*cache.elements.shape, generator=torch.Generator().manual_seed(seed)) * 3
    if cache.scales is None:
        cache.elements.copy_(values)
    else:
        elements, scales = reference_quant.quantize_rows(values, dtype)
        cache.elements.copy_(elements)
        cache.scales.copy_(scales)
    return cache


def values_of(cache: LayerCache) -> Tensor:
    return reference_quant.dequantize(cache.elements, cache.scales)


def slots(count: int, limit: int, seed: int) -> Tensor:
    return torch.randperm(limit, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("target_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("source_dtype", DTYPES, ids=str)
def test_copy_kv(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    heads, dim = 3, 24
    source = filled(5, heads, 16, dim, source_dtype, seed=1)
    found, wanted = (filled(9, heads, 8, dim, target_dtype, seed=2) for _ in range(2))
    source_slots, target_slots = slots(37, 5 * 16, 3), slots(37, 9 * 8, 4)
    copy_kv(source, source_slots, found, target_slots)
    reference_quant.copy_kv(source.elements, source.scales, source_slots, wanted.elements, wanted.scales, target_slots)
    if target_dtype is torch.bfloat16 and source_dtype is not torch.bfloat16:
        # The interpreter cuts fp32 to bf16 instead of rounding it.
        torch.testing.assert_close(values_of(found), values_of(wanted), rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(found.elements.view(torch.uint8), wanted.elements.view(torch.uint8))
        torch.testing.assert_close(found.scales, wanted.scales, rtol=0, atol=0)


def test_export_gathers_blocks_in_the_order_of_a_table() -> None:
    source = filled(6, 2, 8, 16, torch.int8, seed=1)
    table = torch.tensor([5, 0, 3])
    staging = filled(3, 2, 8, 16, torch.int8, seed=2)
    copy_kv(source, (table[:, None] * 8 + torch.arange(8)).flatten(), staging, torch.arange(24))
    assert torch.equal(staging.elements, source.elements[table])
    assert torch.equal(values_of(staging), values_of(source)[table])


def test_int8_blocks_are_those_of_the_cpu_path() -> None:
    """Exporting an fp32 cache as int8 gives the bytes that a CPU worker makes of the same tokens."""
    source = filled(2, 2, 16, 32, torch.float32, seed=1)
    fp32, int8 = (KvLayout("", 1, 2, 32, 16, dtype) for dtype in (KvDtype.FP32, KvDtype.INT8))
    found, wanted = (KvCache(int8, 2, torch.device("cpu")) for _ in range(2))
    everything = torch.arange(32)
    copy_kv(source, everything, LayerCache(found.elements[0], scales_of(found)), everything)
    payload = memoryview(source.elements.numpy().tobytes())
    wanted.write_converted(0, 0, 32, [0, 1], payload, fp32)
    assert torch.equal(found.bytes, wanted.bytes)


def scales_of(cache: KvCache) -> Tensor:
    assert cache.scales is not None
    return cache.scales[0]


def test_other_heads_are_refused() -> None:
    source, slots = filled(1, 2, 8, 16, torch.float32, 0), torch.arange(2)
    with pytest.raises(ValueError, match="2 heads do not fit 3"):
        copy_kv(source, slots, filled(1, 3, 8, 16, torch.float32, 0), slots)
    with pytest.raises(ValueError, match="heads of 16 do not fit"):
        copy_kv(source, slots, filled(1, 2, 8, 8, torch.float32, 0), slots)


def test_views_of_blocks_that_are_no_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="bytes are not one block"):
        LayerCache.from_bytes(torch.zeros(2, 100, dtype=torch.uint8), 2, 8, 16, torch.int8)
    with pytest.raises(ValueError, match="have scales"):
        LayerCache(torch.zeros(1, 2, 1, 8, 4, dtype=torch.int8), None)
    with pytest.raises(ValueError, match="strides"):
        LayerCache(torch.zeros(1, 2, 1, 4, 8).transpose(3, 4), None)
