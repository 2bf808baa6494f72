"""KvLayout to its proto and back."""

from dataclasses import replace

import pytest

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from kvrelay.errors import LayoutMismatch
from kvrelay.v1 import layout_pb2
from kvrelay.wire.engine.layout import layout_from_proto, layout_to_proto

LAYOUT = KvLayout("weights", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=KvDtype.BF16)


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_round_trip_keeps_every_field(dtype: KvDtype) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout_from_proto(layout_to_proto(layout)) == layout


@pytest.mark.parametrize(
    "field", ["model_fingerprint", "num_layers", "num_kv_heads", "head_dim", "block_size", "dtype"]
)
def test_missing_field_is_named(field: str) -> None:
    message = layout_to_proto(LAYOUT)
    message.ClearField(field)
    with pytest.raises(LayoutMismatch, match=field):
        layout_from_proto(message)


def test_every_proto_field_is_converted() -> None:
    assert set(layout_pb2.KvLayout.DESCRIPTOR.fields_by_name) == set(KvLayout.__slots__)
