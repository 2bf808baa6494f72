"""Loading a model by name: open its files, choose the kernels, build the native or the plain model.

What the files say is the matter of `files/`, which parameters a model needs that of `weights.py`, and how the native
kernels want them that of `cpu/weights.py`. Nothing here reads tokenizers.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch

from engine.config import ModelConfig
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import load_library
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.model.cpu.model import NativeModel
from engine.model.cpu.weights import BlockReader, GgufBlocks, NoBlocks, load_native_weights
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import GgufWeights
from engine.model.files.open import open_weights
from engine.model.files.source import resolve_model
from engine.model.interface import LanguageModel
from engine.model.kernel_choice import Compute, choose_kernels, fall_back
from engine.model.llama import LlamaModel
from engine.model.rope import inverse_frequencies
from engine.model.weights import (
    LayerWeights,
    LlamaWeights,
    WeightReader,
    load_ends,
    load_layer,
    parameter_shapes,
    rope_factors,
    weights_fingerprint,
)

_log = structlog.get_logger(__name__)

_NUM_LOADING_THREADS = 2
"""Dequantizing is bound by memory; more threads gain little and hold more layers at once."""
_FP32_BYTES = 4


def load_model(
    source: str,
    *,
    device: torch.device | None = None,
    compute: Compute = "auto",
    num_threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LanguageModel:
    """Load a model.

    Args:
        source: A name as `resolve_model` takes it.
        device: Where to compute; None = the CPU.
        compute: With which kernels. `auto` falls back to torch, with a line in the log, where the native ones cannot
            be compiled.
        num_threads: Threads of the native kernels; None = one per core that this process may use.
        progress: Called on this thread with (bytes loaded, bytes in all), counted as they will lie in memory, after
            each part; the last call has both equal.

    Raises:
        InvalidRequest: As `open_weights`, or `compute` cannot be had on this machine or device.
    """
    device = device or torch.device("cpu")
    report = progress or (lambda done, total: None)
    if choose_kernels(compute, device, resolve_model(source)).kernels == "native":
        try:
            return _load_native(source, num_threads or len(os.sched_getaffinity(0)), report)
        except KernelsUnavailable as error:
            choice = fall_back(compute, error)
            _log.warning("kernels.unavailable", reason=choice.reason, fallback=choice.kernels)
    config, reader = open_weights(source)
    kernels = TorchKernels()
    weights = _load_weights(config, reader, kernels, device, report)
    fingerprint = weights_fingerprint(config, reader, weights.inverse_frequencies)
    return LlamaModel(config, weights, fingerprint, kernels, device)


def _load_native(source: str, num_threads: int, progress: Callable[[int, int], None]) -> NativeModel:
    library = load_library()
    config, reader = open_weights(source)
    blocks: BlockReader = NoBlocks()
    if isinstance(reader, GgufWeights):
        blocks = GgufBlocks(GgufFile(resolve_model(source).path), reader, config)
    frequencies = inverse_frequencies(config.rope, config.head_dim, rope_factors(config, reader))
    handle = load_native_weights(library, config, reader, blocks, frequencies.numpy(), num_threads, progress)
    return NativeModel(config, weights_fingerprint(config, reader, frequencies), handle)


def _load_weights(
    config: ModelConfig,
    reader: WeightReader,
    kernels: Kernels,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> LlamaWeights:
    factors = rope_factors(config, reader)
    sizes = _part_sizes(config)
    total, done = sum(sizes), 0
    layers: list[LayerWeights] = []
    with ThreadPoolExecutor(_NUM_LOADING_THREADS, thread_name_prefix="load-weights") as pool:
        ends = pool.submit(load_ends, reader, config, kernels, device)
        parts = pool.map(lambda layer: load_layer(reader, config, layer, kernels, device), range(config.num_layers))
        for part, size in zip(parts, sizes[:-1], strict=True):
            layers.append(part)
            done += size
            progress(done, total)
        embedding, final_norm, lm_head = ends.result()
    progress(total, total)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=final_norm,
        lm_head=lm_head,
        inverse_frequencies=inverse_frequencies(config.rope, config.head_dim, factors).to(device),
    )


def _part_sizes(config: ModelConfig) -> list[int]:
    """Bytes of each layer, then of the rest."""
    sizes = [0] * (config.num_layers + 1)
    for name, shape in parameter_shapes(config).items():
        part = int(name.split(".")[2]) if name.startswith("model.layers.") else config.num_layers
        sizes[part] += math.prod(shape) * _FP32_BYTES
    return sizes
