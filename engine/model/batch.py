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


def build_batch(parts: Sequence[SequenceRows], block_size: int) -> StepBatch:
    """Return the tensors of one call; logits come in the order of `parts`."""
    # On the host: a model plans from them there, and brings to its device what its kernels read.
    query_start = np.cumsum([0, *(len(part.token_ids) for part in parts)])
    context_lens = [part.start + len(part.token_ids) for part in parts]
    tables = np.zeros((len(parts), -(-max(context_lens) // block_size)), dtype=np.int32)
    positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    logit_rows: list[int] = []
    for index, (part, end) in enumerate(zip(parts, context_lens, strict=True)):
        num_blocks = -(-end // block_size)
        table = np.asarray(part.block_table[:num_blocks], dtype=np.int64)
        tables[index, :num_blocks] = table
        rows = np.arange(part.start, end)
        positions.append(rows)
        slots.append(table[rows // block_size] * block_size + rows % block_size)
        last = int(query_start[index + 1])
        logit_rows.extend(range(last - part.num_logit_rows, last))
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    return StepBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        positions=torch.from_numpy(np.concatenate(positions)),
        slot_mapping=torch.from_numpy(np.concatenate(slots)),
        query_start=torch.from_numpy(query_start.astype(np.int32)),
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
