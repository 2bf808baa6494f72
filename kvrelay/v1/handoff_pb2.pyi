from kvrelay.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvHandle(_message.Message):
    __slots__ = ("lease_id", "epoch", "ticket", "worker_id", "incarnation", "start_token", "num_tokens", "layout_fingerprint")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    epoch: int
    ticket: bytes
    worker_id: str
    incarnation: int
    start_token: int
    num_tokens: int
    layout_fingerprint: str
    def __init__(self, lease_id: _Optional[int] = ..., epoch: _Optional[int] = ..., ticket: _Optional[bytes] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., start_token: _Optional[int] = ..., num_tokens: _Optional[int] = ..., layout_fingerprint: _Optional[str] = ...) -> None: ...

class HandoffRecord(_message.Message):
    __slots__ = ("first_token_id", "first_logprobs", "finish_reason", "matched_stop_token_id", "num_cached_tokens", "prefill_ns", "queue_ns", "traceparent", "draft_state")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_STATE_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    first_logprobs: _sampling_pb2.PositionLogprobs
    finish_reason: _sampling_pb2.FinishReason
    matched_stop_token_id: int
    num_cached_tokens: int
    prefill_ns: int
    queue_ns: int
    traceparent: str
    draft_state: bytes
    def __init__(self, first_token_id: _Optional[int] = ..., first_logprobs: _Optional[_Union[_sampling_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., queue_ns: _Optional[int] = ..., traceparent: _Optional[str] = ..., draft_state: _Optional[bytes] = ...) -> None: ...
