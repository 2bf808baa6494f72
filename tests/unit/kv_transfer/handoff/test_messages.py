"""Control payloads: round trip, and any other bytes are a `FrameError`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import KvDtype
from engine.types import Incarnation, WorkerId
from kv_transfer.frame import FrameError
from kv_transfer.handoff.messages import MAX_RECORD_BYTES, MAX_STRING_BYTES, Commit, Credit, Hello, Open, Rejection
from kvrelay.errors import (
    ChecksumMismatch,
    CoverageIncomplete,
    DeviceError,
    EngineError,
    LayoutMismatch,
    LeaseExpired,
    LeaseUnknown,
    PeerUnavailable,
    StaleEpoch,
    TransferError,
)
from tests.fakes_transport import tiny_layout

KINDS = [Hello, Open, Commit, Credit, Rejection]


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_hello_survives_encoding(dtype: KvDtype) -> None:
    hello = Hello(WorkerId("präfill-0"), Incarnation(2**63 - 1), tiny_layout(dtype=dtype))
    assert Hello.decode(memoryview(hello.encode())) == hello


def test_other_messages_survive_encoding() -> None:
    opening = Open(bytes(range(16)), 16, 4000)
    assert Open.decode(memoryview(opening.encode())) == opening
    commit = Commit(2**40, 7, 2**64 - 1, 123, b"record")
    assert Commit.decode(memoryview(commit.encode())) == commit
    assert Credit.decode(memoryview(Credit(5).encode())) == Credit(5)


@pytest.mark.parametrize(
    "kind",
    [ChecksumMismatch, CoverageIncomplete, LayoutMismatch, LeaseExpired, LeaseUnknown, PeerUnavailable, StaleEpoch],
)
def test_an_error_keeps_its_type_over_the_wire(kind: type[EngineError]) -> None:
    error = Rejection.decode(memoryview(Rejection.of(kind("why")).encode())).to_error()
    assert type(error) is kind
    assert str(error) == "why"


def test_an_error_that_has_no_business_here_becomes_a_transfer_error() -> None:
    error = Rejection.of(DeviceError("boom")).to_error()
    assert type(error) is TransferError
    assert "boom" in str(error)


@given(st.text(max_size=3000))
def test_long_and_odd_messages_are_cut_but_stay_readable(text: str) -> None:
    rejection = Rejection.decode(memoryview(Rejection("REASON", text).encode()))
    assert len(rejection.message.encode()) <= MAX_STRING_BYTES
    assert text.encode(errors="replace").decode().startswith(rejection.message)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.binary(max_size=200))
def test_random_bytes_raise_only_frame_errors(kind: type[Hello], data: bytes) -> None:
    try:
        message = kind.decode(memoryview(data))
    except FrameError:
        return
    assert message.encode() == data  # what is accepted is read to the last byte


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_hello_raises_only_frame_errors(position: int, value: int) -> None:
    data = bytearray(Hello(WorkerId("prefill-0"), Incarnation(5), tiny_layout()).encode())
    data[position % len(data)] = value
    try:
        hello = Hello.decode(memoryview(data))
    except FrameError:
        return
    assert 1 <= hello.layout.num_layers <= 1 << 16
    assert hello.layout.block_bytes > 0


def test_a_record_over_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(FrameError):
        Commit(0, 0, 0, 0, bytes(MAX_RECORD_BYTES + 1)).encode()
    honest = Commit(0, 0, 0, 0, b"").encode()
    with pytest.raises(FrameError):
        Commit.decode(memoryview(honest[:-4] + (MAX_RECORD_BYTES + 1).to_bytes(4, "little")))
    with pytest.raises(FrameError):
        Commit.decode(memoryview(honest[:-4] + (5).to_bytes(4, "little") + b"abc"))
    with pytest.raises(FrameError):
        Commit.decode(memoryview(honest + b"more"))


def test_a_ticket_does_not_show_in_a_repr() -> None:
    assert "\\xaa" not in repr(Open(b"\xaa" * 16, 0, 1))
