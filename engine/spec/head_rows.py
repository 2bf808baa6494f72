"""The rows that a head drafts with: one for each sequence, moving on by one position a pass. Owns no blocks."""

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.batch import StepBatch
from engine.sequence import Sequence


class HeadRowsBatch:
    """Arrays of a pass, changed in place from pass to pass."""

    def __init__(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int], block_size: int) -> None:
        """Begin with each sequence's newest token.

        Args:
            sequences: One row each.
            limits: Passes in which each takes part; its block table covers them.
            block_size: Tokens in a block.
        """
        self._block_size = block_size
        starts = [sequence.num_tokens - 1 for sequence in sequences]
        num_blocks = [-(-(start + limit) // block_size) for start, limit in zip(starts, limits, strict=True)]
        tables = np.zeros((len(sequences), max(num_blocks)), dtype=np.int32)
        for row, (sequence, count) in enumerate(zip(sequences, num_blocks, strict=True)):
            tables[row, :count] = sequence.block_table[:count]
        self._tables = tables
        self._positions: NDArray[np.int64] = np.array(starts, dtype=np.int64)

    def batch(self, token_ids: SequenceOf[int]) -> StepBatch:
        """Return the pass that computes these tokens, one for each row."""
        positions = self._positions
        count = len(positions)
        blocks = self._tables[np.arange(count), positions // self._block_size].astype(np.int64)
        return StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            query_start=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.from_numpy((positions + 1).astype(np.int32)),
            block_tables=torch.from_numpy(self._tables),
            logit_rows=torch.arange(count),
        )

    def advance(self, rows: SequenceOf[int]) -> None:
        """Keep these rows, ascending, and move on by one position."""
        if len(rows) < len(self._positions):
            self._tables = np.ascontiguousarray(self._tables[rows])
            self._positions = self._positions[rows]
        self._positions = self._positions + 1
