"""Builds one worker's engine from its settings, on the engine's own thread."""

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, KvDtype, SchedulerConfig
from engine.engine import Engine, ExportListener
from engine.errors import InvalidRequest
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.model.native import NativeModel
from engine.sampling.rows import row_sampler
from engine.spec.head_follower import HeadFollower
from engine.spec.head_loader import follow
from engine.spec.sampling import HostSampler, Sampler
from worker.drafters import load_head, make_speculation
from worker.settings import DEFAULT_KV_MEMORY_MIB, WorkerSettings

MEBIBYTE = 1024 * 1024


def build_engine(
    settings: WorkerSettings,
    export_listener: ExportListener | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load the model, allocate the KV cache and return an engine that is ready for its first step.

    Raises:
        InvalidRequest: A setting does not fit the machine or the model; names it.
    """
    device = _device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model, kv_cache, sampler, follower = _build_parts(settings, device, progress)
    layout = kv_cache.layout
    cache_config = CacheConfig(kv_cache.num_blocks, layout.block_size, layout.dtype, settings.prefix_cache)
    scheduler_config = SchedulerConfig(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_waiting)
    speculation = make_speculation(settings, model, kv_cache, follower)
    return Engine(model, kv_cache, cache_config, scheduler_config, export_listener, speculation, sampler, follower)


def _build_parts(
    settings: WorkerSettings, device: torch.device, progress: Callable[[int, int], None] | None
) -> tuple[LanguageModel, KvCache, Sampler, HeadFollower | None]:
    """The model, its KV cache on the same device, what samples from its logits, and the draft head behind it."""
    if settings.compute == "triton" or (settings.compute == "auto" and device.type == "cuda"):
        # Loads Triton, which a worker on the CPU neither needs nor may have.
        if find_spec("triton") is None:
            raise InvalidRequest("compute", "computing on a GPU needs the package triton, which the extra `gpu` brings")
        from worker.cuda_bootstrap import build_on_device

        device_model, device_cache, device_sampler = build_on_device(settings, device, progress)
        load_head(settings, device_model)  # None, or says why there can be none
        return device_model, device_cache, device_sampler, None
    model = load_model(
        settings.model,
        device=device,
        progress=progress,
        compute=settings.compute,
        num_threads=settings.threads or None,
    )
    head = load_head(settings, model)
    layout = kv_layout(model, settings, 0 if head is None else 1)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        memory_mib = settings.kv_memory_mib or DEFAULT_KV_MEMORY_MIB
        num_blocks = memory_mib * MEBIBYTE // (layout.block_bytes * layout.num_layers)
        if num_blocks < 1:
            raise InvalidRequest("kv_memory_mib", "does not hold a single KV block of this model")
    sampler = HostSampler(row_sampler(settings.threads or len(os.sched_getaffinity(0))))
    kv_cache = KvCache(layout, num_blocks, device)
    return model, kv_cache, sampler, None if head is None else follow(model, head, kv_cache)


def kv_layout(model: LanguageModel, settings: WorkerSettings, num_draft_layers: int = 0) -> KvLayout:
    """Return the layout of the KV cache of a worker without Triton.

    Raises:
        InvalidRequest: The model's kernels do not have the element type; names `kv_dtype`.
    """
    # Native attention is bound by reading KV, so half the bytes count; the torch path is the exact one.
    dtype = settings.kv_dtype or (KvDtype.FP16 if isinstance(model, NativeModel) else KvDtype.FP32)
    config = model.config
    if dtype is KvDtype.FP8:
        raise InvalidRequest("kv_dtype", "fp8 needs a GPU")
    if dtype.has_scales and not isinstance(model, NativeModel):
        raise InvalidRequest("kv_dtype", f"{dtype} needs native or triton kernels; this model runs on those of torch")
    return KvLayout(
        model_fingerprint=model.fingerprint,
        num_layers=config.num_layers + num_draft_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=dtype,
        num_draft_layers=num_draft_layers,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest("device", f"{name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device", f"{name!r}: there is no usable GPU here")
    return device
