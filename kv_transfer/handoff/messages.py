"""Payloads of the control frames: fixed structs and length-prefixed strings, bounded before they are read.

Pure values with `encode` and `decode`; `decode` raises `FrameError` for anything that is not exactly such a payload.
"""

import struct
from dataclasses import dataclass, field
from typing import Final

from engine.cache.layout import KvDtype, KvLayout
from engine.types import Incarnation, WorkerId
from engine.worker_types import TICKET_BYTES
from kv_transfer.frame import FrameError
from kvrelay.errors import (
    CapacityError,
    ChecksumMismatch,
    CoverageIncomplete,
    EngineError,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    PeerUnavailable,
    StaleEpoch,
    TransferError,
)

MAX_STRING_BYTES = 1024
MAX_RECORD_BYTES = 512 << 10
"""Largest hand-off record inside COMMIT."""

_HELLO = struct.Struct("<QIIII")
_DRAFT_LAYERS = struct.Struct("<I")
_OPEN = struct.Struct(f"<{TICKET_BYTES}sII")
_COMMIT = struct.Struct("<QIQQI")
_CREDIT = struct.Struct("<Q")
_LENGTH = struct.Struct("<H")


def _pack_string(text: str) -> bytes:
    data = text.encode(errors="replace")
    if len(data) > MAX_STRING_BYTES:
        # Cutting inside a character would make the peer refuse the whole payload.
        data = data[:MAX_STRING_BYTES].decode(errors="ignore").encode()
    return _LENGTH.pack(len(data)) + data


class _Reader:
    """Takes a payload apart from front to back."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def _take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._data):
            raise FrameError("a control payload is shorter than it says")
        head, self._data = self._data[:num_bytes], self._data[num_bytes:]
        return head

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self._take(layout.size))

    def blob(self, num_bytes: int) -> bytes:
        return bytes(self._take(num_bytes))

    def string(self) -> str:
        (length,) = self.numbers(_LENGTH)
        if length > MAX_STRING_BYTES:
            raise FrameError(f"a string of {length} bytes is over {MAX_STRING_BYTES}")
        try:
            return self.blob(length).decode()
        except UnicodeDecodeError as error:
            raise FrameError("a string is not UTF-8") from error

    @property
    def is_at_end(self) -> bool:
        return not len(self._data)

    def end(self) -> None:
        if len(self._data):
            raise FrameError(f"{len(self._data)} bytes follow a control payload")


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is speaking and what its KV looks like."""

    worker_id: WorkerId
    incarnation: Incarnation
    layout: KvLayout

    def encode(self) -> bytes:
        """Return the payload of a HELLO frame."""
        numbers = (self.layout.num_layers, self.layout.num_kv_heads, self.layout.head_dim, self.layout.block_size)
        strings = (self.worker_id, self.layout.model_fingerprint, self.layout.dtype)
        # What knows of no draft layers reads and writes a HELLO without them.
        draft_layers = _DRAFT_LAYERS.pack(self.layout.num_draft_layers) if self.layout.num_draft_layers else b""
        return _HELLO.pack(self.incarnation, *numbers) + b"".join(map(_pack_string, strings)) + draft_layers

    @classmethod
    def decode(cls, payload: memoryview) -> "Hello":
        """Parse the payload of a HELLO frame; a dtype this version does not know is a `FrameError`."""
        reader = _Reader(payload)
        incarnation, num_layers, num_kv_heads, head_dim, block_size = reader.numbers(_HELLO)
        worker_id, model_fingerprint, dtype = reader.string(), reader.string(), reader.string()
        (num_draft_layers,) = (0,) if reader.is_at_end else reader.numbers(_DRAFT_LAYERS)
        reader.end()
        for name, number in (("layers", num_layers), ("heads", num_kv_heads), ("head size", head_dim)):
            if not 1 <= number <= 1 << 16:
                raise FrameError(f"a layout with {number} {name} is out of bounds")
        if num_draft_layers >= num_layers:
            raise FrameError(f"{num_draft_layers} of {num_layers} layers cannot be a draft head's")
        if not 1 <= block_size <= 1 << 12:
            raise FrameError(f"a block size of {block_size} tokens is out of bounds")
        try:
            kv_dtype = KvDtype(dtype)
        except ValueError as error:
            raise FrameError("the KV dtype is unknown") from error
        layout = KvLayout(model_fingerprint, num_layers, num_kv_heads, head_dim, block_size, kv_dtype, num_draft_layers)
        return cls(WorkerId(worker_id), Incarnation(incarnation), layout)


@dataclass(frozen=True, slots=True)
class Open:
    """The claim on a reservation."""

    ticket: bytes = field(repr=False)
    start_token: int
    num_tokens: int

    def encode(self) -> bytes:
        """Return the payload of an OPEN frame."""
        return _OPEN.pack(self.ticket, self.start_token, self.num_tokens)

    @classmethod
    def decode(cls, payload: memoryview) -> "Open":
        """Parse the payload of an OPEN frame."""
        if len(payload) != _OPEN.size:
            raise FrameError(f"an OPEN payload has {_OPEN.size} bytes, not {len(payload)}")
        ticket, start_token, num_tokens = _OPEN.unpack(payload)
        return cls(ticket, start_token, num_tokens)


@dataclass(frozen=True, slots=True)
class Commit:
    """The sender's account of what it sent, and the hand-off record."""

    num_bytes: int
    """KV payload bytes sent."""
    num_frames: int
    digest: int
    """`Coverage.digest()`: binds every frame's digest to its place."""
    exposed_ns: int
    """Time since the last layer's KV was ready, at the moment COMMIT was sent."""
    record: bytes
    """Opaque to this layer."""

    def encode(self) -> bytes:
        """Return the payload of a COMMIT frame.

        Raises:
            FrameError: The record is larger than `MAX_RECORD_BYTES`.
        """
        if len(self.record) > MAX_RECORD_BYTES:
            raise FrameError(f"a hand-off record of {len(self.record)} bytes is over {MAX_RECORD_BYTES}")
        head = _COMMIT.pack(self.num_bytes, self.num_frames, self.digest, self.exposed_ns, len(self.record))
        return head + self.record

    @classmethod
    def decode(cls, payload: memoryview) -> "Commit":
        """Parse the payload of a COMMIT frame."""
        reader = _Reader(payload)
        num_bytes, num_frames, digest, exposed_ns, record_bytes = reader.numbers(_COMMIT)
        if record_bytes > MAX_RECORD_BYTES:
            raise FrameError(f"a hand-off record of {record_bytes} bytes is over {MAX_RECORD_BYTES}")
        record = reader.blob(record_bytes)
        reader.end()
        return cls(num_bytes, num_frames, digest, exposed_ns, record)


@dataclass(frozen=True, slots=True)
class Credit:
    """Payload bytes that may be sent: the first grant in ACCEPTED, more in CREDIT."""

    num_bytes: int

    def encode(self) -> bytes:
        """Return the payload of an ACCEPTED or CREDIT frame."""
        return _CREDIT.pack(self.num_bytes)

    @classmethod
    def decode(cls, payload: memoryview) -> "Credit":
        """Parse the payload of an ACCEPTED or CREDIT frame."""
        if len(payload) != _CREDIT.size:
            raise FrameError(f"a credit payload has {_CREDIT.size} bytes, not {len(payload)}")
        (num_bytes,) = _CREDIT.unpack(payload)
        return cls(num_bytes)


_REASONS: Final[dict[str, type[EngineError]]] = {
    kind.reason: kind
    for kind in (
        CapacityError,
        ChecksumMismatch,
        CoverageIncomplete,
        FrameError,
        LayoutMismatch,
        LeaseExpired,
        LeaseUnknown,
        PeerUnavailable,
        StaleEpoch,
        TransferError,
    )
}


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a hand-off ended, for ABORT (sender) and REJECTED (receiver)."""

    reason: str
    """`EngineError.reason` of the error."""
    message: str

    @classmethod
    def of(cls, error: EngineError) -> "Rejection":
        """Describe an error for the peer."""
        return cls(error.reason, str(error))

    def to_error(self) -> EngineError:
        """Return the error that the peer described; an unknown reason becomes a `TransferError`."""
        kind = _REASONS.get(self.reason)
        return TransferError(f"{self.reason}: {self.message}") if kind is None else kind(self.message)

    def encode(self) -> bytes:
        """Return the payload of an ABORT or REJECTED frame; overlong text is cut."""
        return _pack_string(self.reason) + _pack_string(self.message)

    @classmethod
    def decode(cls, payload: memoryview) -> "Rejection":
        """Parse the payload of an ABORT or REJECTED frame."""
        reader = _Reader(payload)
        reason, message = reader.string(), reader.string()
        reader.end()
        return cls(reason, message)
