"""The native model on tiny checkpoints of every family: right against the torch path, and row-exact to the bit."""

import random
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.kernels.cpu.build import ISA_VARIABLE, Isa
from engine.kernels.cpu.library import load_library
from engine.model.cpu.model import NativeModel
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from kvrelay.errors import InvalidRequest
from tests.oracle.mini_driver import DrivenSequence, MiniDriver, generate
from tests.oracle.native_runs import each_way, prompt_ids, whole_prompt_batch
from tests.oracle.quantized_oracle import QuantizedOracle
from tests.tiny_models import TINY_FAMILIES, write_tiny_gguf

_Q = gguf.GGMLQuantizationType
FAMILY_KINDS = {
    "llama": _Q.Q4_1,
    "llama3": _Q.Q8_0,
    "llama_linear": _Q.Q4_1,
    "llama_tied": _Q.Q4_0,
    "mistral": _Q.Q4_0,
    "qwen2": _Q.Q8_0,
    "qwen3": _Q.Q4_1,
}
"""Every family, and every kind of weight more than once."""
MAX_ROUNDING_COST = 0.1
"""Of the logits, in the 2-norm, against fp32: what 8-bit activations and weights cost a small random model."""
MAX_DIFFERENCE = 1e-5
"""Against the oracle that rounds alike."""

families = pytest.mark.parametrize("family", sorted(TINY_FAMILIES))
dtypes = pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.BF16, KvDtype.INT8], ids=str)


@pytest.fixture(scope="session")
def quantized_gguf(tiny_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """A family's tiny model with its matrices quantized."""

    @cache
    def write(family: str) -> Path:
        return write_tiny_gguf(
            tiny_folder(family), tiny_folder(family).with_suffix(".quantized.gguf"), FAMILY_KINDS[family]
        )

    return write


@pytest.fixture(scope="session")
def native(quantized_gguf: Callable[[str], Path]) -> Callable[..., LanguageModel]:
    """The native model of a family, with so many threads."""
    return cache(lambda family, num_threads=1: load_model(str(quantized_gguf(family)), num_threads=num_threads))


def logits_of(driver: MiniDriver, prompt: Sequence[int], chunk: int | None = None) -> Tensor:
    sequence = driver.add(prompt)
    driver.prefill(sequence, chunk)
    return torch.stack(sequence.logits)


# --- which model is loaded -------------------------------------------------------------------------------------------


def test_quantized_files_run_natively_and_exact_ones_in_torch(
    quantized_gguf: Callable[[str], Path], tiny_gguf: Callable[[str], Path], tiny_folder: Callable[[str], Path]
) -> None:
    assert isinstance(load_model(str(quantized_gguf("llama"))), NativeModel)
    assert isinstance(load_model(str(quantized_gguf("llama")), compute="torch"), LlamaModel)
    assert isinstance(load_model(str(tiny_gguf("llama"))), LlamaModel)
    assert isinstance(load_model(str(tiny_folder("llama"))), LlamaModel)
    assert isinstance(load_model(str(tiny_folder("llama")), compute="native"), NativeModel)


def test_native_kernels_on_another_device_are_refused(tiny_folder: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        load_model(str(tiny_folder("llama")), compute="native", device=torch.device("meta"))
    assert caught.value.field == "compute"


@pytest.mark.parametrize("compiler_path", ["", "/nowhere"])
def test_without_a_compiler_torch_takes_over(
    compiler_path: str,
    quantized_gguf: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", compiler_path)
    monkeypatch.delenv("CXX", raising=False)
    load_library.cache_clear()
    try:
        assert isinstance(load_model(str(quantized_gguf("llama"))), LlamaModel)
        assert "no C++ compiler" in capsys.readouterr().out
        with pytest.raises(InvalidRequest, match="no C\\+\\+ compiler") as caught:
            load_model(str(quantized_gguf("llama")), compute="native")
        assert caught.value.field == "compute"
    finally:
        load_library.cache_clear()


def test_progress_ends_at_the_total(quantized_gguf: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    load_model(str(quantized_gguf("qwen3")), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})


def test_fingerprint_names_weights_and_arithmetic_but_not_threads(
    quantized_gguf: Callable[[str], Path], native: Callable[..., LanguageModel]
) -> None:
    assert native("llama").fingerprint == native("llama", 2).fingerprint
    assert native("llama").fingerprint != native("llama_linear").fingerprint
    assert native("llama").fingerprint != load_model(str(quantized_gguf("llama")), compute="torch").fingerprint


# --- right -----------------------------------------------------------------------------------------------------------


def assert_equal_to_oracle(model: LanguageModel, oracle: QuantizedOracle) -> None:
    """Compare row by row, over several prompts.

    Now and then a rounding falls to the other side, and from that token on a prompt's rows differ visibly, though by
    little. So each position must agree closely in some prompt, and moderately in all.
    """
    differences = []
    for seed in range(6):
        prompt = prompt_ids(seed, 90)
        expected, found = oracle.logits(prompt), logits_of(MiniDriver(model), prompt).double()
        assert expected.std().item() > 1.0, "flat logits show little"
        differences.append((found - expected).norm(dim=1) / expected.norm(dim=1))
    assert torch.stack(differences).amin(0).max().item() < MAX_DIFFERENCE
    assert torch.stack(differences).max().item() < MAX_ROUNDING_COST


def rounding_cost(model: LanguageModel, exact: LanguageModel) -> float:
    expected, found = (logits_of(MiniDriver(m), prompt_ids(1, 90)) for m in (exact, model))
    return float((found - expected).norm() / expected.norm())


@families
def test_logits_equal_the_oracle(
    family: str, quantized_gguf: Callable[[str], Path], native: Callable[..., LanguageModel]
) -> None:
    assert_equal_to_oracle(native(family), QuantizedOracle(quantized_gguf(family)))


@families
def test_logits_equal_the_torch_path_up_to_rounding(
    family: str, quantized_gguf: Callable[[str], Path], native: Callable[..., LanguageModel]
) -> None:
    cost = rounding_cost(native(family), load_model(str(quantized_gguf(family)), compute="torch"))
    assert 1e-3 < cost < MAX_ROUNDING_COST


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_unquantized_weights_become_int8_on_request(
    family: str, tiny_folder: Callable[[str], Path], tiny_gguf: Callable[[str], Path]
) -> None:
    model = load_model(str(tiny_folder(family)), compute="native")
    assert_equal_to_oracle(model, QuantizedOracle(tiny_folder(family), is_requantized=True))
    assert rounding_cost(model, load_model(str(tiny_folder(family)))) < MAX_ROUNDING_COST
    from_gguf = logits_of(MiniDriver(load_model(str(tiny_gguf(family)), compute="native")), prompt_ids(0, 60))
    assert torch.equal(from_gguf, logits_of(MiniDriver(model), prompt_ids(0, 60))), "whatever the file"


@pytest.mark.parametrize("quantization", [_Q.Q5_0, _Q.Q5_1], ids=lambda kind: kind.name)
def test_other_quantized_types_become_int8(
    quantization: gguf.GGMLQuantizationType, tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_tiny_gguf(tiny_folder("llama"), tmp_path / "other.gguf", quantization)
    model = load_model(str(path))
    assert isinstance(model, NativeModel)
    assert_equal_to_oracle(model, QuantizedOracle(path, is_requantized=True))


# --- row-exact -------------------------------------------------------------------------------------------------------


@families
@dtypes
def test_logits_are_the_same_bits_however_a_token_is_computed(
    family: str, dtype: KvDtype, native: Callable[..., LanguageModel]
) -> None:
    """Whole, in chunks, token by token, in a batch of 16, as a row to verify; with one thread and with two."""
    prompt = prompt_ids(2, 290)
    expected = logits_of(MiniDriver(native(family), dtype=dtype), prompt)
    assert not expected.isnan().any()
    for num_threads in (1, 2):
        for way, found in each_way(native(family, num_threads), prompt, dtype).items():
            assert torch.equal(found, expected), f"{way}, {num_threads} threads"


@pytest.mark.parametrize("num_threads", [3, 8])
def test_more_threads_than_cores_change_nothing(num_threads: int, native: Callable[..., LanguageModel]) -> None:
    prompt = prompt_ids(3, 270)
    expected = logits_of(MiniDriver(native("mistral")), prompt)
    found = logits_of(MiniDriver(native("mistral", num_threads)), prompt, chunk=50)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_size_and_order_change_nothing(block_size: int, native: Callable[..., LanguageModel]) -> None:
    expected = generate(MiniDriver(native("mistral")), prompt_ids(0, 50), 24)
    order = random.Random(0).sample(range(128), 128)
    driver = MiniDriver(native("mistral"), block_size=block_size, block_order=order)
    found = generate(driver, prompt_ids(0, 50), 24)
    assert found.token_ids == expected.token_ids
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


@families
@dtypes
def test_garbage_in_foreign_slots_does_not_spread(
    family: str, dtype: KvDtype, native: Callable[..., LanguageModel]
) -> None:
    prompts = [prompt_ids(3, 21), prompt_ids(4, 60)]
    expected = [generate(MiniDriver(native(family), dtype=dtype), prompt, 4) for prompt in prompts]
    driver = MiniDriver(native(family), dtype=dtype)
    garbage = driver.cache.elements if driver.cache.scales is None else driver.cache.scales
    garbage.fill_(float("nan"))
    found = [driver.add(prompt, 4) for prompt in prompts]
    driver.step([(sequence, len(sequence.token_ids)) for sequence in found])
    driver.decode(found, 4)
    for sequence, alone in zip(found, expected, strict=True):
        assert torch.equal(torch.stack(sequence.logits), torch.stack(alone.logits))


def test_every_instruction_set_gives_the_same_bits(
    quantized_gguf: Callable[[str], Path], native: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster of different CPUs then gives one answer."""
    expected = logits_of(MiniDriver(native("qwen3")), prompt_ids(5, 40))
    for isa in (Isa.AVX2, Isa.PORTABLE):
        monkeypatch.setenv(ISA_VARIABLE, isa)
        load_library.cache_clear()
        try:
            model = load_model(str(quantized_gguf("qwen3")), compute="native")
        finally:
            load_library.cache_clear()
        assert torch.equal(logits_of(MiniDriver(model), prompt_ids(5, 40)), expected)


def test_two_models_compute_at_the_same_time(native: Callable[..., LanguageModel]) -> None:
    prompt = prompt_ids(6, 200)
    expected = {family: logits_of(MiniDriver(native(family)), prompt) for family in ("llama", "qwen2")}
    found: dict[str, list[Tensor]] = {family: [] for family in expected}

    def run(family: str) -> None:
        for chunk in (1, 64, 5):
            found[family].append(logits_of(MiniDriver(native(family, 2)), prompt, chunk))

    threads = [threading.Thread(target=run, args=(family,)) for family in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for family, results in found.items():
        assert len(results) == 3
        assert all(torch.equal(result, expected[family]) for result in results)


# --- the contract of `forward` ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_threads", [1, 2])
def test_layers_are_reported_in_order_with_their_kv_in_the_cache(
    num_threads: int, native: Callable[..., LanguageModel]
) -> None:
    model = native("llama", num_threads)
    driver = MiniDriver(model)
    sequence = driver.add(prompt_ids(5, 16))
    seen: list[int] = []
    caller = threading.get_ident()

    def on_layer(layer: int) -> None:
        assert threading.get_ident() == caller
        seen.append(layer)
        block = driver.cache.tensor[: layer + 1, sequence.block_table[0]]
        assert bool(block.flatten(1).ne(0).all())

    model.forward(whole_prompt_batch(sequence), driver.cache, on_layer)
    assert seen == list(range(model.config.num_layers))


def test_what_a_layer_callback_raises_reaches_the_caller(native: Callable[..., LanguageModel]) -> None:
    driver = MiniDriver(native("llama", 2))
    sequence = driver.add(prompt_ids(5, 16))
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        raise ValueError("no room to send")

    with pytest.raises(ValueError, match="no room to send"):
        driver.model.forward(whole_prompt_batch(sequence), driver.cache, on_layer)
    assert seen == [0]
    driver.prefill(sequence)  # the model goes on


def test_only_the_rows_asked_for_have_logits(native: Callable[..., LanguageModel]) -> None:
    model = native("llama")
    driver = MiniDriver(model)
    sequence = driver.add(prompt_ids(6, 20))
    driver.prefill(sequence)
    found = model.forward(whole_prompt_batch(sequence, [19, 3, 3]), driver.cache)
    assert torch.equal(found, torch.stack([sequence.logits[19], sequence.logits[3], sequence.logits[3]]))
    found += 1.0  # the caller owns the logits
    assert model.forward(whole_prompt_batch(sequence, []), driver.cache).shape == (0, 257)


def test_an_empty_step_computes_nothing(native: Callable[..., LanguageModel]) -> None:
    driver = MiniDriver(native("llama"))
    empty = whole_prompt_batch(DrivenSequence([], []), [])
    assert driver.model.forward(empty, driver.cache).shape == (0, 257)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda sequence: sequence.token_ids.__setitem__(3, 257),
        lambda sequence: sequence.token_ids.__setitem__(0, -1),
        lambda sequence: sequence.block_table.__setitem__(0, 128),
        lambda sequence: sequence.block_table.__setitem__(1, -1),
        lambda sequence: sequence.block_table.pop(),
    ],
    ids=["token_above", "token_below", "block_above", "block_below", "block_missing"],
)
def test_ids_outside_model_or_cache_are_refused(
    break_it: Callable[[DrivenSequence], object], native: Callable[..., LanguageModel]
) -> None:
    driver = MiniDriver(native("llama"))
    sequence = driver.add(prompt_ids(6, 20))
    batch = whole_prompt_batch(sequence)
    break_it(sequence)
    slots = batch.slot_mapping  # of the sound table; the broken one is used to read
    with pytest.raises(IndexError, match="outside"):
        driver.model.forward(whole_prompt_batch(sequence, slots=slots), driver.cache)
    assert not driver.cache.bytes.any()


def test_a_cache_of_another_geometry_is_refused(native: Callable[..., LanguageModel]) -> None:
    model = native("llama")
    driver = MiniDriver(model)
    sequence = driver.add(prompt_ids(6, 20))
    layout = KvLayout(model.fingerprint, 3, 1, 16, 16, KvDtype.FP32)
    with pytest.raises(InvalidRequest) as caught:
        model.forward(whole_prompt_batch(sequence), KvCache(layout, 8, torch.device("cpu")))
    assert caught.value.field == "kv_cache"


def test_closing_ends_the_threads(quantized_gguf: Callable[[str], Path]) -> None:
    def num_os_threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = num_os_threads()
    model = load_model(str(quantized_gguf("llama")), num_threads=4)
    assert isinstance(model, NativeModel)
    assert num_os_threads() == before + 3
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert names.count("kvrelay-step") >= 3
    logits_of(MiniDriver(model), prompt_ids(0, 20))
    model.close()
    assert num_os_threads() == before
    model.close()
    with pytest.raises(ValueError, match="closed"):
        logits_of(MiniDriver(model), prompt_ids(0, 20))
