"""The two messages of `KvTransferService.Transfer` as bytes.

They are exactly the wire form of `kvrelay.v1.TransferRequest` and `TransferResponse` (a test compares them with the
generated classes), written and read by hand because a payload passes through the generated classes with three more
copies. Next: `connection.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kv_transfer.frame import FrameError

_HEADER_TAG = 1 << 3 | 2
_PAYLOAD_TAG = 2 << 3 | 2
_MORE_TAG = 3 << 3
_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Part:
    """A frame, or a part of one."""

    header: bytes
    """The frame's header; empty in the continuation of a split payload."""
    payload: memoryview
    more: bool
    """Whether the payload goes on in the next message."""


def encode_part(part: Part) -> bytes:
    """Return the message; the payload is copied once."""
    pieces: list[bytes | memoryview] = []
    if part.header:
        pieces += [bytes([_HEADER_TAG]), _varint(len(part.header)), part.header]
    if part.more:
        pieces += [bytes([_MORE_TAG, 1])]
    if len(part.payload):
        pieces += [bytes([_PAYLOAD_TAG]), _varint(len(part.payload)), part.payload]
    return b"".join(pieces)


def decode_part(message: bytes) -> Part:
    """Parse a message; the payload is a view of it. Fields that this version does not know are skipped.

    Raises:
        FrameError: The bytes are not such a message.
    """
    header, payload, more = b"", _EMPTY, False
    for tag, value in _fields(memoryview(message)):
        if tag == _HEADER_TAG and isinstance(value, memoryview):
            header = bytes(value)
        elif tag == _PAYLOAD_TAG and isinstance(value, memoryview):
            payload = value
        elif tag == _MORE_TAG:
            more = bool(value)
    return Part(header, payload, more)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise FrameError("a transfer message ends inside a number")
        byte = data[position]
        position += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, position
        shift += 7


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        match tag & 7:
            case 0:
                value, position = _read_varint(data, position)
                yield tag, value
                continue
            case 1:
                length = 8
            case 2:
                length, position = _read_varint(data, position)
            case 5:
                length = 4
            case _:
                raise FrameError(f"a transfer message has a field of wire type {tag & 7}")
        if length > len(data) - position:
            raise FrameError("a transfer message is shorter than it says")
        yield tag, data[position : position + length]
        position += length
