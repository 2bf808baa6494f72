"""A worker's engine as `--compute triton` builds it, under the interpreter: the whole way from settings to tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.cuda.cache import MemoryShare, num_blocks_that_fit
from engine.model.cuda.linear import WeightFormat
from engine.model.cuda.loader import check_capability, check_device
from engine.model.cuda.model import CudaModel
from engine.spec.device_sampling import DeviceSampler
from kvrelay.errors import InvalidRequest
from tests.engine_driver import make_request, run_to_end
from tests.oracle.triton.device_checks import OTHER, PROMPT, check_engine, check_reports, settings
from worker.compute.bootstrap import build_engine
from worker.compute.cuda_bootstrap import cuda_settings_of, graph_batch_sizes, graph_rows
from worker.settings import WorkerSettings

CPU = torch.device("cpu")
Folder = Callable[[str], Path]


def test_engine_gives_the_tokens_of_the_plain_one(tiny_folder: Folder) -> None:
    check_engine(tiny_folder("llama_tied"), CPU)


def test_layers_of_a_hand_off_are_reported_when_they_are_written(tiny_folder: Folder) -> None:
    check_reports(tiny_folder("llama_tied"), CPU)


def test_engine_recovers_preempted_sequences_in_formats_of_the_gpu(tiny_folder: Folder) -> None:
    """fp8 blocks and int4 weights. Blocks run out on the way; tokens are those with room for everything."""
    folder = tiny_folder("llama_tied")
    forms: dict[str, object] = {"weight_format": "int4", "kv_dtype": "fp8", "batch_invariant": True}
    forms |= {"speculation": "none", "cuda_graphs": False, "block_size": 8}
    results = []
    for num_blocks in (24, 3):
        engine = build_engine(settings(folder, "triton", CPU, num_blocks=num_blocks, **forms))
        for request_id, prompt in ((1, PROMPT[:7]), (2, OTHER[:7])):
            engine.add(make_request(request_id, prompt, max_tokens=3, ignore_eos=True))
        results.append((run_to_end(engine), engine.load().num_preemptions))
    assert results[0][0] == results[1][0]
    assert [num_preemptions > 0 for _, num_preemptions in results] == [False, True]


@pytest.mark.parametrize("num_blocks", [3, 40])
def test_warming_up_leaves_an_empty_cache(num_blocks: int, tiny_folder: Folder) -> None:
    forms = {"speculation": "none", "cuda_graphs": False}
    engine = build_engine(settings(tiny_folder("llama_tied"), "triton", CPU, num_blocks=num_blocks, **forms))
    assert isinstance(engine.model, CudaModel)
    engine.model.warm_up(engine.kv_cache, max_rows=18)
    assert not engine.kv_cache.bytes.any()
    DeviceSampler().warm_up(engine.model.config.vocab_size, CPU)


def test_settings_say_how_the_model_is_computed(tiny_folder: Folder) -> None:
    on_gpu = torch.device("cuda")
    plain = WorkerSettings.model_validate({"max_num_seqs": 24, "max_draft_tokens": 8})
    found = cuda_settings_of(plain, on_gpu)
    assert (found.dtype, found.weight_format) == (torch.bfloat16, WeightFormat.DENSE)
    assert found.graph_batch_sizes == (1, 2, 4, 8, 16, 24)
    assert found.graph_rows == (1, 5, 9)
    assert cuda_settings_of(plain, CPU).dtype is torch.float32
    changed = {"dtype": "fp16", "weight_format": "fp8", "batch_invariant": True, "cuda_graphs": False}
    found = cuda_settings_of(plain.model_copy(update=changed), on_gpu)
    assert (found.dtype, found.weight_format) == (torch.float16, WeightFormat.FP8)
    assert found.is_batch_invariant
    assert found.graph_batch_sizes == ()


def test_captured_sizes() -> None:
    assert graph_batch_sizes(1) == (1,)
    assert graph_batch_sizes(64) == (1, 2, 4, 8, 16, 32, 64)
    assert graph_batch_sizes(1000)[-1] == 256
    assert graph_rows(0) == (1,)
    assert graph_rows(1) == (1, 2)


@pytest.mark.parametrize(("compute", "kv_dtype"), [("torch", "fp8"), ("torch", "int8"), ("native", "fp8")])
def test_cache_types_that_kernels_lack_are_refused_at_start(compute: str, kv_dtype: str, tiny_folder: Folder) -> None:
    with pytest.raises(InvalidRequest, match=kv_dtype) as caught:
        build_engine(settings(tiny_folder("llama_tied"), compute, CPU, kv_dtype=kv_dtype))
    assert caught.value.field == "kv_dtype"


@pytest.mark.parametrize(
    ("capability", "weight_format", "kv_dtype", "field"),
    [
        ((7, 5), WeightFormat.DENSE, KvDtype.BF16, "device"),
        ((8, 6), WeightFormat.FP8, KvDtype.BF16, "weight_format"),
        ((8, 6), WeightFormat.INT8, KvDtype.FP8, "kv_dtype"),
        ((8, 0), WeightFormat.INT4, KvDtype.INT8, None),
        ((9, 0), WeightFormat.FP8, KvDtype.FP8, None),
    ],
)
def test_formats_that_a_device_lacks_are_refused(
    capability: tuple[int, int], weight_format: WeightFormat, kv_dtype: KvDtype, field: str | None
) -> None:
    if field is None:
        check_capability(capability, "card", weight_format, kv_dtype)
        return
    with pytest.raises(InvalidRequest) as caught:
        check_capability(capability, "card", weight_format, kv_dtype)
    assert caught.value.field == field


def test_triton_on_a_cpu_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model.cuda.loader.is_interpreted", lambda: False)
    with pytest.raises(InvalidRequest) as caught:
        check_device(CPU, WeightFormat.DENSE, KvDtype.FP32)
    assert caught.value.field == "compute"


def test_a_missing_triton_is_told(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.compute.bootstrap.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="extra `gpu`") as caught:
        build_engine(settings(tiny_folder("llama_tied"), "triton", CPU))
    assert caught.value.field == "compute"


def test_weights_that_do_not_fit_name_their_format(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> CudaModel:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.model.cuda.loader.build_cuda_model", full)
    with pytest.raises(InvalidRequest, match="dense") as caught:
        build_engine(settings(tiny_folder("llama_tied"), "triton", CPU))
    assert caught.value.field == "weight_format"


def test_captures_that_do_not_fit_name_the_margin(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaModel, "capture", full)
    with pytest.raises(InvalidRequest) as caught:
        build_engine(settings(tiny_folder("llama_tied"), "triton", CPU))
    assert caught.value.field == "gpu_memory_margin"


def test_blocks_leave_the_margin_free_and_workers_on_one_device_their_shares() -> None:
    gib = 1 << 30
    # Alone: 100 GiB, 20 of weights here and nobody else.
    assert MemoryShare(1.0, 0.1).bytes_for_blocks(80 * gib, 100 * gib, 20 * gib) == pytest.approx(70 * gib)
    # Two with half each: the second finds what the first left and takes no more than its own half.
    assert MemoryShare(0.5, 0.1).bytes_for_blocks(80 * gib, 100 * gib, 20 * gib) == pytest.approx(25 * gib)
    assert MemoryShare(0.5, 0.1).bytes_for_blocks(35 * gib, 100 * gib, 20 * gib) == pytest.approx(25 * gib)
    # Something else took the device.
    assert MemoryShare(1.0, 0.1).bytes_for_blocks(5 * gib, 100 * gib, 20 * gib) < 0


def test_pool_is_sized_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout("", 2, 2, 64, 16, KvDtype.BF16)
    total = 10_000 * layout.block_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    assert num_blocks_that_fit(layout, torch.device("cuda"), MemoryShare(1.0, 0.2)) == 4000
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9_000 * layout.block_bytes)
    with pytest.raises(InvalidRequest) as caught:
        num_blocks_that_fit(layout, torch.device("cuda"), MemoryShare(1.0, 0.2))
    assert caught.value.field == "gpu_memory_share"
