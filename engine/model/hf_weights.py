"""Parameters from a Hugging Face folder of safetensors files, one or sharded.

Upcasts to fp32; refuses integer and fp8 checkpoints. Implements `weights.WeightReader`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import InvalidRequest
from engine.model.weights import EMBEDDING, LM_HEAD

_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")
# Constants that old versions of transformers saved beside the parameters; they follow from the config.
_COMPUTED_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class HfWeights:
    """The open files of a folder."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """Open all files and read their directories.

        Raises:
            InvalidRequest: Files are missing, damaged, or hold element types that are not supported. Names `model`.
        """
        self._files: dict[str, safe_open] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            self._open(path)
        if config.tie_embeddings and LM_HEAD in self._shapes:
            # Some checkpoints store the tied matrix twice. A second one that differs is not tied at all.
            if not torch.equal(self.read(LM_HEAD), self.read(EMBEDDING)):
                raise InvalidRequest("model", f"{LM_HEAD} differs from {EMBEDDING} although config.json ties them")
            del self._shapes[LM_HEAD]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """See `WeightReader.shapes`."""
        return self._shapes

    def stored_name(self, parameter: str) -> str:
        """See `WeightReader.stored_name`: parameters go by these names."""
        return parameter

    def read(self, parameter: str) -> Tensor:
        """See `WeightReader.read`."""
        values: Tensor = self._files[parameter].get_tensor(parameter)
        return values.float()

    def read_first_row(self, parameter: str) -> Tensor:
        """See `WeightReader.read_first_row`."""
        if len(self._shapes[parameter]) == 1:
            return self.read(parameter)
        row: Tensor = self._files[parameter].get_slice(parameter)[0]
        return row.float()

    def rope_factors(self) -> Tensor | None:
        """See `WeightReader.rope_factors`: they follow from the config."""
        return None

    def _open(self, path: Path) -> None:
        try:
            file = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 - no mapping, only this method
                if _COMPUTED_BUFFER.fullmatch(name):
                    continue
                entry = file.get_slice(name)
                if (dtype := entry.get_dtype()) not in _DTYPES:
                    raise InvalidRequest("model", f"tensor {name} has the unsupported type {dtype}")
                if name in self._files:
                    raise InvalidRequest("model", f"tensor {name} is in more than one file")
                self._files[name] = file
                self._shapes[name] = tuple(entry.get_shape())
        except (SafetensorError, OSError) as error:
            raise InvalidRequest("model", f"{path} is truncated or no valid safetensors file: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint: those of the index, or every safetensors file where there is none."""
    index_path = folder / _INDEX
    if not index_path.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InvalidRequest("model", f"{folder} has no safetensors files")
        return files
    try:
        names = {str(name) for name in json.loads(index_path.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest("model", f"{index_path} is no valid index: {error}") from error
    for name in sorted(names):
        if Path(name).name != name:
            raise InvalidRequest("model", f"{index_path} names a file outside the folder: {name}")
        if not (folder / name).is_file():
            raise InvalidRequest("model", f"{folder} lacks {name}, which its index names")
    return [folder / name for name in sorted(names)]
