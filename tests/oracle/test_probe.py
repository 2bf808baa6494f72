"""The probe at start-up: quick, bounded, and harmless to the cache's later owners."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.batch import SequenceRows, build_batch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.spec.pace.cost import ASSUMED_SHAPE, FLAT_SHAPE, CostShape
from engine.spec.pace.probe import probe_shape
from engine.types import BlockId
from tests.oracle.mini_driver import MiniDriver

FolderOf = Callable[[str], Path]


def _cache(model: LanguageModel, num_blocks: int) -> KvCache:
    config = model.config
    layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, 16, KvDtype.FP32)
    return KvCache(layout, num_blocks, torch.device("cpu"))


def test_shape_never_falls_with_rows(tiny_folder: FolderOf) -> None:
    model = load_model(str(tiny_folder("llama")))
    shape = probe_shape(model, _cache(model, 64), budget_s=30.0)
    assert shape is not ASSUMED_SHAPE
    times = [shape.base(rows) for rows in range(1, 17)]
    assert times == sorted(times)
    assert times[0] > 0
    assert shape.context_token >= 0
    assert shape.extra_pair >= 0


def test_budget_that_ends_early_leaves_the_assumption(tiny_folder: FolderOf) -> None:
    model = load_model(str(tiny_folder("llama")))
    ticks = itertools.count()
    assert probe_shape(model, _cache(model, 64), budget_s=4.0, clock=lambda: float(next(ticks))) is ASSUMED_SHAPE
    enough = probe_shape(model, _cache(model, 64), budget_s=60.0, clock=lambda: float(next(ticks)))
    assert isinstance(enough, CostShape)
    assert enough.base(1) == enough.base(16)


def test_cache_that_holds_next_to_nothing_is_not_probed(tiny_folder: FolderOf) -> None:
    model = load_model(str(tiny_folder("llama")))
    assert probe_shape(model, _cache(model, 1)) is ASSUMED_SHAPE
    assert probe_shape(model, _cache(model, 2), budget_s=30.0) is not ASSUMED_SHAPE


def test_gpu_is_not_probed(tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(tiny_folder("llama")))
    monkeypatch.setattr(type(model), "device", property(lambda _self: torch.device("cuda")))
    assert probe_shape(model, _cache(model, 4)) is FLAT_SHAPE


def test_rows_of_several_sequences_are_those_of_the_driver(tiny_folder: FolderOf) -> None:
    model = load_model(str(tiny_folder("llama")))
    cache, block_ids = _cache(model, 16), [BlockId(index) for index in (5, 2, 9)]
    prompts = [list(range(5, 45)), list(range(50, 53))]
    first = build_batch(
        [SequenceRows(prompts[0][:30], 0, block_ids, 0), SequenceRows(prompts[1], 0, [BlockId(0)], 3)], 16
    )
    model.forward(first, cache)
    second = build_batch([SequenceRows(prompts[0][30:], 30, block_ids, 10)], 16)
    found = model.forward(second, cache)
    driver = MiniDriver(model)
    sequence = driver.add(prompts[0])
    driver.prefill(sequence, 30)
    assert torch.allclose(found, torch.stack(sequence.logits[30:]), atol=1e-5)
