"""Tiny models on disk, written once a session and shared by the oracle tests."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

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
