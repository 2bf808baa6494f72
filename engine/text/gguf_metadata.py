"""Reads the key-value metadata of a GGUF file without touching its tensors.

Owns the parsing of GGUF versions 2 and 3, little-endian, with every length checked against the file's size. The `gguf`
package's reader takes seconds for a vocabulary of 49k tokens; this takes a tenth of one. Weights are read elsewhere.
"""

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

from engine.errors import InvalidRequest

GgufValue: TypeAlias = "bool | int | float | str | list[GgufValue]"

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DEPTH: Final = 2
_MAX_ENTRIES: Final = 1 << 20


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
            return _Reader(data, path).read(wanted)
    except (OSError, ValueError) as error:
        # mmap refuses an empty file with ValueError.
        raise InvalidRequest("model", f"cannot read {path}: {error}") from error


class _Reader:
    """A cursor over the file; every step checks that it stays inside."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self._offset = 0

    def read(self, wanted: Callable[[str], bool]) -> dict[str, GgufValue]:
        if self._take(4) != _MAGIC:
            raise self._broken("it does not start with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise self._broken(f"its version is {version}, and only 2 and 3 (little-endian) are supported")
        self._scalar("Q")  # the number of tensors
        num_entries = int(self._scalar("Q"))
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
        return values

    def _broken(self, why: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self._path} is not a sound GGUF file: {why}")

    def _advance(self, num_bytes: int) -> int:
        start = self._offset
        if num_bytes > self._size - start:
            raise self._broken(f"it ends inside its metadata, at byte {start}")
        self._offset = start + num_bytes
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
        # Every element takes at least a byte: a larger count cannot be true and must not cost memory.
        if count > self._size - self._offset:
            raise self._broken(f"it claims an array of {count} elements")
        return kind, count

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
        unpack_length, data, size, offset = struct.Struct("<Q").unpack_from, self._data, self._size, self._offset
        strings: list[GgufValue] = []
        for _ in range(count):
            if size - offset < 8:
                raise self._broken(f"it ends inside its metadata, at byte {offset}")
            length = unpack_length(data, offset)[0]
            offset += 8
            if length > size - offset:
                raise self._broken(f"it ends inside its metadata, at byte {offset}")
            strings.append(data[offset : offset + length].decode("utf-8", errors="replace"))
            offset += length
        self._offset = offset
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
