"""The frame: a fixed binary header and a payload, the unit that every transport carries.

Pure encode and decode. Nothing read from a peer is trusted: every length is bounded before it is used, the header has
its own check word and the digest covers header and payload. Meaning of the control payloads:
`kv_transfer/handoff/messages.py`.

    offset  0  magic "KVRF"         4        offset 40  num_layers      u32
            4  version              u8               44  first_block     u32
            5  kind                 u8               48  num_blocks      u32
            6  zero                 u16              52  payload_bytes   u64
            8  lease id             u64              60  digest          u64  xxh3_64([0, 60) + payload)
           16  epoch                u64              68  check           u32  low half of xxh3_64([0, 68))
           24  incarnation          u64
           32  zero                 u32
           36  layer_start          u32     little endian, 72 bytes
"""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

import xxhash

from engine.types import Epoch, Incarnation, LeaseId
from kv_transfer.device import DeviceBytes
from kvrelay.errors import ChecksumMismatch, TransferError

MAGIC = b"KVRF"
VERSION = 1
_SIGNED = struct.Struct("<4sBBHQQQIIIIIQ")
_DIGEST = struct.Struct("<Q")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _SIGNED.size + _DIGEST.size + _CHECK.size
MAX_PAYLOAD_BYTES = 64 << 20
"""Largest payload of a KV frame."""
MAX_CONTROL_BYTES = 1 << 20
"""Largest payload of any other frame."""
MAX_GREETING_BYTES = 4096
"""Largest payload that is taken from a peer that has not said yet who it is; a HELLO stays below it."""
MAX_LAYERS = 4096
MAX_BLOCKS = 1 << 24
"""Bounds on layer and block indexes; real models stay far below."""

_U64 = (1 << 64) - 1
_NO_LEASE = LeaseId(0)
_NO_EPOCH = Epoch(0)
_NO_INCARNATION = Incarnation(0)


class FrameError(TransferError):
    """Bytes from the peer are not a frame. The connection cannot be trusted any further."""

    reason = "FRAME"


class FrameKind(IntEnum):
    """What a frame says. The sender is the exporter, the receiver the importer."""

    HELLO = 1
    """Both ways, first: worker id, incarnation, layout."""
    OPEN = 2
    """Sender: claims a reservation with its ticket."""
    KV = 3
    """Sender: whole blocks, layer after layer."""
    COMMIT = 4
    """Sender: everything was sent; totals, digest and hand-off record."""
    ABORT = 5
    """Sender: gives the hand-off up."""
    ACCEPTED = 6
    """Receiver: OPEN holds; carries the first credit."""
    CREDIT = 7
    """Receiver: that many more payload bytes may come."""
    COMMITTED = 8
    """Receiver: the KV is complete and verified and belongs to decode."""
    REJECTED = 9
    """Receiver: the hand-off is over; carries reason and message. Lease 0 rejects the connection."""


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """The header's fields. For kinds other than KV the four range fields are 0."""

    kind: FrameKind
    lease_id: LeaseId
    epoch: Epoch
    incarnation: Incarnation
    """The importer's process: as the sender believes it, or as the receiver knows it."""
    layer_start: int
    num_layers: int
    first_block: int
    """Index, in the sender's block size, of the first block counted from the start of the sequence."""
    num_blocks: int
    payload_bytes: int
    digest: int


class PayloadBuffer:
    """Writable memory lent by a connection for one outgoing payload.

    Filling it and sending a frame that carries it saves a copy. Exactly one of sending and `release` ends the loan;
    `release` after either does nothing.
    """

    __slots__ = ("_on_release", "device", "location", "owner", "view")

    def __init__(
        self,
        view: memoryview,
        owner: object = None,
        location: int = 0,
        on_release: Callable[[], None] | None = None,
        device: DeviceBytes | None = None,
    ) -> None:
        self.view = view
        self.device = device
        """Where the payload goes instead, if it stays in device memory; `view` is empty then."""
        self.owner = owner
        self.location = location
        self._on_release = on_release

    def release(self) -> None:
        """Give unsent memory back."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def detach(self) -> Callable[[], None] | None:
        """Mark the memory as sent: the transport owns it now and calls what is returned to give it back."""
        on_release, self._on_release = self._on_release, None
        return on_release


class Frame:
    """A header with its payload.

    On the sending side the payload is borrowed until `Connection.send` returns. On the receiving side it stays valid
    until `release`, which hands the memory back to the transport; every received frame must be released once read.
    """

    __slots__ = ("_on_release", "buffer", "device", "header", "payload")

    def __init__(
        self,
        header: FrameHeader,
        payload: memoryview,
        buffer: PayloadBuffer | None = None,
        on_release: Callable[[], None] | None = None,
        device: DeviceBytes | None = None,
    ) -> None:
        self.header = header
        self.payload = payload
        self.device = device
        """The payload in device memory; `payload` is empty then."""
        self.buffer = buffer
        """The connection's memory that `payload` lies in, if it was reserved there."""
        self._on_release = on_release

    def release(self) -> None:
        """Return the payload's memory; the payload is empty afterwards. Safe to call twice."""
        self.payload = _EMPTY
        self.device = None
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


_EMPTY = memoryview(b"")


def _sign(header: FrameHeader) -> bytes:
    return _SIGNED.pack(
        MAGIC,
        VERSION,
        header.kind,
        0,
        header.lease_id,
        header.epoch,
        header.incarnation,
        0,
        header.layer_start,
        header.num_layers,
        header.first_block,
        header.num_blocks,
        header.payload_bytes,
    )


def _digest(signed: bytes, pieces: Iterable[memoryview]) -> int:
    state = xxhash.xxh3_64(signed)
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def _pieces(payload: memoryview, device: DeviceBytes | None) -> tuple[memoryview]:
    """What a digest is taken over: the bytes, or the fingerprint of those that are in device memory."""
    return (payload if device is None else memoryview(device.fingerprint()),)


def seal(
    kind: FrameKind,
    lease_id: LeaseId = _NO_LEASE,
    epoch: Epoch = _NO_EPOCH,
    incarnation: Incarnation = _NO_INCARNATION,
    payload: bytes | bytearray | memoryview = b"",
    *,
    layer_start: int = 0,
    num_layers: int = 0,
    first_block: int = 0,
    num_blocks: int = 0,
    buffer: PayloadBuffer | None = None,
    pieces: Iterable[memoryview] | None = None,
) -> Frame:
    """Build a frame and compute its digest.

    Args:
        kind: And the next ones: the header's fields.
        lease_id: See `FrameHeader`.
        epoch: See `FrameHeader`.
        incarnation: See `FrameHeader`.
        payload: The payload, or the memory that `pieces` fills.
        layer_start: See `FrameHeader`.
        num_layers: See `FrameHeader`.
        first_block: See `FrameHeader`.
        num_blocks: See `FrameHeader`.
        buffer: The connection's memory that `payload` lies in.
        pieces: All of `payload` from front to back, each piece yielded as soon as it is filled: it is digested while
            the processor still has it cached. None = the payload is filled already.

    Raises:
        FrameError: A field is outside its bounds; such a frame would be refused by every receiver.
    """
    view = memoryview(payload).cast("B") if not isinstance(payload, memoryview) else payload
    device = None if buffer is None else buffer.device
    num_bytes = len(view) if device is None else len(device)
    draft = FrameHeader(
        kind, lease_id, epoch, incarnation, layer_start, num_layers, first_block, num_blocks, num_bytes, 0
    )
    _check_bounds(draft)
    digest = _digest(_sign(draft), _pieces(view, device) if pieces is None else pieces)
    header = FrameHeader(
        kind, lease_id, epoch, incarnation, layer_start, num_layers, first_block, num_blocks, num_bytes, digest
    )
    return Frame(header, view, buffer, device=device)


def verify(frame: Frame) -> None:
    """Raise `ChecksumMismatch` unless header and payload are what the sender sealed."""
    header = frame.header
    num_bytes = len(frame.payload) if frame.device is None else len(frame.device)
    pieces = _pieces(frame.payload, frame.device)
    if num_bytes != header.payload_bytes or _digest(_sign(header), pieces) != header.digest:
        raise ChecksumMismatch(
            f"{header.kind.name} frame of lease {header.lease_id:x}: {header.payload_bytes} payload bytes do not have "
            f"the digest that their header names"
        )


def encode_header(header: FrameHeader) -> bytes:
    """Return the `HEADER_BYTES` bytes of a header."""
    head = _sign(header) + _DIGEST.pack(header.digest)
    return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF)


def decode_header(data: bytes | bytearray | memoryview) -> FrameHeader:
    """Parse a header.

    Raises:
        FrameError: Wrong length, magic, version, kind or check word, or a field outside its bounds.
    """
    if len(data) != HEADER_BYTES:
        raise FrameError(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    (check,) = _CHECK.unpack_from(data, HEADER_BYTES - _CHECK.size)
    if xxhash.xxh3_64_intdigest(bytes(data[: HEADER_BYTES - _CHECK.size])) & 0xFFFFFFFF != check:
        raise FrameError("the header's check word does not match")
    (magic, version, kind, zero_a, lease_id, epoch, incarnation, zero_b, *ranges, payload_bytes) = _SIGNED.unpack_from(
        data
    )
    layer_start, num_layers, first_block, num_blocks = ranges
    if magic != MAGIC or version != VERSION:
        raise FrameError(f"not a version {VERSION} frame")
    if zero_a or zero_b:
        raise FrameError("a field that must be zero is not")
    try:
        kind = FrameKind(kind)
    except ValueError as error:
        raise FrameError(f"unknown frame kind {kind}") from error
    (digest,) = _DIGEST.unpack_from(data, _SIGNED.size)
    header = FrameHeader(
        kind,
        LeaseId(lease_id),
        Epoch(epoch),
        Incarnation(incarnation),
        layer_start,
        num_layers,
        first_block,
        num_blocks,
        payload_bytes,
        digest,
    )
    _check_bounds(header)
    return header


def check_greeting(header: FrameHeader) -> None:
    """Check that a frame may come from a peer that has not said who it is: nothing large is set up for one.

    Raises:
        FrameError: It carries KV, or more than a greeting needs.
    """
    if header.kind is FrameKind.KV or header.payload_bytes > MAX_GREETING_BYTES:
        raise FrameError(f"a {header.kind.name} frame of {header.payload_bytes} bytes came before a valid HELLO")


def _check_bounds(header: FrameHeader) -> None:
    for number in (header.lease_id, header.epoch, header.incarnation):
        if not 0 <= number <= _U64:
            raise FrameError(f"{number} does not fit 64 bits")
    ranges = (header.layer_start, header.num_layers, header.first_block, header.num_blocks)
    if header.kind is FrameKind.KV:
        if header.num_layers < 1 or not 0 <= header.layer_start <= MAX_LAYERS - header.num_layers:
            raise FrameError(f"layers {header.layer_start} + {header.num_layers} are out of bounds")
        if header.num_blocks < 1 or not 0 <= header.first_block <= MAX_BLOCKS - header.num_blocks:
            raise FrameError(f"blocks {header.first_block} + {header.num_blocks} are out of bounds")
        limit = MAX_PAYLOAD_BYTES
    else:
        if any(ranges):
            raise FrameError(f"a {header.kind.name} frame names no blocks")
        limit = MAX_CONTROL_BYTES
    if not 0 <= header.payload_bytes <= limit:
        raise FrameError(f"a {header.kind.name} payload of {header.payload_bytes} bytes is over {limit}")
