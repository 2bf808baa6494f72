"""The real SmolLM2 tokenizer, loaded once, and small synthetic GGUF files."""

from pathlib import Path

import pytest

from engine.model.files.source import resolve_model
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("smollm2").path


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)
