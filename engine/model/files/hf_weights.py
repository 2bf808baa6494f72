"""Parameters from a Hugging Face folder of safetensors files, one or sharded.

Upcasts to fp32; refuses integer and fp8 checkpoints. Implements `weights.WeightReader`.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import ModelConfig
from engine.model.files.config_checks import check_layer_count
from engine.model.weights import EMBEDDING, LM_HEAD
from kvrelay.errors import InvalidRequest, shown
from kvrelay.formats.json_fields import read_json

_log = structlog.get_logger(__name__)

_SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-(?P<number>\d{1,6})-of-(?P<total>\d{1,6})\.safetensors")
_MAX_LOGGED = 8
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
        check_layer_count(config.num_layers, len(self._shapes), f"{folder / 'config.json'}: num_hidden_layers")
        if config.tie_embeddings and LM_HEAD in self._shapes and self._shapes[LM_HEAD] == self._shapes.get(EMBEDDING):
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
                    raise InvalidRequest("model", f"tensor {shown(name)[1:-1]} has the unsupported type {dtype}")
                if name in self._files:
                    raise InvalidRequest("model", f"tensor {shown(name)[1:-1]} is in more than one file")
                self._files[name] = file
                self._shapes[name] = tuple(entry.get_shape())
        except (SafetensorError, OSError) as error:
            raise InvalidRequest(
                "model", f"{path} is truncated or no valid safetensors file: {shown(str(error))}"
            ) from error


def _weight_files(folder: Path) -> list[Path]:
    """The files that make up the checkpoint; others beside them, an adapter's for example, are named in the log.

    model.safetensors.index.json    the shards that it names
    model.safetensors               that one
    model-00001-of-00003...         all of them, where the index got lost
    """
    if (folder / _INDEX).is_file():
        files = _shards_of_index(folder)
    elif (folder / _SINGLE).is_file():
        files = [folder / _SINGLE]
    else:
        files = _numbered_shards(folder)
    others = sorted(path.name for path in folder.glob("*.safetensors") if path not in files)
    if others:
        _log.info("model.files_ignored", folder=str(folder), files=others[:_MAX_LOGGED], num_files=len(others))
    return files


def _shards_of_index(folder: Path) -> list[Path]:
    path = folder / _INDEX
    values = read_json(path).mapping("weight_map").values()
    names = {name for name in values if isinstance(name, str)}
    for value in values:
        if not isinstance(value, str):
            raise InvalidRequest("model", f"{path}: weight_map must name files, not {shown(value)}")
    for name in names:
        if Path(name).name != name:
            raise InvalidRequest("model", f"{path} names a file outside the folder: {shown(name)}")
        if not os.path.isfile(folder / name):  # unlike the method of Path, false for what can be no name
            raise InvalidRequest("model", f"{folder} lacks {shown(name)[1:-1]}, which its index names")
    if not names:
        raise InvalidRequest("model", f"{path}: weight_map names no file")
    return [folder / name for name in sorted(names)]


def _numbered_shards(folder: Path) -> list[Path]:
    found = {path.name: match for path in folder.glob("*.safetensors") if (match := _SHARD.fullmatch(path.name))}
    totals = {match["total"] for match in found.values()}
    if not found:
        others = sorted(path.name for path in folder.glob("*.safetensors"))
        hint = f"; {shown(others[0])} is none of them" if others else ""
        raise InvalidRequest(
            "model", f"{folder} has no safetensors files: neither {_SINGLE} nor model-00001-of-...{hint}"
        )
    if len(totals) > 1:
        raise InvalidRequest("model", f"{folder} has shards of several checkpoints: of {', '.join(sorted(totals))}")
    total = int(totals.pop())
    numbers = {int(match["number"]) for match in found.values()}
    # Counted before they are listed: the total is only a part of a name.
    if len(numbers) < total:
        missing = next(number for number in range(1, total + 1) if number not in numbers)
        raise InvalidRequest("model", f"{folder} has {len(found)} of {total} shards; number {missing} is missing")
    return [folder / name for name in sorted(found)]
