"""Random draft heads for tiny models, as files."""

from pathlib import Path

import torch

from engine.config import ModelConfig
from engine.spec.head.format import DraftHeadFile, save_head, weight_shapes


def make_tiny_head(
    config: ModelConfig, *, tap_layers: tuple[int, ...] = (0, 1), num_vocab_ids: int = 100, seed: int = 0
) -> DraftHeadFile:
    """Return a head whose weights keep activations at about the size of their input; its guesses are random."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config, len(tap_layers)).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            weights[name] = torch.randn(shape, generator=generator) * 1.2 * shape[-1] ** -0.5
    ids = torch.randperm(config.vocab_size, generator=generator)[:num_vocab_ids].sort().values
    return DraftHeadFile(
        tap_layers, ids.to(torch.int32), {name: weight.half() for name, weight in weights.items()}, 1e-5
    )


def write_tiny_head(path: Path, config: ModelConfig, *, seed: int = 0) -> Path:
    """Write one; returns the path."""
    save_head(path, make_tiny_head(config, seed=seed), config)
    return path
