"""Step tensors for a model that drafts or is probed: rows of several sequences over block tables of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.model.batch import StepBatch
from engine.types import BlockId


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Tokens of one sequence that a pass computes."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Position of the first; KV of everything before it is in the cache."""
    block_table: Sequence[BlockId]
    """Blocks up to the last token at least."""
    num_logit_rows: int
    """Of how many of the last tokens logits are wanted."""


def build_batch(parts: Sequence[SequenceRows], block_size: int) -> StepBatch:
    """Return the tensors of one pass, on the host; logits come in the order of `parts`."""
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
