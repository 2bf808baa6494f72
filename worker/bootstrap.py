"""Builds one worker's engine from its settings, on the engine's own thread."""

from collections.abc import Callable

import torch

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, SchedulerConfig
from engine.engine import Engine, ExportListener
from engine.errors import InvalidRequest
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.spec.ngram import NgramDrafter
from engine.spec.pace import DraftPacer
from engine.spec.speculation import Speculation
from worker.settings import WorkerSettings

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
    model = load_model(
        settings.model,
        device=device,
        progress=progress,
        compute=settings.compute,
        num_threads=settings.threads or None,
    )
    layout = kv_layout(model, settings)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        num_blocks = settings.kv_memory_mib * MEBIBYTE // (layout.block_bytes * layout.num_layers)
        if num_blocks < 1:
            raise InvalidRequest("kv_memory_mib", "does not hold a single KV block of this model")
    cache_config = CacheConfig(num_blocks, settings.block_size, settings.kv_dtype, settings.prefix_cache)
    scheduler_config = SchedulerConfig(settings.max_num_seqs, settings.max_num_batched_tokens, settings.max_waiting)
    kv_cache = KvCache(layout, num_blocks, device)
    return Engine(model, kv_cache, cache_config, scheduler_config, export_listener, make_speculation(settings))


def make_speculation(settings: WorkerSettings) -> Speculation | None:
    """Return what drafts tokens, or None when the settings say none."""
    if settings.speculation == "none":
        return None
    return Speculation(NgramDrafter(), DraftPacer(settings.max_draft_tokens))


def kv_layout(model: LanguageModel, settings: WorkerSettings) -> KvLayout:
    """Return the layout of this worker's KV cache."""
    config = model.config
    return KvLayout(
        model_fingerprint=model.fingerprint,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        dtype=settings.kv_dtype,
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
