"""The CUDA model's steps under the interpreter against the plain model: the same tokens, logits to fp32 rounding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.kernels.torch_kernels import TorchKernels
from engine.kernels.triton.w4a16 import dequantize_int4
from engine.model.batch import StepBatch
from engine.model.cuda.cache import DeviceKvCache
from engine.model.cuda.gguf import GgufInt4Blocks
from engine.model.cuda.linear import WeightFormat
from engine.model.cuda.model import CudaModel, CudaSettings, build_cuda_model
from engine.model.cuda.weights import quantize_int4
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import GgufWeights
from engine.model.files.open import open_weights
from engine.model.interface import LanguageModel
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.model.rope import inverse_frequencies
from engine.model.weights import LlamaWeights, WeightReader, load_ends, load_layer
from tests.oracle.mini_driver import DrivenSequence, MiniDriver, generate
from tests.tiny_models import write_tiny_gguf

CPU = torch.device("cpu")
PROMPT = [5, 9, 200, 17, 3, 88, 41, 7, 7, 150, 33, 21, 64, 2, 9, 100, 12, 55, 250, 6, 91, 30, 31]

Folder = Callable[[str], Path]


def cuda_model(folder: Path, **settings: object) -> CudaModel:
    config, reader = open_weights(str(folder))
    values: dict[str, object] = {"dtype": torch.float32, "graph_batch_sizes": (), "max_context_len": 64, **settings}
    return build_cuda_model(config, reader, CPU, CudaSettings(**values))  # type: ignore[arg-type]  # tests name fields


def driver(model: LanguageModel, dtype: KvDtype = KvDtype.FP32) -> MiniDriver:
    return MiniDriver(model, num_blocks=24, block_size=16, dtype=dtype, block_order=[*range(11, 24), *range(11)])


def logits(sequence: DrivenSequence) -> Tensor:
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "llama3", "mistral", "qwen2", "qwen3"])
def test_tokens_equal_those_of_the_plain_model(family: str, tiny_folder: Folder) -> None:
    folder = tiny_folder(family)
    wanted = generate(driver(load_model(str(folder))), PROMPT, 4)
    found = generate(driver(cuda_model(folder)), PROMPT, 4, chunk=19)
    assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-3, atol=1e-3)


def test_decode_and_prefill_in_one_step(tiny_folder: Folder) -> None:
    """Two running sequences first, one with drafts, then a prompt of more rows than a decode tile takes."""
    results = []
    for model in (load_model(str(tiny_folder("llama"))), cuda_model(tiny_folder("llama"))):
        run = driver(model)
        first, second, third = run.add(PROMPT), run.add(PROMPT[:12]), run.add([*PROMPT, *PROMPT])
        run.step([(first, 20), (second, 8)])
        results.append(run.step([(first, 1), (second, 4), (third, 30)]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("max_rows", [1, 3])
def test_static_decode_steps_equal_eager_ones(max_rows: int, tiny_folder: Folder) -> None:
    """Steps of 1 to 3 sequences in buffers for 2 and 4: padding sequences and rows change nothing."""
    folder = tiny_folder("llama_tied")
    results = []
    for sizes in ((), (2, 4)):
        model = cuda_model(folder, graph_batch_sizes=sizes, graph_rows=(1, 3))
        run = driver(model)
        if sizes:
            model.capture(run.cache)
        sequences = [run.add([*PROMPT[:length], 4, 8, 15, 16, 23]) for length in (5, 17, 9)]
        run.step([(sequence, len(sequence.token_ids) - 5) for sequence in sequences])
        steps = [run.step([(sequence, 1 + (index % max_rows)) for index, sequence in enumerate(sequences[:count])])
                 for count in (3, 1, 2)]  # fmt: skip
        results.append((torch.cat(steps), run.cache.tensor))
    for eager, static in zip(*results, strict=True):
        torch.testing.assert_close(static, eager, rtol=1e-4, atol=1e-4)


def test_invariant_rows_are_bit_equal_alone_in_a_batch_and_in_chunks(tiny_folder: Folder) -> None:
    model = cuda_model(tiny_folder("llama_tied"), is_batch_invariant=True)
    whole = driver(model)
    sequence = whole.add(PROMPT)
    whole.prefill(sequence)

    together = driver(model)
    beside, other = together.add(PROMPT), together.add([*PROMPT[5:], *PROMPT[:9]])
    together.step([(other, 3), (beside, 18)])
    together.step([(beside, 1), (other, 20)])
    together.step([(beside, 4), (other, 1)])
    assert torch.equal(logits(beside), logits(sequence))


@pytest.mark.parametrize("dtype", [KvDtype.FP16, KvDtype.INT8])
def test_narrow_caches(dtype: KvDtype, tiny_folder: Folder) -> None:
    """Logits move by the cache's rounding and no more; tokens stay."""
    folder = tiny_folder("llama_tied")
    wanted = generate(driver(load_model(str(folder))), PROMPT, 2)
    found = generate(driver(cuda_model(folder), dtype), PROMPT, 2)
    assert found.token_ids == wanted.token_ids
    error = (logits(found) - logits(wanted)).norm() / logits(wanted).norm()
    assert 0 < error < (0.001 if dtype is KvDtype.FP16 else 0.03)


@dataclass(frozen=True, slots=True)
class RoundedReader:
    """A checkpoint whose matrices hold what 4 bits leave of them."""

    inner: WeightReader

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.inner.shapes

    def stored_name(self, parameter: str) -> str:
        return self.inner.stored_name(parameter)

    def read(self, parameter: str) -> Tensor:
        values = self.inner.read(parameter)
        if not parameter.endswith("_proj.weight"):
            return values
        group = next(group for group in (128, 64, 32) if values.shape[1] % group == 0)
        return dequantize_int4(quantize_int4(values, group), torch.float32)

    def read_first_row(self, parameter: str) -> Tensor:
        return self.inner.read_first_row(parameter)

    def rope_factors(self) -> Tensor | None:
        return self.inner.rope_factors()


def test_int4_weights_give_the_tokens_of_the_rounded_model(tiny_folder: Folder) -> None:
    folder = tiny_folder("qwen2")
    config, reader = open_weights(str(folder))
    kernels, rounded = TorchKernels(), RoundedReader(reader)
    embedding, final_norm, lm_head = load_ends(rounded, config, kernels, CPU)
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(load_layer(rounded, config, layer, kernels, CPU) for layer in range(config.num_layers)),
        final_norm=final_norm,
        lm_head=lm_head,
        inverse_frequencies=inverse_frequencies(config.rope, config.head_dim),
    )
    wanted = generate(driver(LlamaModel(config, weights, "", kernels, CPU)), PROMPT, 2)
    found = generate(driver(cuda_model(folder, weight_format=WeightFormat.INT4)), PROMPT, 2)
    assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
@pytest.mark.parametrize("family", ["llama_tied", "qwen2"])
def test_gguf_blocks_are_kept_bit_for_bit(
    family: str, kind: gguf.GGMLQuantizationType, tiny_folder: Folder, tmp_path: Path
) -> None:
    """Q4 weights on the device are the file's own, so tokens are those of its dequantized values."""
    path = write_tiny_gguf(tiny_folder(family), tmp_path / "model.gguf", kind)
    config, reader = open_weights(str(path))
    assert isinstance(reader, GgufWeights)
    blocks = GgufInt4Blocks(GgufFile(path), reader, config)
    settings = CudaSettings(dtype=torch.float32, weight_format=WeightFormat.INT4, graph_batch_sizes=())
    model = build_cuda_model(config, reader, CPU, settings, blocks=blocks)
    wanted = generate(driver(load_model(str(path), compute="torch")), PROMPT[:14], 2)
    found = generate(driver(model), PROMPT[:14], 2)
    assert found.token_ids == wanted.token_ids
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weight_format", [WeightFormat.INT8, WeightFormat.FP8])
def test_byte_weights_stay_close_to_the_plain_model(weight_format: WeightFormat, tiny_folder: Folder) -> None:
    folder = tiny_folder("llama_tied")
    plain, run = driver(load_model(str(folder))), driver(cuda_model(folder, weight_format=weight_format))
    wanted, found = plain.add(PROMPT[:9]), run.add(PROMPT[:9])
    plain.prefill(wanted)
    run.prefill(found, chunk=8)
    error = (logits(found) - logits(wanted)).norm() / logits(wanted).norm()
    assert 0 < error < (0.06 if weight_format is WeightFormat.INT8 else 0.2)


def test_fingerprint_tells_formats_apart(tiny_folder: Folder) -> None:
    folder = tiny_folder("llama_tied")
    models = [cuda_model(folder), cuda_model(folder, weight_format=WeightFormat.INT8), load_model(str(folder))]
    assert len({model.fingerprint for model in models}) == 3
    assert cuda_model(folder).fingerprint == models[0].fingerprint


def test_on_layer_is_called_for_each_layer_in_order(tiny_folder: Folder) -> None:
    model = cuda_model(tiny_folder("llama_tied"), graph_batch_sizes=(1,))
    run = driver(model)
    model.capture(run.cache)
    seen: list[int] = []
    for start, num_rows in ((0, 20), (20, 1)):  # a prefill chunk, then a step that fits the static buffers
        positions = torch.arange(start, start + num_rows)
        batch = StepBatch(
            token_ids=torch.full((num_rows,), 7),
            positions=positions,
            slot_mapping=positions,
            query_start=torch.tensor([0, num_rows], dtype=torch.int32),
            context_lens=torch.tensor([start + num_rows], dtype=torch.int32),
            block_tables=torch.tensor([[0, 1]], dtype=torch.int32),
            logit_rows=torch.empty(0, dtype=torch.int64),
        )
        assert model.forward(batch, run.cache, seen.append).shape == (0, model.config.vocab_size)
    assert seen == [0, 1, 0, 1]


@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.INT8])
def test_device_cache_reads_and_writes_blocks_like_the_plain_one(dtype: KvDtype) -> None:
    layout = KvLayout("", 2, 2, 8, 16, dtype)
    cache = DeviceKvCache(layout, 9, CPU)
    cache.bytes.copy_(torch.randint(0, 120, cache.bytes.shape, generator=torch.Generator().manual_seed(0)).byte())
    before = cache.bytes.clone()
    ids = [7, 0, 3, 4]
    buffer = bytearray(len(ids) * layout.block_bytes)
    cache.read_blocks(1, ids, memoryview(buffer))
    assert bytes(buffer) == before[1, ids].numpy().tobytes()
    cache.write_blocks(0, [8, 2, 5, 6], memoryview(buffer))
    expected = before.clone()
    expected[0, [8, 2, 5, 6]] = before[1, ids]
    assert torch.equal(cache.bytes, expected)
    cache.read_blocks(0, [], memoryview(b""))
    with pytest.raises(IndexError):
        cache.read_blocks(0, [9], memoryview(bytearray(layout.block_bytes)))
