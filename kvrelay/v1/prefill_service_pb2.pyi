from kvrelay.v1 import handoff_pb2 as _handoff_pb2
from kvrelay.v1 import layout_pb2 as _layout_pb2
from kvrelay.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillServiceSessionRequest(_message.Message):
    __slots__ = ("update_peers", "prefill", "abort")
    UPDATE_PEERS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    update_peers: UpdatePeersCommand
    prefill: PrefillCommand
    abort: _session_pb2.AbortCommand
    def __init__(self, update_peers: _Optional[_Union[UpdatePeersCommand, _Mapping]] = ..., prefill: _Optional[_Union[PrefillCommand, _Mapping]] = ..., abort: _Optional[_Union[_session_pb2.AbortCommand, _Mapping]] = ...) -> None: ...

class PrefillServiceSessionResponse(_message.Message):
    __slots__ = ("ready", "step", "exported", "error", "load", "ending")
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ready: _session_pb2.SessionReady
    step: _session_pb2.StepOutput
    exported: ExportedEvent
    error: _session_pb2.RequestError
    load: _session_pb2.WorkerLoad
    ending: _session_pb2.SessionEnding
    def __init__(self, ready: _Optional[_Union[_session_pb2.SessionReady, _Mapping]] = ..., step: _Optional[_Union[_session_pb2.StepOutput, _Mapping]] = ..., exported: _Optional[_Union[ExportedEvent, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.RequestError, _Mapping]] = ..., load: _Optional[_Union[_session_pb2.WorkerLoad, _Mapping]] = ..., ending: _Optional[_Union[_session_pb2.SessionEnding, _Mapping]] = ...) -> None: ...

class UpdatePeersCommand(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[TransferPeer]
    def __init__(self, peers: _Optional[_Iterable[_Union[TransferPeer, _Mapping]]] = ...) -> None: ...

class TransferPeer(_message.Message):
    __slots__ = ("worker_id", "incarnation", "addresses", "layout")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    addresses: _containers.RepeatedScalarFieldContainer[str]
    layout: _layout_pb2.KvLayout
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., addresses: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[_layout_pb2.KvLayout, _Mapping]] = ...) -> None: ...

class PrefillCommand(_message.Message):
    __slots__ = ("request", "kv_handle")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    request: _session_pb2.EngineRequest
    kv_handle: _handoff_pb2.KvHandle
    def __init__(self, request: _Optional[_Union[_session_pb2.EngineRequest, _Mapping]] = ..., kv_handle: _Optional[_Union[_handoff_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class ExportedEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    transfer: _session_pb2.TransferStats
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., transfer: _Optional[_Union[_session_pb2.TransferStats, _Mapping]] = ...) -> None: ...
