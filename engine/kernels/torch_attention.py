"""Paged attention with PyTorch calls: KV writes, gathers of whole blocks, batched matrix products.

Plans once a step which rows go together, then runs the plan for each layer. Sequences with equally many rows and a
similar context share one batched product, so a decode step is a few calls, whatever its batch; a prefill chunk is cut
into tiles of rows that read only the keys they can see. `reference.paged_attention` says what is computed.

Row-exactness: a row's result does not depend on its neighbours. Scores of a row are one dot product each; padding keys
get weight 0 and are added behind (or, with a window, whole blocks before) the real ones, which leaves every partial sum
as it is; and products have at least `_MIN_PRODUCT_ROWS` rows, since BLAS takes other kernels for very few. Equal bits
were measured with MKL; what is promised is 1e-5.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.interface import AttentionGeometry

_MIN_PRODUCT_ROWS = 8
_MAX_GROUPED_ROWS = 16
"""Sequences with more rows than this are prefill chunks and are computed one by one, in tiles."""
_TILE_ROWS = 128
_MAX_GATHERED_TOKENS = 16384
"""Bounds the gathered K and V of one group: 24 MiB for SmolLM2, 128 MiB at 8 heads of 128."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some rows of each sequence of a group, and the keys they can see."""

    first_row: int
    num_rows: int
    first_key: int
    """In gathered keys; a whole block boundary."""
    num_keys: int
    hidden: Tensor
    """[group, 1, num_rows, 1, num_keys - num_open_keys] bool: keys that a row must not see."""
    num_open_keys: int
    """Keys from `first_key` on that every row sees."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences with the same number of rows, computed together."""

    rows: slice | Tensor
    """Where their rows are in the step: a range, or [group * num_rows] int64."""
    num_seqs: int
    num_rows: int
    """Rows of each sequence."""
    num_padded_rows: int
    """With padding up to the least size of a product."""
    gather: Tensor
    """[2 * group * num_kv_heads * num_blocks] int64: rows of the cache seen as [num_blocks * 2 * num_kv_heads, run]."""
    unused_values: Tensor
    """[n] int64: gathered value rows that hold no token of the sequence; whatever is there must not spread."""
    tiles: tuple[_Tile, ...]


class TorchStepAttention:
    """`StepAttention` for one step."""

    def __init__(self, geometry: AttentionGeometry) -> None:
        """Plan the step's cache accesses."""
        self._geometry = geometry
        self._device = geometry.slot_mapping.device
        self._group_size = geometry.num_heads // geometry.num_kv_heads
        self._slot_rows = self._plan_writes()
        self._groups = [self._plan_group(seqs) for seqs in self._grouped_seqs()]

    def write_kv(self, kv: Tensor, layer_cache: Tensor) -> None:
        """See `StepAttention.write_kv`."""
        head_dim = self._geometry.head_dim
        rows = kv[: self._geometry.slot_mapping.shape[0]].to(layer_cache.dtype).reshape(-1, head_dim)
        layer_cache.view(-1, head_dim).index_copy_(0, self._slot_rows, rows)

    def paged_attention(self, query: Tensor, layer_cache: Tensor) -> Tensor:
        """See `StepAttention.paged_attention`."""
        out = torch.zeros_like(query)
        scaled = query * self._geometry.head_dim**-0.5
        for group in self._groups:
            keys, values = self._gather(group, layer_cache)
            rows = scaled[group.rows].view(group.num_seqs, group.num_rows, *self._heads_shape)
            result = torch.empty_like(rows)
            for tile in group.tiles:
                span = slice(tile.first_row, tile.first_row + tile.num_rows)
                result[:, span] = self._attend(rows[:, span], keys, values, tile, group)
            out[group.rows] = result.view(-1, *query.shape[1:])
        return out

    @property
    def _heads_shape(self) -> tuple[int, int, int]:
        return self._geometry.num_kv_heads, self._group_size, self._geometry.head_dim

    def _attend(self, rows: Tensor, keys: Tensor, values: Tensor, tile: _Tile, group: _Group) -> Tensor:
        # rows [group, tile rows, kv heads, group size, dim]; the rows that share a KV head become one product's rows.
        num_kv_heads, group_size, head_dim = self._heads_shape
        num_padded = max(tile.num_rows, group.num_padded_rows)
        by_head = rows.new_empty(group.num_seqs, num_kv_heads, num_padded, group_size, head_dim)
        by_head[:, :, : tile.num_rows] = rows.permute(0, 2, 1, 3, 4)
        by_head[:, :, tile.num_rows :] = 0.0
        span = slice(tile.first_key, tile.first_key + tile.num_keys)
        scores = by_head.view(-1, num_padded * group_size, head_dim) @ keys[:, span].transpose(1, 2)
        grouped = scores.view(group.num_seqs, num_kv_heads, num_padded, group_size, tile.num_keys)
        grouped[:, :, : tile.num_rows, :, tile.num_open_keys :].masked_fill_(tile.hidden, -torch.inf)
        weighted = torch.softmax(scores, dim=-1) @ values[:, span]
        return weighted.view(by_head.shape)[:, :, : tile.num_rows].permute(0, 2, 1, 3, 4)

    def _gather(self, group: _Group, layer_cache: Tensor) -> tuple[Tensor, Tensor]:
        # A head's tokens of one block lie together, so the gather's runs are block_size * head_dim elements.
        run = self._geometry.block_size * self._geometry.head_dim
        gathered = layer_cache.view(-1, run).index_select(0, group.gather).float()
        keys, values = gathered.view(2, group.num_seqs * self._geometry.num_kv_heads, -1, self._geometry.head_dim)
        values.view(-1, self._geometry.head_dim).index_fill_(0, group.unused_values, 0.0)
        return keys, values

    def _plan_writes(self) -> Tensor:
        # Row of [num_blocks * 2 * num_kv_heads * block_size, head_dim] for each token, K or V, and head.
        geometry = self._geometry
        block_size, slots = geometry.block_size, geometry.slot_mapping
        heads = torch.arange(2 * geometry.num_kv_heads, device=self._device)
        block_heads = (slots // block_size)[:, None] * heads.shape[0] + heads
        return (block_heads * block_size + (slots % block_size)[:, None]).flatten()

    def _grouped_seqs(self) -> Iterator[list[int]]:
        """Yield the sequences of each group: equally many rows, contexts within a factor of two."""
        geometry = self._geometry
        starts, context_lens = geometry.query_start.tolist(), geometry.context_lens.tolist()
        by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
        for seq, context_len in enumerate(context_lens):
            num_rows = starts[seq + 1] - starts[seq]
            if num_rows > _MAX_GROUPED_ROWS:
                yield [seq]
            else:
                by_shape[num_rows, (context_len // geometry.block_size).bit_length()].append(seq)
        for seqs in by_shape.values():
            longest = max(context_lens[seq] for seq in seqs)
            most = max(1, _MAX_GATHERED_TOKENS // longest)
            for start in range(0, len(seqs), most):
                yield seqs[start : start + most]

    def _plan_group(self, seqs: list[int]) -> _Group:
        geometry = self._geometry
        block_size, window = geometry.block_size, geometry.sliding_window
        members = torch.tensor(seqs)
        starts = geometry.query_start[members].long()
        num_rows = int(geometry.query_start[seqs[0] + 1] - starts[0])
        context_lens = geometry.context_lens[members].long()
        first_positions = context_lens - num_rows
        # With a window, blocks that lie wholly before it are not gathered.
        first_blocks = torch.zeros_like(starts)
        if window is not None:
            first_blocks = (first_positions - window + 1).clamp(min=0) // block_size
        num_blocks = int(((context_lens + block_size - 1) // block_size - first_blocks).max())
        columns = (first_blocks[:, None] + torch.arange(num_blocks)).clamp(max=geometry.block_tables.shape[1] - 1)
        tables = geometry.block_tables[members].long().gather(1, columns)  # [group, num_blocks]
        key_positions = first_blocks[:, None] * block_size + torch.arange(num_blocks * block_size)
        is_unused = key_positions >= context_lens[:, None]  # [group, keys]
        rows = (starts[:, None] + torch.arange(num_rows)).flatten()
        is_range = bool((rows[1:] == rows[:-1] + 1).all())
        return _Group(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if is_range else rows.to(self._device),
            num_seqs=len(seqs),
            num_rows=num_rows,
            num_padded_rows=-(-_MIN_PRODUCT_ROWS // self._group_size),
            gather=self._gather_rows(tables).to(self._device),
            unused_values=self._value_rows(is_unused).to(self._device),
            tiles=tuple(self._plan_tiles(first_positions, num_rows, key_positions)),
        )

    def _gather_rows(self, tables: Tensor) -> Tensor:
        # [2, group, num_kv_heads, num_blocks]: K of every sequence and head, then V.
        num_kv_heads = self._geometry.num_kv_heads
        halves = torch.arange(2)[:, None, None, None] * num_kv_heads
        heads = torch.arange(num_kv_heads)[None, None, :, None]
        return (tables[None, :, None] * (2 * num_kv_heads) + halves + heads).flatten()

    def _value_rows(self, is_unused: Tensor) -> Tensor:
        num_kv_heads = self._geometry.num_kv_heads
        by_head = is_unused[:, None].expand(-1, num_kv_heads, -1)
        return by_head.flatten().nonzero().flatten()

    def _plan_tiles(self, first_positions: Tensor, num_rows: int, key_positions: Tensor) -> Iterator[_Tile]:
        """Cut rows into tiles; `first_positions` is [group], `key_positions` [group, keys]."""
        block_size, window = self._geometry.block_size, self._geometry.sliding_window
        for first_row in range(0, num_rows, _TILE_ROWS):
            tile_rows = min(_TILE_ROWS, num_rows - first_row)
            positions = first_positions[:, None] + first_row + torch.arange(tile_rows)  # [group, rows]
            is_hidden = key_positions[:, None] > positions[..., None]  # [group, rows, keys]
            if window is not None:
                is_hidden |= key_positions[:, None] <= positions[..., None] - window
            # Whole blocks that no row sees are cut off at both ends; what all rows see in front needs no mask.
            seen_blocks = (~is_hidden).flatten(0, 1).any(0).view(-1, block_size).any(1).nonzero()
            first_key, end_key = int(seen_blocks[0]) * block_size, (int(seen_blocks[-1]) + 1) * block_size
            is_hidden = is_hidden[:, :, first_key:end_key]
            partly_hidden = is_hidden.flatten(0, 1).any(0).nonzero()
            num_open = int(partly_hidden[0]) if partly_hidden.numel() else end_key - first_key
            hidden = is_hidden[:, None, :, None, num_open:].to(self._device)
            yield _Tile(first_row, tile_rows, first_key, end_key - first_key, hidden, num_open)
