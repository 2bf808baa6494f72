"""The GGUF container: metadata and the tensor directory, read in milliseconds. Torch-free.

Parses the header itself because the `gguf` package takes seconds over a vocabulary's 100,000 strings; types, sizes and
dequantization come from that package. What the keys and tensors mean is in `gguf_model.py` and in the tokenizer.

Format (little-endian, version 2 and 3):

    "GGUF" | version u32 | num_tensors u64 | num_metadata u64
    metadata:  key string | type u32 | value      string = length u64 + UTF-8; array = item type u32, count u64, items
    tensors:   name string | num_dims u32 | dims u64[] (innermost first) | type u32 | offset u64 (in the data part)
    padding to `general.alignment` (32) | data
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from engine.errors import InvalidRequest

GgufValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
"""A metadata value. Arrays of arrays do not occur in models and are refused."""

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 8


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
            self._parse()
        except (struct.error, OverflowError, ValueError) as error:  # undecodable text is a ValueError
            raise InvalidRequest("model", f"{path} is truncated or no valid GGUF file: {error}") from error

    def dequantize(self, name: str, num_rows: int | None = None) -> npt.NDArray[np.float32]:
        """Read one tensor as fp32. The array may be a read-only view of the file.

        Args:
            name: Name of the tensor.
            num_rows: Read only so many entries of the outermost dimension of a matrix; None = all.

        Raises:
            InvalidRequest: Its quantization type is not supported.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        # Rows of quantized types are whole numbers of quantization blocks.
        rows = raw.reshape(*tensor.shape[:-1], -1)[:num_rows]
        try:
            values: npt.NDArray[np.float32] = gguf.quants.dequantize(rows, tensor.type)
        except NotImplementedError as error:
            raise InvalidRequest("model", f"tensor {name} has the unsupported type {tensor.type.name}") from error
        return values

    def _parse(self) -> None:
        cursor = _Cursor(self._map)
        if cursor.take(4) != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not supported, only {_VERSIONS}")
        num_tensors, num_metadata = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata = {}
        for _ in range(num_metadata):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = [cursor.tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors = {}
        for name, shape, type_id, offset in entries:
            quantization = gguf.GGMLQuantizationType(type_id)
            num_bytes = _tensor_bytes(name, shape, quantization)
            if data_start + offset + num_bytes > len(self._map):
                raise ValueError(f"tensor {name} ends behind the end of the file")
            if name in self.tensors:
                raise ValueError(f"tensor {name} occurs twice")
            self.tensors[name] = GgufTensor(name, shape, quantization, data_start + offset, num_bytes)


def _tensor_bytes(name: str, shape: tuple[int, ...], quantization: gguf.GGMLQuantizationType) -> int:
    sizes: tuple[int, int] = gguf.GGML_QUANT_SIZES[quantization]
    block_elements, block_bytes = sizes
    if shape[-1] % block_elements:
        raise ValueError(f"tensor {name}: rows of {shape[-1]} are no whole blocks of {quantization.name}")
    return math.prod(shape) // block_elements * block_bytes


class _Cursor:
    """Reads typed values one after another. Slices past the end come short and make `struct` raise."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        """The next bytes, all of them."""
        end = self.position + num_bytes
        if end > len(self._data):
            raise ValueError(f"{num_bytes} bytes at {self.position} end behind the end of the file")
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def scalar(self, code: str) -> int:
        """One integer of a `struct` code."""
        value: int = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]
        return value

    def string(self) -> str:
        """A string with its length before it."""
        return self.take(self.scalar("Q")).decode()

    def value(self, type_id: int) -> GgufValue:
        """A metadata value of a type."""
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            item_type, count = self.scalar("I"), self.scalar("Q")
            return self._strings(count) if item_type == _STRING else self._scalars(item_type, count)
        value: int | float | bool = self._scalars(type_id, 1)[0]
        return value

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """One directory entry: name, shape, type id, offset in the data part."""
        name = self.string()
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        dims = struct.unpack(f"<{num_dims}Q", self.take(8 * num_dims))
        return name, dims[::-1], self.scalar("I"), self.scalar("Q")

    def _scalars(self, type_id: int, count: int) -> list[int] | list[float] | list[bool]:
        if type_id not in _SCALARS:
            raise ValueError(f"metadata type {type_id} is not known here")
        code = _SCALARS[type_id]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))

    def _strings(self, count: int) -> list[str]:
        # The vocabulary: the one place where a header is long, so without a call per string.
        data, position, strings = self._data, self.position, []
        unpack_length = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = position + 8
            position = start + unpack_length(data, position)[0]
            strings.append(data[start:position].decode())
        if position > len(data):
            raise ValueError("a string ends behind the end of the file")
        self.position = position
        return strings
