from kvrelay.v1 import layout_pb2 as _layout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model_name", "layout", "num_blocks", "transfer_addresses", "max_num_seqs", "context_length", "transports", "architecture", "vocab_size", "kernels")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    role: WorkerRole
    address: str
    model_name: str
    layout: _layout_pb2.KvLayout
    num_blocks: int
    transfer_addresses: _containers.RepeatedScalarFieldContainer[str]
    max_num_seqs: int
    context_length: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    architecture: str
    vocab_size: int
    kernels: str
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model_name: _Optional[str] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., transfer_addresses: _Optional[_Iterable[str]] = ..., max_num_seqs: _Optional[int] = ..., context_length: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., kernels: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("keep_alive_interval_ms",)
    KEEP_ALIVE_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    keep_alive_interval_ms: int
    def __init__(self, keep_alive_interval_ms: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation", "is_draining", "step_age_ms", "is_stalled")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    is_draining: bool
    step_age_ms: int
    is_stalled: bool
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., is_draining: _Optional[bool] = ..., step_age_ms: _Optional[int] = ..., is_stalled: _Optional[bool] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
