from kvrelay.v1 import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "num_prompt_tokens", "sampling_params", "bad_words_token_ids", "timeout_ms", "traceparent", "is_suspect")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    IS_SUSPECT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling_params: _sampling_pb2.SamplingParams
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    timeout_ms: int
    traceparent: str
    is_suspect: bool
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., is_suspect: _Optional[bool] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortCommand(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("outputs",)
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "token_index", "token_ids", "logprobs", "finish_reason", "matched_stop_token_id", "num_cached_tokens", "num_draft_tokens", "num_accepted_tokens", "prefill_timing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIMING_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    token_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_sampling_pb2.PositionLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    matched_stop_token_id: int
    num_cached_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    prefill_timing: PrefillTiming
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., token_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_sampling_pb2.PositionLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., prefill_timing: _Optional[_Union[PrefillTiming, _Mapping]] = ...) -> None: ...

class PrefillTiming(_message.Message):
    __slots__ = ("queue_ns", "prefill_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    prefill_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "attempt", "status")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    attempt: int
    status: bytes
    def __init__(self, request_id: _Optional[int] = ..., attempt: _Optional[int] = ..., status: _Optional[bytes] = ...) -> None: ...

class SessionReady(_message.Message):
    __slots__ = ("worker_id", "incarnation", "lease_ttl_ms")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    lease_ttl_ms: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ...) -> None: ...

class SessionEnding(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class TransferStats(_message.Message):
    __slots__ = ("num_bytes", "num_frames", "total_ns", "exposed_ns", "transport")
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_NS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    num_frames: int
    total_ns: int
    exposed_ns: int
    transport: str
    def __init__(self, num_bytes: _Optional[int] = ..., num_frames: _Optional[int] = ..., total_ns: _Optional[int] = ..., exposed_ns: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_free_blocks", "num_blocks", "num_leases", "is_draining", "num_waiting_tokens", "num_preemptions", "num_cache_hit_tokens", "num_cache_query_tokens", "step_age_ms", "is_stalled", "num_parked")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHE_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    IS_STALLED_FIELD_NUMBER: _ClassVar[int]
    NUM_PARKED_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_leases: int
    is_draining: bool
    num_waiting_tokens: int
    num_preemptions: int
    num_cache_hit_tokens: int
    num_cache_query_tokens: int
    step_age_ms: int
    is_stalled: bool
    num_parked: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_leases: _Optional[int] = ..., is_draining: _Optional[bool] = ..., num_waiting_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., num_cache_hit_tokens: _Optional[int] = ..., num_cache_query_tokens: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., is_stalled: _Optional[bool] = ..., num_parked: _Optional[int] = ...) -> None: ...
