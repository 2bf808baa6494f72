from kvrelay.v1 import handoff_pb2 as _handoff_pb2
from kvrelay.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeServiceSessionRequest(_message.Message):
    __slots__ = ("reserve", "prefill_locally", "supersede", "abort", "renew")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LOCALLY_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveCommand
    prefill_locally: PrefillLocallyCommand
    supersede: SupersedeCommand
    abort: _session_pb2.AbortCommand
    renew: RenewCommand
    def __init__(self, reserve: _Optional[_Union[ReserveCommand, _Mapping]] = ..., prefill_locally: _Optional[_Union[PrefillLocallyCommand, _Mapping]] = ..., supersede: _Optional[_Union[SupersedeCommand, _Mapping]] = ..., abort: _Optional[_Union[_session_pb2.AbortCommand, _Mapping]] = ..., renew: _Optional[_Union[RenewCommand, _Mapping]] = ...) -> None: ...

class DecodeServiceSessionResponse(_message.Message):
    __slots__ = ("ready", "reserved", "committed", "step", "error", "load", "ending")
    READY_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    ready: _session_pb2.SessionReady
    reserved: ReservedEvent
    committed: CommittedEvent
    step: _session_pb2.StepOutput
    error: _session_pb2.RequestError
    load: _session_pb2.WorkerLoad
    ending: _session_pb2.SessionEnding
    def __init__(self, ready: _Optional[_Union[_session_pb2.SessionReady, _Mapping]] = ..., reserved: _Optional[_Union[ReservedEvent, _Mapping]] = ..., committed: _Optional[_Union[CommittedEvent, _Mapping]] = ..., step: _Optional[_Union[_session_pb2.StepOutput, _Mapping]] = ..., error: _Optional[_Union[_session_pb2.RequestError, _Mapping]] = ..., load: _Optional[_Union[_session_pb2.WorkerLoad, _Mapping]] = ..., ending: _Optional[_Union[_session_pb2.SessionEnding, _Mapping]] = ...) -> None: ...

class ReserveCommand(_message.Message):
    __slots__ = ("request", "ttl_ms")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    request: _session_pb2.EngineRequest
    ttl_ms: int
    def __init__(self, request: _Optional[_Union[_session_pb2.EngineRequest, _Mapping]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReservedEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "kv_handle", "num_cached_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KV_HANDLE_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    kv_handle: _handoff_pb2.KvHandle
    num_cached_tokens: int
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., kv_handle: _Optional[_Union[_handoff_pb2.KvHandle, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillLocallyCommand(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class RenewCommand(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SupersedeCommand(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class CommittedEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "transfer")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    transfer: _session_pb2.TransferStats
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., transfer: _Optional[_Union[_session_pb2.TransferStats, _Mapping]] = ...) -> None: ...
