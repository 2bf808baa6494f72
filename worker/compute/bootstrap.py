"""Builds one worker's engine from its settings, on the engine's own thread."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine, ExportListener
from engine.model.cpu.model import NativeModel
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.sampling.rows import RowSampler, row_sampler
from engine.spec.head.follower import HeadFollower
from engine.spec.head.loader import follow
from engine.spec.sampling import HostSampler, Sampler
from kvrelay.errors import InvalidRequest
from worker.compute.drafters import load_head, make_speculation
from worker.compute.plan import kv_layout, num_kv_blocks, plain_compute, worker_device
from worker.settings import WorkerSettings


def build_engine(
    settings: WorkerSettings,
    export_listener: ExportListener | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load the model, allocate the KV cache and return an engine that is ready for its first step.

    Raises:
        InvalidRequest: A setting does not fit the machine or the model; names it.
    """
    device = worker_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    parts = _build_parts(settings, device, progress)
    kv_cache = parts.kv_cache
    layout = kv_cache.layout
    cache_config = CacheConfig(kv_cache.num_blocks, layout.block_size, layout.dtype, settings.prefix_cache)
    scheduler_config = SchedulerConfig(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_waiting)
    speculation = make_speculation(settings, parts.model, kv_cache, parts.rows, parts.follower)
    return Engine(
        parts.model,
        kv_cache,
        cache_config,
        scheduler_config,
        export_listener,
        speculation,
        parts.sampler,
        parts.follower,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """What an engine computes with."""

    model: LanguageModel
    kv_cache: KvCache
    """On the model's device."""
    sampler: Sampler
    """What samples from its logits."""
    rows: RowSampler | None = None
    """What that draws with; None = it samples on a device."""
    follower: HeadFollower | None = None
    """Of the draft head behind the model."""


def _build_parts(settings: WorkerSettings, device: torch.device, progress: Callable[[int, int], None] | None) -> _Parts:
    compute = plain_compute(settings, device)
    if compute is None:
        # Loads Triton, which a worker on the CPU neither needs nor may have.
        if find_spec("triton") is None:
            raise InvalidRequest("compute", "computing on a GPU needs the package triton, which the extra `gpu` brings")
        from worker.compute.cuda_bootstrap import build_on_device

        device_model, device_cache, device_sampler = build_on_device(settings, device, progress)
        load_head(settings, device_model)  # None, or says why there can be none
        return _Parts(device_model, device_cache, device_sampler)
    model = load_model(
        settings.model,
        device=device,
        progress=progress,
        compute=compute,
        num_threads=settings.threads or None,
    )
    head = load_head(settings, model)
    layout = kv_layout(
        model.fingerprint,
        model.config,
        settings,
        is_native=isinstance(model, NativeModel),
        num_draft_layers=0 if head is None else 1,
    )
    rows = row_sampler(settings.threads or None)
    kv_cache = KvCache(layout, num_kv_blocks(layout, settings), device)
    follower = None if head is None else follow(model, head, kv_cache)
    return _Parts(model, kv_cache, HostSampler(rows), rows, follower)
