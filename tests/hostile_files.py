"""Damaged model files for tests: bytes and values of sound ones changed at random, as chance or an enemy would.

`GgufParts` takes a file apart into values and writes it again, so that a change leaves everything around it sound.
"""

import copy
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.files.gguf_file import GgufFile
from kvrelay.formats.gguf_header import TensorEntry, read_gguf_header

_EXTREME_INTEGERS = (0, -1, 1, 255, 2**31 - 1, 2**31, 2_000_000_000, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1)
_EXTREME_NUMBERS = (0.0, -1.0, 1e-45, 3.4e38, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "\0", "a" * 5000, "<|im_end|>", "llama", "\ud800", "../../x", "{% for a in b %}", "{{ 1 / 0 }}", "é🙂")


def damaged_bytes(rng: random.Random, content: bytes, header_size: int) -> bytes:
    """The bytes with bits flipped, cut off, repeated, or with 4 or 8 of them made an extreme number."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(max(1, min(header_size, len(changed))))
        match rng.randrange(5):
            case 0:
                changed[position : position + 1] = bytes((changed[position] ^ (1 << rng.randrange(8)),))
            case 1:
                changed[position : position + 1] = rng.randbytes(1)
            case 2:
                size = rng.choice((4, 8))
                value = rng.choice(_EXTREME_INTEGERS) % (1 << 8 * size)
                changed[position : position + size] = value.to_bytes(size, "little")
            case 3:
                del changed[position : position + rng.randint(1, 40)]
            case 4:
                changed[position:position] = changed[position : position + rng.randint(1, 40)]
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    return bytes(changed) or b"\0"


def damaged_value(rng: random.Random, value: Any) -> Any:
    """A JSON value with one or two values inside it changed, moved, wrapped, or taken away."""
    changed = copy.deepcopy(value)
    for _ in range(rng.randint(1, 2)):
        changed = _damaged_once(rng, changed)
    return changed


def _damaged_once(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                del value[key]
            case 1:
                value[rng.choice(list(value))] = value[key]
            case 2:
                value[rng.choice((*_TEXTS[:4], *value))] = value.pop(key)
            case _:
                value[key] = _damaged_once(rng, value[key])
        return value
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        value[index] = _damaged_once(rng, value[index])
        return value
    return rng.choice(
        (
            None,
            True,
            [],
            {},
            [[value]],
            [value] * rng.randrange(1000),
            {"a": value},
            10**400,
            rng.choice(_EXTREME_INTEGERS),
            rng.choice(_EXTREME_NUMBERS),
            rng.choice(_TEXTS),
            str(value)[:100],
        )
    )


@dataclass
class GgufParts:
    """A GGUF file taken apart."""

    metadata: dict[str, Any]
    tensors: list[TensorEntry]
    data: bytes

    @classmethod
    def read(cls, path: Path) -> "GgufParts":
        """Take a file apart."""
        file = GgufFile(path)
        header = read_gguf_header(file._map, path)
        start = -(-header.num_bytes // 32) * 32
        return cls(dict(header.metadata), list(header.tensors), path.read_bytes()[start:])

    def written(self) -> bytes:
        """The file as it is."""
        return _gguf_bytes(self.metadata, self.tensors, self.data)

    def damaged(self, rng: random.Random) -> bytes:
        """The file with a value of its metadata or of its directory changed."""
        metadata, tensors = self.metadata, self.tensors
        if rng.random() < 0.8:
            metadata = damaged_value(rng, metadata)
        else:
            tensors = list(tensors)
            index = rng.randrange(len(tensors))
            tensors[index] = _damaged_tensor(rng, tensors[index])
        return _gguf_bytes(metadata, tensors, self.data)


def _damaged_tensor(rng: random.Random, entry: TensorEntry) -> TensorEntry:
    shape = list(entry.shape)
    shape[rng.randrange(len(shape))] = rng.choice(_EXTREME_INTEGERS) % 2**64
    changes: tuple[Callable[[], TensorEntry], ...] = (
        lambda: TensorEntry(rng.choice(_TEXTS), entry.shape, entry.type_id, entry.offset),
        lambda: TensorEntry(entry.name, tuple(shape), entry.type_id, entry.offset),
        lambda: TensorEntry(entry.name, (*entry.shape, 1), entry.type_id, entry.offset),
        lambda: TensorEntry(entry.name, entry.shape[:1], entry.type_id, entry.offset),
        lambda: TensorEntry(entry.name, entry.shape, rng.randrange(45), entry.offset),
        lambda: TensorEntry(entry.name, entry.shape, entry.type_id, rng.choice(_EXTREME_INTEGERS) % 2**64),
    )
    return rng.choice(changes)()


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> tuple[int, bytes]:
    """A value's type and bytes; what GGUF has no type for becomes text."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int() if 0 <= value < 1 << 32:
            return 4, struct.pack("<I", value)
        case int() if 0 <= value < 1 << 64:
            return 10, struct.pack("<Q", value)
        case int() if -(1 << 31) <= value < 0:
            return 5, struct.pack("<i", value)
        case float() if abs(value) < 3e38:
            return 6, struct.pack("<f", value)
        case float():
            return 12, struct.pack("<d", value)
        case list():
            items = [_typed(item) for item in value]
            kind = items[0][0] if items else 8
            same = [data for item_kind, data in items if item_kind == kind]
            return 9, struct.pack("<IQ", kind, len(same)) + b"".join(same)
        case _:
            return 8, _string(str(value)[:10_000])


def _gguf_bytes(metadata: Any, tensors: list[TensorEntry], data: bytes) -> bytes:
    parts = [b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata) if isinstance(metadata, dict) else 0)]
    for key, value in metadata.items() if isinstance(metadata, dict) else ():
        kind, content = _typed(value)
        parts += [_string(key), struct.pack("<I", kind), content]
    for entry in tensors:
        dims = struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape))
        parts += [_string(entry.name), struct.pack("<I", len(entry.shape)), dims]
        parts.append(struct.pack("<IQ", entry.type_id, entry.offset))
    head = b"".join(parts)
    return head + bytes(-len(head) % 32) + data
