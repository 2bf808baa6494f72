from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DTYPE_UNSPECIFIED: _ClassVar[KvDtype]
    KV_DTYPE_FP32: _ClassVar[KvDtype]
    KV_DTYPE_BF16: _ClassVar[KvDtype]
    KV_DTYPE_FP16: _ClassVar[KvDtype]
    KV_DTYPE_INT8: _ClassVar[KvDtype]
    KV_DTYPE_FP8: _ClassVar[KvDtype]
KV_DTYPE_UNSPECIFIED: KvDtype
KV_DTYPE_FP32: KvDtype
KV_DTYPE_BF16: KvDtype
KV_DTYPE_FP16: KvDtype
KV_DTYPE_INT8: KvDtype
KV_DTYPE_FP8: KvDtype

class KvLayout(_message.Message):
    __slots__ = ("model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype", "num_draft_layers")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_LAYERS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KvDtype
    num_draft_layers: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[_Union[KvDtype, str]] = ..., num_draft_layers: _Optional[int] = ...) -> None: ...
