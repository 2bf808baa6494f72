"""Reads the header of a GGUF file: key-value metadata and the directory of tensors. Torch-free, reads no weights.

Owns the parsing of GGUF versions 2 and 3, little-endian, with every length checked against the file's size. The `gguf`
package's reader takes seconds for a vocabulary of 49k tokens; this takes a tenth of one.

    "GGUF" | version u32 | num_tensors u64 | num_metadata u64
    metadata:  key string | type u32 | value      string = length u64 + UTF-8; array = item type u32, count u64, items
    tensors:   name string | num_dims u32 | dims u64[] (innermost first) | type u32 | offset u64 (in the data part)
    padding to `general.alignment` | data

What the keys mean is the tokenizer's matter and `engine/model/files/gguf_config.py`'s, what the data means that of
`engine/model/files/gguf_file.py`.
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from kvrelay.errors import InvalidRequest, shown

GgufValue: TypeAlias = "bool | int | float | str | list[GgufValue]"

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DEPTH: Final = 2
_MAX_ENTRIES: Final = 1 << 20
_MAX_ELEMENTS: Final = 1 << 24
"""Of an array. A vocabulary has fewer than 2^20; an element takes up to 60 times its place in the file once read."""
_MAX_DIMS: Final = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the directory has it."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as in numpy (the file has it the other way round)."""
    type_id: int
    """Number of its element type in GGML."""
    offset: int
    """Bytes from the start of the data part."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the data."""

    metadata: dict[str, GgufValue]
    tensors: tuple[TensorEntry, ...]
    num_bytes: int
    """Where the header ends; the data begins at the next multiple of the alignment."""


def read_gguf_header(data: mmap.mmap, path: Path) -> GgufHeader:
    """Return a mapped file's header.

    Args:
        data: The whole file.
        path: For messages.

    Raises:
        InvalidRequest: It is not a sound GGUF file; names the field `model`.
    """
    reader = _Reader(data, path)
    num_tensors, metadata = reader.read(lambda _key: True)
    tensors = tuple(reader.tensor() for _ in range(num_tensors))
    return GgufHeader(metadata, tensors, reader.offset)


def read_gguf_metadata(path: Path, wanted: Callable[[str], bool] = lambda _key: True) -> dict[str, GgufValue]:
    """Return the file's metadata.

    Args:
        path: The GGUF file.
        wanted: Which keys are returned; the others are only stepped over.

    Raises:
        InvalidRequest: The file cannot be read or is not a sound GGUF file; names the field `model`.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path).read(wanted)[1]
    except (OSError, ValueError) as error:
        # mmap refuses an empty file with ValueError.
        raise InvalidRequest("model", f"cannot read {path}: {error}") from error


class _Reader:
    """A cursor over the file; every step checks that it stays inside."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self.offset = 0

    def read(self, wanted: Callable[[str], bool]) -> tuple[int, dict[str, GgufValue]]:
        """The number of tensors, and the wanted metadata; the directory of tensors comes next."""
        if self._take(4) != _MAGIC:
            raise self._broken("it does not start with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}, and only 2 and 3 (little-endian) are supported")
        num_tensors, num_entries = int(self._scalar("Q")), int(self._scalar("Q"))
        if num_tensors > _MAX_ENTRIES:
            raise self._broken(f"it claims {num_tensors} tensors")
        if num_entries > _MAX_ENTRIES:
            raise self._broken(f"it claims {num_entries} metadata entries")
        values: dict[str, GgufValue] = {}
        for _ in range(num_entries):
            key = self._string()
            kind = int(self._scalar("I"))
            if wanted(key):
                values[key] = self._value(kind, 0)
            else:
                self._skip(kind, 0)
        return num_tensors, values

    def tensor(self) -> TensorEntry:
        """The next entry of the directory."""
        name, num_dims = self._string(), int(self._scalar("I"))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._broken(f"tensor {shown(name)} has {num_dims} dimensions")
        dims = [int(self._scalar("Q")) for _ in range(num_dims)]
        return TensorEntry(name, tuple(reversed(dims)), int(self._scalar("I")), int(self._scalar("Q")))

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self._path} is not a sound GGUF file: {why}")

    def _advance(self, num_bytes: int) -> int:
        start = self.offset
        if num_bytes > self._size - start:
            raise self._broken(f"it ends inside its header, at byte {start}")
        self.offset = start + num_bytes
        return start

    def _take(self, num_bytes: int) -> bytes:
        start = self._advance(num_bytes)
        return self._data[start : start + num_bytes]

    def _scalar(self, code: str) -> int | float | bool:
        start = self._advance(struct.calcsize("<" + code))
        value: int | float | bool = struct.unpack_from("<" + code, self._data, start)[0]
        return value

    def _string(self) -> str:
        return self._take(int(self._scalar("Q"))).decode("utf-8", errors="replace")

    def _value(self, kind: int, depth: int) -> GgufValue:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(depth)
        return self._scalar(self._code(kind))

    def _code(self, kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._broken(f"it holds a value of the unknown type {kind}")
        return code

    def _array_head(self, depth: int) -> tuple[int, int]:
        if depth >= _MAX_DEPTH:
            raise self._broken("its arrays are nested too deeply")
        kind, count = int(self._scalar("I")), int(self._scalar("Q"))
        # A count that the rest of the file has no room for cannot be true and must not cost memory.
        if count > min(_MAX_ELEMENTS, (self._size - self.offset) // self._least_bytes(kind)):
            raise self._broken(f"it claims an array of {count} elements")
        return kind, count

    def _least_bytes(self, kind: int) -> int:
        """Bytes that a value takes at least: strings and arrays begin with their length."""
        return {_STRING: 8, _ARRAY: 12}.get(kind) or struct.calcsize("<" + self._code(kind))

    def _array(self, depth: int) -> GgufValue:
        kind, count = self._array_head(depth)
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(count)]
        code = self._code(kind)
        start = self._advance(count * struct.calcsize("<" + code))
        return list(struct.unpack_from(f"<{count}{code}", self._data, start))

    def _strings(self, count: int) -> GgufValue:
        # The one hot loop: a vocabulary is 100,000 strings.
        unpack_length, data, size, offset = struct.Struct("<Q").unpack_from, self._data, self._size, self.offset
        strings: list[GgufValue] = []
        for _ in range(count):
            if size - offset < 8:
                raise self._broken(f"it ends inside its header, at byte {offset}")
            length = unpack_length(data, offset)[0]
            offset += 8
            if length > size - offset:
                raise self._broken(f"it ends inside its header, at byte {offset}")
            strings.append(data[offset : offset + length].decode("utf-8", errors="replace"))
            offset += length
        self.offset = offset
        return strings

    def _skip(self, kind: int, depth: int) -> None:
        if kind == _STRING:
            self._advance(int(self._scalar("Q")))
        elif kind == _ARRAY:
            inner, count = self._array_head(depth)
            if inner in (_STRING, _ARRAY):
                for _ in range(count):
                    self._skip(inner, depth + 1)
            else:
                self._advance(count * struct.calcsize("<" + self._code(inner)))
        else:
            self._advance(struct.calcsize("<" + self._code(kind)))
