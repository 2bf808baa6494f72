"""The operations that a Llama-family forward calls, as protocols. No implementation, no state.

Dims: `num_rows` tokens of the step and padding rows behind them; `num_heads` query heads, `num_kv_heads` KV heads;
`layer_cache` is one layer of the KV cache, [num_blocks, 2, num_kv_heads, block_size, head_dim] in the cache dtype.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Which rows of a step belong to which sequence, and where each sequence's KV lies."""

    query_start: Tensor
    """[num_seqs + 1] int32 on the CPU, half-open row ranges."""
    context_lens: Tensor
    """[num_seqs] int32 on the CPU, tokens in the cache, the step's own included."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32 on the CPU, padded with 0."""
    slot_mapping: Tensor
    """[num_tokens] int64 on the model's device, `block_id * block_size + offset` of each row."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None
    """Tokens a position looks back at, itself included; None = all."""


class Linear(Protocol):
    """A weight in the form its kernel wants it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, in_features] fp32 -> [num_rows, out_features] fp32: `x @ weight.T + bias`."""


class StepAttention(Protocol):
    """KV writes and attention of one step; planned once, called for every layer."""

    def write_kv(self, kv: Tensor, layer_cache: Tensor) -> None:
        """Write the step's K and V into their slots, rounded to the cache dtype.

        Args:
            kv: [num_rows, 2, num_kv_heads, head_dim] fp32; rows behind the step's tokens are padding.
            layer_cache: The layer's cache, changed in place.
        """

    def paged_attention(self, query: Tensor, layer_cache: Tensor) -> Tensor:
        """Attend from each row to its sequence's tokens up to itself, as the cache holds them.

        Args:
            query: [num_rows, num_heads, head_dim] fp32, rotated and not scaled.
            layer_cache: The layer's cache with the step's own tokens in it.

        Returns:
            [num_rows, num_heads, head_dim] fp32; padding rows are 0.
        """


class Kernels(Protocol):
    """One set of implementations."""

    @property
    def min_rows(self) -> int:
        """Fewest rows that `Linear` takes; the model pads shorter steps. See the implementation for the reason."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Bring a weight [out_features, in_features] fp32 and its bias [out_features] into the kernel's form."""

    def prepare_attention(self, geometry: AttentionGeometry) -> StepAttention:
        """Plan one step's cache accesses. Called once a step, on the host."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def rope(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate [num_rows, heads, head_dim]; element i turns with element i + head_dim / 2.

        `cos` and `sin` are [num_rows, head_dim / 2] fp32. May change `heads` in place and return it.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[num_rows, 2 * n] -> [num_rows, n]: `silu(first half) * second half`."""
