"""The engine's own KV cache as block source and sink of a whole hand-off."""

import numpy as np
import pytest
import torch

from engine.config import KvDtype
from engine.model.kv_cache import KvCache
from kv_transfer.blocks import BlockSink, BlockSource
from tests.fakes_handoff import Tiers, blocks, run_tiers
from tests.fakes_transport import ArrayCache, tiny_layout, token_kv

pytestmark = pytest.mark.usefixtures("no_leaks")


def engine_cache(array: ArrayCache) -> KvCache:
    """The engine's cache with the same layout and content."""
    cache = KvCache(array.layout, array.bytes.shape[1], torch.device("cpu"))
    cache.bytes.copy_(torch.from_numpy(array.bytes))
    return cache


def use_engine_caches(tiers: Tiers) -> tuple[KvCache, KvCache]:
    """Put the engine's caches in the place of the fakes, which keep the layouts."""
    source, sink = engine_cache(tiers.source), engine_cache(tiers.sink)
    as_source: BlockSource = source
    as_sink: BlockSink = sink
    tiers.exporter._source = as_source
    tiers.importer._table._sink = as_sink
    return source, sink


@pytest.mark.parametrize("start_token", [0, 16, 32])
@pytest.mark.parametrize(("source_size", "target_size"), [(16, 16), (32, 16), (16, 32), (8, 32)])
@pytest.mark.parametrize(
    ("source_dtype", "target_dtype"),
    [
        (KvDtype.FP32, KvDtype.FP32),
        (KvDtype.FP32, KvDtype.BF16),
        (KvDtype.BF16, KvDtype.FP32),
        (KvDtype.FP32, KvDtype.INT8),
        (KvDtype.INT8, KvDtype.BF16),
    ],
)
async def test_kv_arrives_in_the_engines_cache(
    start_token: int, source_size: int, target_size: int, source_dtype: KvDtype, target_dtype: KvDtype
) -> None:
    start_token -= start_token % target_size
    source_layout = tiny_layout(block_size=source_size, dtype=source_dtype)
    target_layout = tiny_layout(block_size=target_size, dtype=target_dtype)
    num_tokens = 75
    async with run_tiers(source_layout, target_layout) as tiers:
        source_blocks = blocks(*range(source_layout.num_blocks(num_tokens)))
        table = blocks(*range(40, 40 + target_layout.num_blocks(num_tokens)))
        reserved = table[start_token // target_size :]
        tiers.source.fill(source_blocks, num_tokens, seed=4)
        _, sink = use_engine_caches(tiers)
        handle = tiers.importer.reserve(reserved, start_token, num_tokens, "session", 30.0)
        async with tiers.exporter.begin(handle) as export:
            for done in (30, num_tokens):
                for layer in range(source_layout.num_layers):
                    export.layer_ready(layer, done, source_blocks)
            await export.finish(b"")
        tiers.sink.bytes[:] = sink.bytes.numpy()
        lossy = KvDtype.INT8 in (source_dtype, target_dtype)
        for layer in range(target_layout.num_layers):
            for token in range(start_token, num_tokens):
                held = tiers.sink.get_token(layer, table, token)
                wanted = token_kv(target_layout, 4, layer, token)
                assert np.abs(held - wanted).max() <= (1.1 if lossy else 0.0)
        untouched = [block for block in range(64) if block not in reserved]
        assert not tiers.sink.bytes[:, untouched].any()
