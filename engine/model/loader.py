"""Loading a model by name: find its files, read config and weights, build the plain model.

Which names exist is `source.py`'s matter, what the files say that of `hf_config.py`, `gguf_config.py` and the weight
readers, which parameters a model needs that of `weights.py`. Nothing here reads tokenizers.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.config import ModelConfig
from engine.errors import InvalidRequest
from engine.kernels.interface import Kernels
from engine.kernels.torch_kernels import TorchKernels
from engine.model.gguf_config import read_gguf_config
from engine.model.gguf_file import GgufFile
from engine.model.gguf_weights import GgufWeights
from engine.model.hf_config import read_hf_config
from engine.model.hf_weights import HfWeights
from engine.model.interface import LanguageModel
from engine.model.llama import LlamaModel
from engine.model.rope import inverse_frequencies
from engine.model.source import resolve_model
from engine.model.weights import (
    LayerWeights,
    LlamaWeights,
    WeightReader,
    check_complete,
    load_ends,
    load_layer,
    parameter_shapes,
    weights_fingerprint,
)

_NUM_LOADING_THREADS = 2
"""Dequantizing is bound by memory; more threads gain little and hold more layers at once."""
_FP32_BYTES = 4


def load_config(source: str) -> ModelConfig:
    """Read a model's config without its weights.

    Args:
        source: A name as `resolve_model` takes it.

    Raises:
        InvalidRequest: No such model, or one that is not supported; names the field `model`.
    """
    found = resolve_model(source)
    return read_gguf_config(GgufFile(found.path)) if found.kind == "gguf" else read_hf_config(found.path)


def open_weights(source: str) -> tuple[ModelConfig, WeightReader]:
    """Open a model's files, and check that they hold exactly the parameters of its config.

    Raises:
        InvalidRequest: As `load_config`, or a tensor is missing, unused or of the wrong shape.
    """
    found = resolve_model(source)
    reader: WeightReader
    if found.kind == "gguf":
        file = GgufFile(found.path)
        config = read_gguf_config(file)
        reader = GgufWeights(file, config)
    else:
        config = read_hf_config(found.path)
        reader = HfWeights(found.path, config)
    check_complete(config, reader)
    return config, reader


def load_model(
    source: str, *, device: torch.device | None = None, progress: Callable[[int, int], None] | None = None
) -> LanguageModel:
    """Load a model for the plain path: weights in fp32 on `device`.

    Args:
        source: A name as `resolve_model` takes it.
        device: Where to put the weights; None = the CPU.
        progress: Called on this thread with (bytes loaded, bytes in all), counted as fp32, after each part; the last
            call has both equal.

    Raises:
        InvalidRequest: As `open_weights`.
    """
    device = device or torch.device("cpu")
    config, reader = open_weights(source)
    kernels = TorchKernels()
    weights = _load_weights(config, reader, kernels, device, progress or (lambda done, total: None))
    fingerprint = weights_fingerprint(config, reader, weights.inverse_frequencies)
    return LlamaModel(config, weights, fingerprint, kernels, device)


def _load_weights(
    config: ModelConfig,
    reader: WeightReader,
    kernels: Kernels,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> LlamaWeights:
    factors = reader.rope_factors()
    if factors is not None and factors.shape != (config.head_dim // 2,):
        raise InvalidRequest("model", f"rotary factors have shape {list(factors.shape)}, not [{config.head_dim // 2}]")
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
