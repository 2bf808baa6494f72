"""The ways in which the same tokens can be computed, for tests that compare their bits."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.config import KvDtype
from engine.model.batch import StepBatch
from engine.model.interface import LanguageModel
from tests.oracle.mini_driver import DrivenSequence, MiniDriver

NUM_NEIGHBOURS = 15
NUM_VERIFY_ROWS = 8


def prompt_ids(seed: int, count: int) -> list[int]:
    """Random token ids that every tiny vocabulary has."""
    return torch.randint(4, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def each_way(
    model: LanguageModel, prompt: Sequence[int], dtype: KvDtype, chunks: Sequence[int] = (7, 1)
) -> dict[str, Tensor]:
    """Logits [len(prompt), vocab_size] of every token of a prompt, by the way they were computed."""
    ways = {"whole": _in_chunks(model, prompt, dtype, len(prompt))}
    for chunk in chunks:
        ways[f"chunks of {chunk}"] = _in_chunks(model, prompt, dtype, chunk)
    ways["rows to verify"] = _in_chunks(model, prompt, dtype, NUM_VERIFY_ROWS)
    ways["batch of 16"] = _among_others(model, prompt, dtype)
    return ways


def _in_chunks(model: LanguageModel, prompt: Sequence[int], dtype: KvDtype, chunk: int) -> Tensor:
    driver = MiniDriver(model, dtype=dtype)
    sequence = driver.add(prompt)
    driver.prefill(sequence, chunk)
    return torch.stack(sequence.logits)


def _among_others(model: LanguageModel, prompt: Sequence[int], dtype: KvDtype) -> Tensor:
    """Decodes, rows to verify and prefill chunks of 15 other sequences share each step."""
    rng = random.Random(1)
    driver = MiniDriver(model, num_blocks=300, block_size=8, dtype=dtype)
    sequence = driver.add(prompt)
    others = [driver.add(prompt_ids(100 + i, rng.randrange(1, 100))) for i in range(NUM_NEIGHBOURS)]
    while (left := len(prompt) - sequence.num_computed_tokens) > 0:
        work = [(sequence, min(left, rng.choice((1, 1, 8, 40))))]
        for other in others:
            other_left = len(other.token_ids) - other.num_computed_tokens
            if other_left:
                work.append((other, min(other_left, rng.choice((1, 1, 8, 30)))))
        rng.shuffle(work)
        driver.step(work)
    return torch.stack(sequence.logits)


def whole_prompt_batch(
    sequence: DrivenSequence, logit_rows: Sequence[int] = (), slots: Tensor | None = None
) -> StepBatch:
    """All tokens of one sequence as a step."""
    count = len(sequence.token_ids)
    positions = torch.arange(count)
    table = torch.tensor(sequence.block_table, dtype=torch.int64)
    return StepBatch(
        token_ids=torch.tensor(sequence.token_ids, dtype=torch.int64),
        positions=positions,
        slot_mapping=table[positions // 16] * 16 + positions % 16 if slots is None else slots,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=table.to(torch.int32)[None],
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
