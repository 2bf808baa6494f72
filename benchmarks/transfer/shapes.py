"""The KV shapes that travel, and their form on the pipe between the two processes."""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.layout import KvLayout
from engine.config import KvDtype

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class KvShape:
    """A model's KV, without the model."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    def layout(self) -> KvLayout:
        """Return the layout of a cache of this shape."""
        return KvLayout(f"bench-{self.name}", self.num_layers, self.num_kv_heads, self.head_dim, BLOCK_SIZE, self.dtype)


def smollm2_shape(dtype: KvDtype) -> KvShape:
    """SmolLM2-135M: 22.5 KiB per token in bf16."""
    return KvShape("smollm2", 30, 3, 64, dtype)


LLAMA_3_8B = KvShape("llama-3-8b", 32, 8, 128, KvDtype.BF16)
"""128 KiB per token."""


def layout_to_json(layout: KvLayout) -> dict[str, str | int]:
    """Return a layout as JSON values."""
    return {
        "model_fingerprint": layout.model_fingerprint,
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "block_size": layout.block_size,
        "dtype": layout.dtype.value,
    }


def layout_from_json(values: Mapping[str, object]) -> KvLayout:
    """Return the layout; the inverse of `layout_to_json`."""
    numbers = {name: int(str(values[name])) for name in ("num_layers", "num_kv_heads", "head_dim", "block_size")}
    return KvLayout(str(values["model_fingerprint"]), **numbers, dtype=KvDtype(str(values["dtype"])))
