"""Frames: round trip, and no bytes that a peer could send do more than raise `FrameError` or `ChecksumMismatch`."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from engine.types import Epoch, Incarnation, LeaseId
from kv_transfer.frame import (
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_CONTROL_BYTES,
    MAX_LAYERS,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameError,
    FrameKind,
    decode_header,
    encode_header,
    seal,
    verify,
)
from kvrelay.errors import ChecksumMismatch, TransferError

U64 = st.integers(0, 2**64 - 1)


def a_frame(payload: bytes = b"payload") -> Frame:
    return seal(
        FrameKind.KV,
        LeaseId(1 << 63),
        Epoch(3),
        Incarnation(9),
        payload,
        layer_start=5,
        num_layers=2,
        first_block=7,
        num_blocks=4,
    )


@given(
    lease_id=U64,
    epoch=U64,
    incarnation=U64,
    layers=st.tuples(st.integers(0, MAX_LAYERS - 8), st.integers(1, 8)),
    blocks=st.tuples(st.integers(0, MAX_BLOCKS - 100), st.integers(1, 100)),
    payload=st.binary(max_size=300),
)
def test_a_header_survives_encoding(
    lease_id: int, epoch: int, incarnation: int, layers: tuple[int, int], blocks: tuple[int, int], payload: bytes
) -> None:
    frame = seal(
        FrameKind.KV,
        LeaseId(lease_id),
        Epoch(epoch),
        Incarnation(incarnation),
        payload,
        layer_start=layers[0],
        num_layers=layers[1],
        first_block=blocks[0],
        num_blocks=blocks[1],
    )
    data = encode_header(frame.header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data) == frame.header
    verify(frame)


def test_every_bit_of_a_header_is_guarded() -> None:
    data = bytearray(encode_header(a_frame().header))
    for bit in range(len(data) * 8):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            decode_header(data)
        data[bit // 8] ^= 1 << bit % 8


def test_every_bit_of_a_payload_is_guarded() -> None:
    frame = a_frame(bytes(range(64)))
    for bit in range(64 * 8):
        payload = bytearray(frame.payload)
        payload[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumMismatch):
            verify(Frame(frame.header, memoryview(payload)))


@pytest.mark.parametrize(
    "name", ["lease_id", "epoch", "incarnation", "layer_start", "first_block", "num_blocks", "digest"]
)
def test_the_digest_binds_a_payload_to_its_place(name: str) -> None:
    """The payload of one hand-off, layer or block does not verify under the header of another."""
    frame = a_frame()
    moved = replace(frame.header, **{name: getattr(frame.header, name) + 1})
    assert decode_header(encode_header(moved)) == moved
    with pytest.raises(ChecksumMismatch):
        verify(Frame(moved, frame.payload))


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(data)


@given(U64, st.integers(0, HEADER_BYTES))
def test_truncated_headers_are_refused(seed: int, length: int) -> None:
    data = encode_header(a_frame().header)[:length]
    if length < HEADER_BYTES:
        with pytest.raises(FrameError):
            decode_header(data)


def resealed(change: Callable[[bytearray], None]) -> bytes:
    """A header with changed fields whose check word holds: what a hostile peer can send."""
    data = bytearray(encode_header(a_frame().header))
    change(data)
    data[-4:] = (xxhash.xxh3_64_intdigest(bytes(data[:-4])) & 0xFFFFFFFF).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (0, b"XXXX"),
        (4, b"\x02"),
        (5, b"\x00"),
        (5, b"\x63"),
        (6, b"\x01"),
        (32, b"\x01"),
        (36, (MAX_LAYERS).to_bytes(4, "little")),
        (36, b"\xff\xff\xff\xff"),
        (40, bytes(4)),
        (40, b"\xff\xff\xff\xff"),
        (44, (MAX_BLOCKS).to_bytes(4, "little")),
        (48, bytes(4)),
        (48, b"\xff\xff\xff\xff"),
        (52, (MAX_PAYLOAD_BYTES + 1).to_bytes(8, "little")),
        (52, b"\xff" * 8),
        (5, bytes([FrameKind.COMMIT])),
    ],
)
def test_fields_out_of_bounds_are_refused_though_the_check_word_holds(offset: int, content: bytes) -> None:
    def change(data: bytearray) -> None:
        data[offset : offset + len(content)] = content

    assert decode_header(resealed(lambda data: None)) == a_frame().header
    with pytest.raises(FrameError):
        decode_header(resealed(change))


def test_random_fields_with_a_good_check_word_never_crash() -> None:
    generator = random.Random(7)
    accepted = 0
    for _ in range(3000):

        def change(data: bytearray) -> None:
            for _ in range(generator.randrange(1, 4)):
                data[generator.randrange(len(data) - 4)] = generator.randrange(256)

        try:
            header = decode_header(resealed(change))
        except FrameError:
            continue
        accepted += 1
        assert header.payload_bytes <= MAX_PAYLOAD_BYTES
    assert accepted > 0


def test_what_would_be_refused_cannot_be_sealed() -> None:
    attempts: list[Callable[[], Frame]] = [
        lambda: seal(FrameKind.KV, num_layers=0, num_blocks=1),
        lambda: seal(FrameKind.KV, num_layers=1, num_blocks=MAX_BLOCKS + 1),
        lambda: seal(FrameKind.OPEN, num_layers=1),
        lambda: seal(FrameKind.OPEN, payload=bytes(MAX_CONTROL_BYTES + 1)),
        lambda: seal(FrameKind.OPEN, LeaseId(-1)),
        lambda: seal(FrameKind.OPEN, LeaseId(1 << 64)),
    ]
    for attempt in attempts:
        with pytest.raises(FrameError):
            attempt()
    assert issubclass(FrameError, TransferError)


def test_a_released_frame_shows_nothing_and_releases_once() -> None:
    released: list[int] = []
    frame = Frame(a_frame().header, memoryview(b"secret"), on_release=lambda: released.append(1))
    frame.release()
    frame.release()
    assert released == [1]
    assert len(frame.payload) == 0
