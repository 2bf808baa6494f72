"""The input tensors of one model call, and how they are made from the rows of sequences. Holds no policy."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.types import BlockId


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, all sequences side by side.

    Rows of one sequence are consecutive and in position order:

        rows        0 1 2 3 4 | 5 | 6 7
        sequence    A A A A A | B | C C      query_start = [0, 5, 6, 8]

    `query_start`, `context_lens` and `block_tables` should be CPU tensors: the kernels plan from them on the host.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64, position of each token in its sequence, from 0."""
    slot_mapping: Tensor
    """[num_tokens] int64, `block_id * block_size + offset`: where the token's K and V go; no slot occurs twice."""
    query_start: Tensor
    """[num_seqs + 1] int32, half-open row ranges; every sequence has at least one row."""
    context_lens: Tensor
    """[num_seqs] int32, tokens in the KV cache after this step, this step's included."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32, padded with 0."""
    logit_rows: Tensor
    """[num_logit_rows] int64, the rows whose logits are wanted, in the order in which they are returned."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Tokens of one sequence that a call computes."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Position of the first; KV of everything before it is in the cache."""
    block_table: Sequence[BlockId]
    """Blocks up to the last token at least."""
    num_logit_rows: int
    """Of how many of the last tokens logits are wanted."""
    num_more: int = 0
    """Positions behind the last token that the call's block table is to cover as well, as `block_table` does."""


def build_batch(parts: Sequence[SequenceRows], block_size: int) -> StepBatch:
    """Return the tensors of one call, on the host; logits come in the order of `parts`."""
    # A step has streamed all weights through the caches, so a library call finds its code in memory: make few of them.
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    query_start = [0]
    context_lens: list[int] = []
    for part in parts:
        table, end = part.block_table, part.start + len(part.token_ids)
        token_ids += part.token_ids
        positions += range(part.start, end)
        slots += [
            table[position // block_size] * block_size + position % block_size for position in range(part.start, end)
        ]
        last = len(token_ids)
        logit_rows += range(last - part.num_logit_rows, last)
        query_start.append(last)
        context_lens.append(end)
    num_blocks = [-(-(end + part.num_more) // block_size) for part, end in zip(parts, context_lens, strict=True)]
    width = max(num_blocks)
    tables: list[int] = []
    for part, count in zip(parts, num_blocks, strict=True):
        tables += part.block_table[:count]
        tables += [0] * (width - count)
    longs = torch.from_numpy(np.array([*token_ids, *positions, *slots, *logit_rows], dtype=np.int64))
    ints = torch.from_numpy(np.array([*query_start, *context_lens, *tables], dtype=np.int32))
    count, num_seqs = len(token_ids), len(parts)
    rows = torch.split_with_sizes(longs, (count, count, count, len(logit_rows)))
    starts, lens, flat_tables = torch.split_with_sizes(ints, (num_seqs + 1, num_seqs, num_seqs * width))
    return StepBatch(
        token_ids=rows[0],
        positions=rows[1],
        slot_mapping=rows[2],
        query_start=starts,
        context_lens=lens,
        block_tables=flat_tables.view(num_seqs, width),
        logit_rows=rows[3],
    )
