"""Hidden states that a model hands out beside its logits: right against the torch path, and row-exact natively."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.config import KvDtype, ModelConfig
from engine.model.batch import StepBatch
from engine.model.cpu.model import NativeModel
from engine.model.interface import LayerTaps, TappedModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from kvrelay.errors import InvalidRequest
from tests.oracle.mini_driver import MiniDriver
from tests.oracle.native_runs import each_way, prompt_ids, whole_prompt_batch
from tests.tiny_models import write_tiny_gguf

LAYERS = (0, 2)
MAX_ROUNDING_COST = 0.1
"""In the 2-norm, between int8 activations and fp32."""


@dataclass(frozen=True, slots=True)
class Tapped:
    """A `LanguageModel` whose logits are the taps, so that everything that compares logits compares taps."""

    model: TappedModel
    layers: tuple[int, ...] = LAYERS

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, batch: StepBatch, kv_cache: KvCache, on_layer: Callable[[int], None] | None = None) -> Tensor:
        shape = (batch.token_ids.shape[0], len(self.layers), self.config.hidden_size)
        taps = LayerTaps(self.layers, torch.full(shape, float("nan")))
        self.model.forward(batch, kv_cache, on_layer, taps)
        return taps.values.flatten(1)[batch.logit_rows]


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Callable[[str], Path]) -> Path:
    folder = tiny_folder("llama")
    return write_tiny_gguf(folder, folder.with_suffix(".tapped.gguf"), gguf.GGMLQuantizationType.Q8_0)


def native(checkpoint: Path, num_threads: int = 1) -> NativeModel:
    model = load_model(str(checkpoint), compute="native", num_threads=num_threads)
    assert isinstance(model, NativeModel)
    return model


def plain(checkpoint: Path) -> LlamaModel:
    model = load_model(str(checkpoint), compute="torch")
    assert isinstance(model, LlamaModel)
    return model


def taps_of(model: TappedModel, layers: tuple[int, ...], num_tokens: int = 90) -> Tensor:
    driver = MiniDriver(Tapped(model, layers))
    sequence = driver.add(prompt_ids(1, num_tokens))
    driver.prefill(sequence)
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_native_taps_equal_the_torch_path_up_to_rounding(layers: tuple[int, ...], checkpoint: Path) -> None:
    expected, found = taps_of(plain(checkpoint), layers), taps_of(native(checkpoint), layers)
    assert expected.shape == (90, 64 * len(layers))
    assert float((found - expected).norm() / expected.norm()) < MAX_ROUNDING_COST


def test_taps_are_the_layers_own(checkpoint: Path) -> None:
    model = plain(checkpoint)
    apart = [taps_of(model, (layer,)) for layer in (0, 1, 2)]
    assert torch.equal(taps_of(model, (0, 1, 2)), torch.cat(apart, dim=1))
    assert not torch.equal(apart[0], apart[1])
    assert not torch.equal(apart[1], apart[2])


@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.BF16], ids=str)
def test_native_taps_are_the_same_bits_however_a_token_is_computed(dtype: KvDtype, checkpoint: Path) -> None:
    prompt = prompt_ids(2, 120)
    ways = [each_way(Tapped(native(checkpoint, threads)), prompt, dtype) for threads in (1, 2)]
    expected = ways[0]["whole"]
    assert not expected.isnan().any()
    for threads, found in enumerate(ways, 1):
        for way, taps in found.items():
            assert torch.equal(taps, expected), f"{way}, {threads} threads"


@pytest.mark.parametrize("logit_rows", [(), (19,), (3, 3)], ids=str)
def test_all_rows_are_tapped_whatever_logits_are_wanted(logit_rows: tuple[int, ...], checkpoint: Path) -> None:
    for model in (native(checkpoint), plain(checkpoint)):
        driver = MiniDriver(model)
        sequence = driver.add(prompt_ids(1, 20))
        taps = LayerTaps((2,), torch.full((20, 1, 64), float("nan")))
        logits = model.forward(whole_prompt_batch(sequence, logit_rows), driver.cache, None, taps)
        assert torch.equal(logits, model.forward(whole_prompt_batch(sequence, logit_rows), driver.cache))
        assert torch.equal(taps.values.flatten(1), taps_of(model, (2,), 20))


def test_taps_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    model = native(checkpoint)
    driver = MiniDriver(model)
    batch = whole_prompt_batch(driver.add(prompt_ids(1, 20)))
    with pytest.raises(InvalidRequest) as caught:
        model.forward(batch, driver.cache, None, LayerTaps((2,), torch.zeros(19, 1, 64)))
    assert caught.value.field == "taps"
    with pytest.raises(IndexError, match="outside"):
        model.forward(batch, driver.cache, None, LayerTaps((3,), torch.zeros(20, 1, 64)))
