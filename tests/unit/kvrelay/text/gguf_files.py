"""Writes small GGUF files with a tokenizer and no tensors."""

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

Value = bool | int | float | str | Sequence[str] | Sequence[int] | Sequence[float]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def _string(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<Q", len(data)) + data


def _typed(value: bool | int | float | str) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 5, struct.pack("<i", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    return 8, _string(value)


def _entry(value: Value) -> bytes:
    if isinstance(value, bool | int | float | str):
        kind, data = _typed(value)
        return struct.pack("<I", kind) + data
    items = [_typed(item) for item in value]
    kind = items[0][0] if items else 8
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(data for _, data in items)


def gguf_bytes(metadata: Mapping[str, Value], version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, 0, len(metadata))
    return head + b"".join(_string(key) + _entry(value) for key, value in metadata.items())


def write_gguf(path: Path, metadata: Mapping[str, Value]) -> Path:
    path.write_bytes(gguf_bytes(metadata))
    return path
