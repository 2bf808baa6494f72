"""What a worker computes with on a GPU: the Triton model, KV blocks in device memory, captured decode steps.

Loads Triton, so `bootstrap.py` imports it only for workers that use it. Decides nothing about requests. On the CPU,
under Triton's interpreter, the same happens with blocks in host memory; that is how tests cover it.
"""

from collections.abc import Callable

import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.cuda.cache import DeviceKvCache, MemoryShare, num_blocks_that_fit
from engine.model.cuda.linear import WeightFormat
from engine.model.cuda.loader import check_device, load_cuda_model
from engine.model.cuda.model import CudaModel, CudaSettings
from engine.spec.device_sampling import DeviceSampler
from kvrelay.errors import InvalidRequest
from worker.settings import WorkerSettings

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KV_DTYPES = {torch.bfloat16: KvDtype.BF16, torch.float16: KvDtype.FP16, torch.float32: KvDtype.FP32}
_MAX_GRAPH_SEQS = 256
"""Larger steps spend little of their time on launches."""
_MAX_GRAPH_CONTEXT = 16384
"""Scratch of a captured step grows with its longest context; longer ones are launched kernel by kernel."""
_INTERPRETER_MIB = 512


def build_on_device(
    settings: WorkerSettings, device: torch.device, progress: Callable[[int, int], None] | None = None
) -> tuple[CudaModel, DeviceKvCache, DeviceSampler]:
    """Load the model, allocate its KV cache from the memory that is left, capture decode steps, and compile the rest.

    Raises:
        InvalidRequest: A setting does not fit the device or the model; names it.
    """
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)  # of this thread, which is to be the one that computes
    cuda_settings = cuda_settings_of(settings, device)
    kv_dtype = settings.kv_dtype or _KV_DTYPES[cuda_settings.dtype]
    check_device(device, cuda_settings.weight_format, kv_dtype)
    model = load_cuda_model(settings.model, device, cuda_settings, progress)
    config = model.config
    layout = KvLayout.of_model(model.fingerprint, config, settings.block_size, kv_dtype)
    kv_cache = DeviceKvCache(layout, _num_blocks(settings, layout, device), device)
    sampler = DeviceSampler()
    try:
        model.capture(kv_cache)
        if device.type == "cuda":  # nothing is compiled under the interpreter
            model.warm_up(kv_cache, settings.max_num_batched_tokens)
            sampler.warm_up(config.vocab_size, device)
    except torch.OutOfMemoryError as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidRequest("gpu_memory_margin", f"leaves no room for steps beside the KV blocks: {reason}") from error
    return model, kv_cache, sampler


def cuda_settings_of(settings: WorkerSettings, device: torch.device) -> CudaSettings:
    """Return how a worker's settings have the model computed."""
    # The interpreter knows no bf16.
    by_default = "bf16" if device.type == "cuda" else "fp32"
    return CudaSettings(
        dtype=_DTYPES[by_default if settings.dtype == "auto" else settings.dtype],
        weight_format=WeightFormat(settings.weight_format),
        is_batch_invariant=settings.batch_invariant,
        max_context_len=_MAX_GRAPH_CONTEXT,
        graph_batch_sizes=graph_batch_sizes(settings.max_num_seqs) if settings.cuda_graphs else (),
        graph_rows=graph_rows(0 if settings.speculation == "none" else settings.max_draft_tokens),
    )


def graph_batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences to capture: powers of two up to the most that a step has, and that number itself.

    24 -> 1 2 4 8 16 24
    """
    most = min(max_num_seqs, _MAX_GRAPH_SEQS)
    return (*(1 << power for power in range(most.bit_length()) if 1 << power < most), most)


def graph_rows(max_draft_tokens: int) -> tuple[int, ...]:
    """Rows of a sequence to capture: a plain decode, half of the longest draft, and all of it."""
    return tuple(sorted({1, 1 + -(-max_draft_tokens // 2), 1 + max_draft_tokens}))


def _num_blocks(settings: WorkerSettings, layout: KvLayout, device: torch.device) -> int:
    if settings.num_blocks is not None:
        return settings.num_blocks
    if settings.kv_memory_mib is None and device.type == "cuda":
        return num_blocks_that_fit(layout, device, MemoryShare(settings.gpu_memory_share, settings.gpu_memory_margin))
    num_blocks = layout.blocks_within((settings.kv_memory_mib or _INTERPRETER_MIB) << 20)
    if num_blocks < 1:
        raise InvalidRequest("kv_memory_mib", "does not hold a single KV block of this model")
    return num_blocks
