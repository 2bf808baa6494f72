"""The GGUF container: metadata and tensors by name, read in milliseconds. Torch-free.

`kvrelay/formats/gguf_header.py` parses the header; types, sizes and dequantization come from the `gguf` package. What
the keys and tensors mean is in `gguf_config.py` and `gguf_weights.py`.
"""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from kvrelay.errors import InvalidRequest, shown
from kvrelay.formats.gguf_header import GgufValue, read_gguf_header

_DEFAULT_ALIGNMENT = 32


def _can_dequantize(kind: gguf.GGMLQuantizationType) -> bool:
    _, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, num_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


_DEQUANTIZED_TYPES = frozenset(kind for kind in gguf.GGMLQuantizationType if _can_dequantize(kind))
"""Types that `GgufFile.dequantize` can read; files are refused for others before anything is read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Directory entry of one tensor."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in numpy (the file has it the other way round)."""
    type: gguf.GGMLQuantizationType
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GgufFile:
    """An open GGUF file: metadata and tensors by name. The data stays mapped while arrays of it live."""

    path: Path
    metadata: dict[str, GgufValue]
    tensors: dict[str, GgufTensor]

    def __init__(self, path: Path) -> None:
        """Read the header and check that every tensor lies inside the file.

        Raises:
            InvalidRequest: No readable, complete GGUF file; names the field `model`.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise InvalidRequest("model", f"{path} cannot be read: {error}") from error
        try:
            self._read_header()
        except ValueError as error:
            raise InvalidRequest("model", f"{path} is no valid GGUF file: {error}") from error

    def dequantize(self, name: str, num_rows: int | None = None) -> npt.NDArray[np.float32]:
        """Read one tensor as fp32. The array may be a read-only view of the file.

        Args:
            name: Name of the tensor.
            num_rows: Read only so many entries of the outermost dimension of a matrix; None = all.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        # Rows of quantized types are whole numbers of quantization blocks.
        rows = raw.reshape(*tensor.shape[:-1], -1)[:num_rows]
        with np.errstate(all="ignore"):  # a damaged file's scales may be infinite; then so are its values
            values: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, tensor.type)
        return values

    def _read_header(self) -> None:
        header = read_gguf_header(self._map, self.path)
        self.metadata = header.metadata
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment must be a positive integer, not {shown(alignment)}")
        data_start = -(-header.num_bytes // alignment) * alignment
        self.tensors = {}
        for entry in header.tensors:
            name = shown(entry.name)[1:-1]
            if entry.type_id not in _DEQUANTIZED_TYPES:
                raise ValueError(f"tensor {name} has the unsupported type {_type_name(entry.type_id)}")
            quantization = gguf.GGMLQuantizationType(entry.type_id)
            num_bytes = _tensor_bytes(name, entry.shape, quantization)
            if data_start + entry.offset + num_bytes > len(self._map):
                raise ValueError(f"tensor {name} ends behind the end of the file")
            if entry.name in self.tensors:
                raise ValueError(f"tensor {name} occurs twice")
            offset = data_start + entry.offset
            self.tensors[entry.name] = GgufTensor(entry.name, entry.shape, quantization, offset, num_bytes)


def _type_name(type_id: int) -> str:
    names = {int(kind): str(kind.name) for kind in gguf.GGMLQuantizationType}
    return names.get(type_id, str(type_id))


def _tensor_bytes(name: str, shape: tuple[int, ...], quantization: gguf.GGMLQuantizationType) -> int:
    sizes: tuple[int, int] = gguf.GGML_QUANT_SIZES[quantization]
    block_elements, block_bytes = sizes
    if 0 in shape:
        raise ValueError(f"tensor {name} has shape {list(shape)}, which holds nothing")
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {quantization.name}")
    return math.prod(shape) // block_elements * block_bytes
