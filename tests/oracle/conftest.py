"""Tiny models on disk, written once a session and shared by the oracle tests, and the real one's tokenizer."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.model.files.gguf_file import GgufFile
from tests.tiny_models import write_tiny_gguf, write_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family of `TINY_FAMILIES` in safetensors."""
    root = tmp_path_factory.mktemp("tiny")
    return cache(lambda family: write_tiny_model(root / family, family))


@pytest.fixture(scope="session")
def tiny_gguf(tiny_folder: Callable[[str], Path]) -> Callable[[str], Path]:
    """The same model as fp32 GGUF."""
    return cache(lambda family: write_tiny_gguf(tiny_folder(family), tiny_folder(family).with_suffix(".gguf")))


@pytest.fixture(scope="session")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    """SmolLM2's, put together from the file's metadata without the engine's own reader of tokenizers."""
    metadata = GgufFile(smollm2_gguf).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    vocabulary = {str(token): index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (str(merge).split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
