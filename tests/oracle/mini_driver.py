"""A test-side stand-in for scheduler and runner: block tables, chunks and batches around `LanguageModel.forward`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.batch import StepBatch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache


@dataclass(slots=True)
class DrivenSequence:
    """Tokens of one sequence, how many of them are in the cache, and where."""

    token_ids: list[int]
    block_table: list[int]
    num_computed_tokens: int = 0
    logits: list[Tensor] = field(default_factory=list)
    """One row [vocab_size] per computed token."""


class MiniDriver:
    """Runs steps of any mix of chunks over one cache."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        num_blocks: int = 128,
        block_size: int = 16,
        dtype: KvDtype = KvDtype.FP32,
        block_order: Sequence[int] | None = None,
    ) -> None:
        config = model.config
        layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
        self.model = model
        self.cache = KvCache(layout, num_blocks, model.device)
        self._free = list(range(num_blocks) if block_order is None else block_order)

    def add(self, token_ids: Sequence[int], max_tokens: int = 0) -> DrivenSequence:
        """A sequence with blocks for its tokens and `max_tokens` more."""
        count = self.cache.layout.num_blocks(len(token_ids) + max_tokens)
        blocks, self._free = self._free[:count], self._free[count:]
        return DrivenSequence(list(token_ids), blocks)

    def step(self, work: Sequence[tuple[DrivenSequence, int]]) -> Tensor:
        """Compute the next `n` tokens of each sequence; returns logits of every row, [num_tokens, vocab_size]."""
        block_size = self.cache.layout.block_size
        token_ids, positions, slots, starts, lens = [], [], [], [0], []
        for sequence, count in work:
            first = sequence.num_computed_tokens
            for position in range(first, first + count):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                slots.append(sequence.block_table[position // block_size] * block_size + position % block_size)
            starts.append(len(token_ids))
            lens.append(first + count)
        widest = max(len(sequence.block_table) for sequence, _ in work)
        batch = StepBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor(
                [s.block_table + [0] * (widest - len(s.block_table)) for s, _ in work], dtype=torch.int32
            ),
            logit_rows=torch.arange(len(token_ids)),
        )
        logits = self.model.forward(batch, self.cache)
        for index, (sequence, count) in enumerate(work):
            sequence.num_computed_tokens += count
            sequence.logits.extend(logits[starts[index] : starts[index + 1]])
        return logits

    def prefill(self, sequence: DrivenSequence, chunk: int | None = None) -> None:
        """Compute all tokens that are not yet, in chunks."""
        while (left := len(sequence.token_ids) - sequence.num_computed_tokens) > 0:
            self.step([(sequence, min(left, chunk or left))])

    def decode(self, sequences: Sequence[DrivenSequence], num_tokens: int) -> None:
        """Append greedy tokens to all sequences, one batched step per token; the last one is not computed."""
        for _ in range(num_tokens):
            for sequence in sequences:
                sequence.token_ids.append(int(sequence.logits[-1].argmax()))
            self.step([(sequence, 1) for sequence in sequences])


def generate(driver: MiniDriver, prompt: Sequence[int], num_tokens: int, chunk: int | None = None) -> DrivenSequence:
    """Prefill a prompt and decode greedily, alone."""
    sequence = driver.add(prompt, num_tokens)
    driver.prefill(sequence, chunk)
    driver.decode([sequence], num_tokens)
    return sequence
