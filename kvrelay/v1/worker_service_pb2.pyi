from kvrelay.v1 import layout_pb2 as _layout_pb2
from kvrelay.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetLoadsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadsResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: _session_pb2.WorkerLoad
    def __init__(self, load: _Optional[_Union[_session_pb2.WorkerLoad, _Mapping]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model_name", "architecture", "context_length", "vocab_size", "layout", "num_blocks", "device", "kernels")
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    model_name: str
    architecture: str
    context_length: int
    vocab_size: int
    layout: _layout_pb2.KvLayout
    num_blocks: int
    device: str
    kernels: str
    def __init__(self, model_name: _Optional[str] = ..., architecture: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ..., num_blocks: _Optional[int] = ..., device: _Optional[str] = ..., kernels: _Optional[str] = ...) -> None: ...

class SubscribeKvEventsRequest(_message.Message):
    __slots__ = ("start_sequence_number",)
    START_SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    start_sequence_number: int
    def __init__(self, start_sequence_number: _Optional[int] = ...) -> None: ...

class SubscribeKvEventsResponse(_message.Message):
    __slots__ = ("sequence_number", "stored", "removed_block_hashes", "is_snapshot")
    SEQUENCE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    IS_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    sequence_number: int
    stored: _containers.RepeatedCompositeFieldContainer[KvBlockStored]
    removed_block_hashes: _containers.RepeatedScalarFieldContainer[int]
    is_snapshot: bool
    def __init__(self, sequence_number: _Optional[int] = ..., stored: _Optional[_Iterable[_Union[KvBlockStored, _Mapping]]] = ..., removed_block_hashes: _Optional[_Iterable[int]] = ..., is_snapshot: _Optional[bool] = ...) -> None: ...

class KvBlockStored(_message.Message):
    __slots__ = ("block_hash", "parent_block_hash")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    block_hash: int
    parent_block_hash: int
    def __init__(self, block_hash: _Optional[int] = ..., parent_block_hash: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...
