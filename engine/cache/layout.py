"""The shape of a worker's KV cache in words that two workers can compare.

A block of one layer is one contiguous run `[2 (K, V), num_kv_heads, block_size, head_dim]` of `dtype`; the cache is
`[num_layers, num_blocks, <block>]`. So a block of a layer moves with one copy, and a head's tokens lie together for
attention. int8 and fp8 caches carry one fp32 scale per (K or V, head, token) behind the block's elements.
"""

from dataclasses import dataclass, replace

import xxhash

from engine.config import KvDtype, ModelConfig
from kvrelay.errors import LayoutMismatch

__all__ = ["KvDtype", "KvLayout"]  # the transfer layer knows cached KV from here only


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Geometry and element type of a KV cache."""

    model_fingerprint: str
    """Hash of the weights' identity (config and tensor shapes): KV of another model is never imported."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens in a block."""
    dtype: KvDtype
    num_draft_layers: int = 0
    """How many of the layers, the last ones, are a draft head's and not the model's."""

    @classmethod
    def of_model(
        cls, fingerprint: str, config: ModelConfig, block_size: int, dtype: KvDtype, num_draft_layers: int = 0
    ) -> "KvLayout":
        """Return the layout of a model's cache, with room for the layers of a draft head."""
        return cls(
            fingerprint,
            config.num_layers + num_draft_layers,
            config.num_kv_heads,
            config.head_dim,
            block_size,
            dtype,
            num_draft_layers,
        )

    def blocks_within(self, num_bytes: int) -> int:
        """Return how many blocks of all layers `num_bytes` hold; 0 for less than one."""
        return max(0, num_bytes // (self.num_layers * self.block_bytes))

    @property
    def num_model_layers(self) -> int:
        """Layers of the model itself."""
        return self.num_layers - self.num_draft_layers

    @property
    def block_elements(self) -> int:
        """Elements of one layer's block, K and V together."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's block, scales included."""
        scales = 2 * self.num_kv_heads * self.block_size * 4 if self.dtype.has_scales else 0
        return self.block_elements * self.dtype.itemsize + scales

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers."""
        return self.num_layers * self.block_bytes // self.block_size

    @property
    def fingerprint(self) -> str:
        """16 hex digits that are equal exactly when two layouts are."""
        # What is not there adds nothing: workers that know of no draft layers compute the same.
        names = self.__slots__ if self.num_draft_layers else self.__slots__[:-1]
        text = "|".join(str(getattr(self, name)) for name in names)
        return xxhash.xxh3_64_hexdigest(text.encode())

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks needed for `num_tokens`."""
        return -(-num_tokens // self.block_size)

    def check_convertible(self, source: "KvLayout") -> None:
        """Raise `LayoutMismatch` unless KV of `source` can be imported into this layout.

        Block size, dtype and draft layers may differ; model and head geometry may not.
        """
        for name in ("model_fingerprint", "num_model_layers", "num_kv_heads", "head_dim"):
            mine, theirs = getattr(self, name), getattr(source, name)
            if mine != theirs:
                raise LayoutMismatch(f"{name} differs: {theirs} cannot be imported into {mine}")

    def shared_with(self, target: "KvLayout") -> "KvLayout":
        """Return this layout with those layers only that `target`, to which it is convertible, has as well."""
        count = min(self.num_draft_layers, target.num_draft_layers)
        return replace(self, num_layers=self.num_model_layers + count, num_draft_layers=count)
