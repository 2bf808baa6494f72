"""KvLayout: the engine's description of a KV cache to its proto and back.

What a registration and the list of transfer peers carry. Two layouts are compared by `KvLayout.check_convertible`,
never here.
"""

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from kvrelay.errors import LayoutMismatch
from kvrelay.v1 import layout_pb2

_DTYPE_TO_PROTO = {
    KvDtype.FP32: layout_pb2.KV_DTYPE_FP32,
    KvDtype.BF16: layout_pb2.KV_DTYPE_BF16,
    KvDtype.FP16: layout_pb2.KV_DTYPE_FP16,
    KvDtype.INT8: layout_pb2.KV_DTYPE_INT8,
    KvDtype.FP8: layout_pb2.KV_DTYPE_FP8,
}
_DTYPE_FROM_PROTO = {proto: dtype for dtype, proto in _DTYPE_TO_PROTO.items()}


def layout_to_proto(layout: KvLayout) -> layout_pb2.KvLayout:
    """Return the layout as messages carry it."""
    return layout_pb2.KvLayout(
        model_fingerprint=layout.model_fingerprint,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        dtype=_DTYPE_TO_PROTO[layout.dtype],
        num_draft_layers=layout.num_draft_layers,
    )


def layout_from_proto(message: layout_pb2.KvLayout) -> KvLayout:
    """Return the layout.

    Raises:
        LayoutMismatch: the element type is not known to this build, the model is not named, or a dimension is 0.
    """
    dtype = _DTYPE_FROM_PROTO.get(message.dtype)
    if dtype is None:
        raise LayoutMismatch(f"dtype {message.dtype} is not known here")
    if not message.model_fingerprint:
        raise LayoutMismatch("model_fingerprint is empty")
    for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
        if getattr(message, name) < 1:
            raise LayoutMismatch(f"{name} is 0")
    if message.num_draft_layers >= message.num_layers:
        raise LayoutMismatch("num_draft_layers leaves the model no layer")
    return KvLayout(
        model_fingerprint=message.model_fingerprint,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        block_size=message.block_size,
        dtype=dtype,
        num_draft_layers=message.num_draft_layers,
    )
