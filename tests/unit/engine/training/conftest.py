"""A tiny target: its parts with random weights for the mathematics, and a whole checkpoint with a tokenizer."""

from pathlib import Path

import pytest
import tokenizers
import torch

from engine.config import ModelConfig, RopeConfig
from engine.model.rope import inverse_frequencies
from engine.training.target import TargetParts
from tests.tiny_models import TinyFamily, write_tiny_model

VOCAB_SIZE = 320


@pytest.fixture
def target() -> TargetParts:
    config = ModelConfig(
        architecture="llama",
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position=128,
        rope=RopeConfig(theta=100.0),
        tie_embeddings=False,
    )
    generator = torch.Generator().manual_seed(5)
    return TargetParts(
        config,
        torch.randn(40, 16, generator=generator),
        torch.randn(40, 16, generator=generator),
        torch.rand(16, generator=generator) + 0.5,
        inverse_frequencies(config.rope, config.head_dim),
    )


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 320 tokens with a tokenizer of bytes, without a chat template."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny-target"), TinyFamily("Llama", {"num_hidden_layers": 2}))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>", "<end>"]
    vocabulary = {piece: index for index, piece in enumerate([*specials, *letters])}
    vocabulary |= {f"<unused{index}>": index for index in range(len(vocabulary), VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(specials)
    backend.save(str(folder / "tokenizer.json"))
    return folder
