"""The hand-written messages are those of the published proto."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.frame import FrameError
from kv_transfer.transports.grpc.transport import METHOD
from kv_transfer.transports.grpc.wire import Part, decode_part, encode_part
from kvrelay.v1 import kv_transfer_service_pb2 as pb2

PARTS = st.builds(Part, st.binary(max_size=100), st.binary(max_size=400).map(memoryview), st.booleans())


@given(PARTS)
def test_generated_classes_read_what_is_written_by_hand(part: Part) -> None:
    for message_class in (pb2.TransferRequest, pb2.TransferResponse):
        message = message_class.FromString(encode_part(part))
        assert (message.frame_header, message.payload, message.more) == (part.header, bytes(part.payload), part.more)


@given(PARTS)
def test_what_generated_classes_write_is_read_by_hand(part: Part) -> None:
    for message_class in (pb2.TransferRequest, pb2.TransferResponse):
        message = message_class(frame_header=part.header, payload=bytes(part.payload), more=part.more)
        assert decode_part(message.SerializeToString()) == part


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_frame_errors(data: bytes) -> None:
    try:
        part = decode_part(data)
    except FrameError:
        return
    assert len(part.header) + len(part.payload) <= len(data)


def test_unknown_fields_are_skipped() -> None:
    later = bytes([4 << 3, 7]) + bytes([5 << 3 | 1]) + bytes(8) + bytes([6 << 3 | 5]) + bytes(4)
    part = Part(b"h", memoryview(b"p"), True)
    assert decode_part(later + encode_part(part) + later) == part


@pytest.mark.parametrize("data", [b"\x0a", b"\x0a\x05abc", b"\xff" * 11, b"\x0b", b"\x08" + b"\x80" * 12, b"\x09abc"])
def test_broken_messages_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_part(data)


def test_the_method_is_the_published_one() -> None:
    service = pb2.DESCRIPTOR.services_by_name["KvTransferService"]
    method = service.methods_by_name["Transfer"]
    assert f"/{service.full_name}/{method.name}" == METHOD
    assert method.client_streaming
    assert method.server_streaming
