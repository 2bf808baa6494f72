"""Attention of one step on the device: which kernel takes which sequences. Planned once a step, called for each layer.

    decode      few rows a sequence: the split-KV kernel, captured in CUDA graphs
    mixed       decodes first, then prefill chunks: the split-KV kernel for the former, the tiled one for the latter
    invariant   the split-KV kernel for everything, a long chunk as many short sequences over the same blocks, so that
                a row's bits do not depend on how it was computed

Owns scratch memory; knows nothing of layers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.paged_decode import DecodeTiles, decode_scratch_size, paged_attention_decode
from engine.kernels.triton.paged_prefill import paged_attention_prefill, plan_prefill

MAX_SHORT_ROWS = 16
"""Sequences with more rows than this are prefill chunks."""
_MAX_SCRATCH_BYTES = 256 << 20
"""Bounds the scratch of a long chunk in the invariant mode."""


class StepAttention(Protocol):
    """Attention of one step."""

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """[num_rows, num_heads, head_dim] -> the same shape; the step's own KV is in the cache."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the rows and the KV of a step's sequences are, on the device."""

    query_start: Tensor
    """[num_seqs + 1] int32, half-open row ranges."""
    context_lens: Tensor
    """[num_seqs] int32; 0 = padding."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32."""

    def first(self, count: int) -> "Sequences":
        """The first `count` sequences."""
        return Sequences(self.query_start[: count + 1], self.context_lens[:count], self.block_tables[:count])


def decode_tiles(num_seqs: int, *, is_batch_invariant: bool) -> DecodeTiles:
    """Shorter splits for few sequences, which would not fill the device otherwise; always the same when invariant."""
    if is_batch_invariant or 4 < num_seqs <= 16:
        return DecodeTiles(split_size=256)
    return DecodeTiles(split_size=128 if num_seqs <= 4 else 512)


class DecodeAttention:
    """Sequences of few rows. Reads no device memory on the host, so that a graph can hold it."""

    def __init__(
        self,
        config: ModelConfig,
        sequences: Sequences,
        num_rows: int,
        max_rows: int,
        max_context_len: int,
        tiles: DecodeTiles,
        out: Tensor,
        scratch: Tensor | None = None,
    ) -> None:
        """Allocate scratch, unless it is given.

        Args:
            config: The model's shape.
            sequences: The sequences.
            num_rows: Rows that they have in all, or may have in a graph.
            max_rows: Most rows of one.
            max_context_len: Longest context.
            tiles: How to cut the work.
            out: [at least num_rows, num_heads, head_dim], written by every call.
            scratch: fp32 memory of at least `decode_scratch_size` elements, used by one call at a time; None = its own.
        """
        self._sequences = sequences
        self._max_rows = max_rows
        self._max_context_len = max_context_len
        self._window = config.sliding_window
        self._tiles = tiles
        self._num_rows = num_rows
        self._out = out[:num_rows]
        if scratch is None:
            size = decode_scratch_size(num_rows, config.num_heads, config.head_dim, max_context_len, tiles)
            scratch = torch.empty(size, dtype=torch.float32, device=out.device)
        self._scratch = scratch

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See `StepAttention.__call__`."""
        paged_attention_decode(
            query[: self._num_rows],
            cache,
            self._sequences.query_start,
            self._sequences.context_lens,
            self._sequences.block_tables,
            max_rows=self._max_rows,
            max_context_len=self._max_context_len,
            sliding_window=self._window,
            tiles=self._tiles,
            out=self._out,
            scratch=self._scratch,
        )
        return self._out


class MixedAttention:
    """Decodes first, then prefill chunks."""

    def __init__(
        self, config: ModelConfig, sequences: Sequences, query_start: Tensor, context_lens: Tensor, out: Tensor
    ) -> None:
        """Plan a step.

        Args:
            config: The model's shape.
            sequences: The sequences on the device.
            query_start: The same as in `sequences`, on the CPU.
            context_lens: The same as in `sequences`, on the CPU.
            out: [num_rows, num_heads, head_dim], written by every call.
        """
        rows = query_start.diff().tolist()
        count = next((index for index, n in enumerate(rows) if n > MAX_SHORT_ROWS), len(rows))
        self._sequences = sequences
        self._window = config.sliding_window
        self._out = out
        self._decode: DecodeAttention | None = None
        if count:
            self._decode = DecodeAttention(
                config,
                sequences.first(count),
                int(query_start[count]),
                max(rows[:count]),
                int(context_lens[:count].max()),
                decode_tiles(count, is_batch_invariant=False),
                out,
            )
        group = config.num_heads // config.num_kv_heads
        self._plan = plan_prefill(query_start, group, out.device, first_seq=count)

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See `StepAttention.__call__`."""
        if self._decode is not None:
            self._decode(query, cache)
        return paged_attention_prefill(
            query,
            cache,
            self._sequences.query_start,
            self._sequences.context_lens,
            self._sequences.block_tables,
            self._plan,
            sliding_window=self._window,
            out=self._out,
        )


class InvariantAttention:
    """Every chunk as short sequences for the split-KV kernel, in groups that share scratch."""

    def __init__(
        self, config: ModelConfig, sequences: Sequences, query_start: Tensor, context_lens: Tensor, out: Tensor
    ) -> None:
        """Plan a step; arguments as for `MixedAttention`."""
        self._out = out
        tiles = decode_tiles(0, is_batch_invariant=True)
        longest = int(context_lens.max())
        row_bytes = 4 * decode_scratch_size(1, config.num_heads, config.head_dim, longest, tiles)
        pieces = list(_pieces(query_start.tolist(), context_lens.tolist()))
        self._groups: list[tuple[int, DecodeAttention]] = []
        for group in _grouped(pieces, max(MAX_SHORT_ROWS, _MAX_SCRATCH_BYTES // row_bytes)):
            first_row = group[0].first_row
            starts = [piece.first_row - first_row for piece in group] + [group[-1].end_row - first_row]
            seqs = torch.tensor([piece.seq for piece in group], device=out.device)
            short = Sequences(
                torch.tensor(starts, dtype=torch.int32, device=out.device),
                torch.tensor([piece.context_len for piece in group], dtype=torch.int32, device=out.device),
                sequences.block_tables.index_select(0, seqs),
            )
            rows, end_row = max(piece.end_row - piece.first_row for piece in group), group[-1].end_row
            decode = DecodeAttention(config, short, starts[-1], rows, longest, tiles, out[first_row:end_row])
            self._groups.append((first_row, decode))

    def __call__(self, query: Tensor, cache: LayerCache) -> Tensor:
        """See `StepAttention.__call__`."""
        for first_row, decode in self._groups:
            decode(query[first_row:], cache)
        return self._out


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some consecutive rows of a sequence, as a sequence of its own."""

    seq: int
    first_row: int
    end_row: int
    context_len: int
    """Tokens up to the piece's last row."""


def _pieces(starts: list[int], context_lens: list[int]) -> Iterator[_Piece]:
    for seq, context_len in enumerate(context_lens):
        end = starts[seq + 1]
        for first in range(starts[seq], end, MAX_SHORT_ROWS):
            piece = _Piece(seq, first, min(first + MAX_SHORT_ROWS, end), context_len)
            yield replace(piece, context_len=context_len - (end - piece.end_row))


def _grouped(pieces: list[_Piece], max_rows: int) -> Iterator[list[_Piece]]:
    """Neighbouring pieces of at most `max_rows` rows together."""
    group: list[_Piece] = []
    for piece in pieces:
        if group and piece.end_row - group[0].first_row > max_rows:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
