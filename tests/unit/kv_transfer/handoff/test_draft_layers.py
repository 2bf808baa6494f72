"""Layers of a draft head travel where both tiers have them, and only there."""

from dataclasses import replace

import numpy as np
import pytest

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.types import Incarnation, WorkerId
from kv_transfer.frame import FrameError
from kv_transfer.handoff.messages import Hello
from kvrelay.errors import LayoutMismatch
from tests.fakes_handoff import blocks, run_tiers
from tests.fakes_transport import tiny_layout, token_kv

PLAIN = tiny_layout(num_layers=3)
WITH_HEAD = replace(PLAIN, num_layers=4, num_draft_layers=1)


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("is_layerwise", [True, False])
@pytest.mark.parametrize("target_dtype", [KvDtype.FP32, KvDtype.BF16])
@pytest.mark.parametrize(
    ("source", "target", "num_shared"),
    [(WITH_HEAD, WITH_HEAD, 4), (WITH_HEAD, PLAIN, 3), (PLAIN, WITH_HEAD, 3), (PLAIN, PLAIN, 3)],
    ids=["both", "prefill", "decode", "none"],
)
async def test_shared_layers_travel(
    source: KvLayout, target: KvLayout, num_shared: int, target_dtype: KvDtype, is_layerwise: bool
) -> None:
    target = replace(target, dtype=target_dtype)
    async with run_tiers(source, target) as tiers:
        table = blocks(20, 1, 33)
        handle = tiers.importer.reserve(table, 0, 40, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=is_layerwise) as export:
            tiers.compute(export, blocks(9, 3, 40), 40, seed=1, chunk=17)
            stats = await export.finish(b"record")
        assert stats.num_bytes == 3 * source.block_bytes * num_shared
        for layer in range(target.num_layers):
            for token in range(40):
                held = tiers.sink.get_token(layer, table, token)
                wanted = token_kv(source, 1, layer, token) if layer < num_shared else np.zeros_like(held)
                assert np.array_equal(held, wanted)
        assert tiers.failures == []


def test_draft_layers_are_no_layers_of_the_model() -> None:
    PLAIN.check_convertible(WITH_HEAD)
    WITH_HEAD.check_convertible(PLAIN)
    with pytest.raises(LayoutMismatch, match="num_model_layers"):
        PLAIN.check_convertible(replace(PLAIN, num_layers=4))
    with pytest.raises(LayoutMismatch, match="num_model_layers"):
        replace(PLAIN, num_layers=4).check_convertible(WITH_HEAD)
    assert WITH_HEAD.shared_with(PLAIN) == PLAIN
    assert PLAIN.shared_with(WITH_HEAD) == PLAIN
    assert WITH_HEAD.shared_with(replace(WITH_HEAD, block_size=32)) == WITH_HEAD


def test_fingerprints_tell_draft_layers_apart() -> None:
    layouts = [PLAIN, WITH_HEAD, replace(PLAIN, num_layers=4)]
    assert len({layout.fingerprint for layout in layouts}) == 3


def test_hello_names_draft_layers_only_where_there_are_some() -> None:
    plain, with_head = (Hello(WorkerId("p"), Incarnation(1), layout) for layout in (PLAIN, WITH_HEAD))
    assert Hello.decode(memoryview(with_head.encode())) == with_head
    assert len(with_head.encode()) == len(plain.encode()) + 4
    too_many = replace(with_head, layout=replace(WITH_HEAD, num_draft_layers=4))
    with pytest.raises(FrameError, match="draft head"):
        Hello.decode(memoryview(too_many.encode()))
