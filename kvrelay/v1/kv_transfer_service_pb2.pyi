from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TransferRequest(_message.Message):
    __slots__ = ("frame_header", "payload", "more")
    FRAME_HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    frame_header: bytes
    payload: bytes
    more: bool
    def __init__(self, frame_header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...

class TransferResponse(_message.Message):
    __slots__ = ("frame_header", "payload", "more")
    FRAME_HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    frame_header: bytes
    payload: bytes
    more: bool
    def __init__(self, frame_header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., more: _Optional[bool] = ...) -> None: ...
