"""Which draft head goes with which model: finding the file, checking that it fits, and the kernels it runs on."""

from importlib.resources import files
from pathlib import Path

from engine.config import ModelConfig
from engine.model.cpu.model import NativeModel
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.spec.head.eager import TorchDraftHead
from engine.spec.head.follower import HeadFollower
from engine.spec.head.format import load_head
from engine.spec.head.native import NativeDraftHead
from engine.spec.head.port import DraftHead
from kvrelay.errors import InvalidRequest

_SHIPPED = "heads"
_FIELD = "draft_head"


def shipped_heads() -> list[Path]:
    """Return the heads that come with the project."""
    folder = Path(str(files("engine.spec"))) / _SHIPPED
    return sorted(folder.glob("*.safetensors"))


def load_draft_head(model: LanguageModel, path: str) -> DraftHead:
    """Load a head beside its target.

    Args:
        model: The target.
        path: The head's file; empty = the shipped one that fits the target.

    Raises:
        InvalidRequest: There is no such head, it does not fit, or the target's kernels hand out no hidden states; names
            `draft_head`.
    """
    target = _tapped(model)
    file = load_head(find_head(model.config, path), model.config)
    return NativeDraftHead(target, file) if isinstance(target, NativeModel) else TorchDraftHead(target, file)


def follow(model: LanguageModel, head: DraftHead, kv_cache: KvCache) -> HeadFollower:
    """Join a head to its target and the target's cache, which has one layer more.

    Raises:
        InvalidRequest: As `load_draft_head` for the model; as `HeadFollower` for the cache.
    """
    return HeadFollower(_tapped(model), head, kv_cache)


def _tapped(model: LanguageModel) -> NativeModel | LlamaModel:
    if isinstance(model, NativeModel | LlamaModel):
        return model
    raise InvalidRequest(_FIELD, "this model's kernels hand out no hidden states, which native and torch ones do")


def find_head(config: ModelConfig, path: str) -> Path:
    """Return the file of a target's head, read once to see that it fits.

    Args:
        config: The target's.
        path: The head's file; empty = the shipped one that fits the target.

    Raises:
        InvalidRequest: There is no such head, or it does not fit; names `draft_head`.
    """
    if path:
        load_head(Path(path), config)
        return Path(path)
    for shipped in shipped_heads():
        try:
            load_head(shipped, config)
        except InvalidRequest:
            continue
        return shipped
    raise InvalidRequest(_FIELD, "none of those that come with kvrelay fits this model; name a file")
