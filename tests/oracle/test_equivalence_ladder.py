"""A token's logits do not depend on what is computed beside it: layout, chunks, batch, neighbours' KV.

The plain path promises tokens and logits to 1e-5. On machines measured so far it gave equal bits, see
`engine/kernels/torch_kernels.py`; these tests hold it to the promise.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.config import KvDtype
from engine.model.batch import StepBatch
from engine.model.interface import LanguageModel
from engine.model.loader import load_model
from tests.oracle.mini_driver import DrivenSequence, MiniDriver, generate

TOLERANCE = 1e-5
NUM_NEW_TOKENS = 24
FAMILIES = ("llama", "mistral", "qwen3")
"""Plain, with a sliding window, and with normed heads of an odd size."""

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Callable[[str], Path]) -> Callable[[str], LanguageModel]:
    return cache(lambda family: load_model(str(tiny_folder(family))))


def prompt_ids(seed: int, count: int) -> list[int]:
    return torch.randint(4, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(found: DrivenSequence, expected: DrivenSequence) -> None:
    assert found.token_ids == expected.token_ids
    assert_close(found.logits, expected.logits)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    difference = (torch.stack(list(found)) - torch.stack(list(expected))).abs().max().item()
    assert difference <= TOLERANCE


@families
def test_blocks_out_of_order_equal_blocks_in_order(family: str, tiny_model: Callable[[str], LanguageModel]) -> None:
    shuffled = random.Random(0).sample(range(128), 128)
    in_order = generate(MiniDriver(tiny_model(family)), prompt_ids(0, 50), NUM_NEW_TOKENS)
    out_of_order = generate(MiniDriver(tiny_model(family), block_order=shuffled), prompt_ids(0, 50), NUM_NEW_TOKENS)
    assert_same(out_of_order, in_order)


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_size_changes_nothing(block_size: int, tiny_model: Callable[[str], LanguageModel]) -> None:
    expected = generate(MiniDriver(tiny_model("mistral")), prompt_ids(0, 50), NUM_NEW_TOKENS)
    found = generate(MiniDriver(tiny_model("mistral"), block_size=block_size), prompt_ids(0, 50), NUM_NEW_TOKENS)
    assert_same(found, expected)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
@families
def test_chunked_prefill_equals_whole(family: str, chunk: int, tiny_model: Callable[[str], LanguageModel]) -> None:
    whole = generate(MiniDriver(tiny_model(family)), prompt_ids(1, 150), NUM_NEW_TOKENS)
    chunked = generate(MiniDriver(tiny_model(family)), prompt_ids(1, 150), NUM_NEW_TOKENS, chunk)
    assert_same(chunked, whole)


@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.BF16, KvDtype.FP16])
@families
def test_mixed_batches_equal_alone(family: str, dtype: KvDtype, tiny_model: Callable[[str], LanguageModel]) -> None:
    """Sequences of mixed lengths join and leave; decodes, draft-like runs and prefill chunks share steps."""
    model, rng = tiny_model(family), random.Random(7)
    prompts = [prompt_ids(seed, length) for seed, length in enumerate((3, 1, 40, 90, 17, 16, 64))]
    alone = [generate(MiniDriver(model, dtype=dtype), prompt, NUM_NEW_TOKENS) for prompt in prompts]

    driver = MiniDriver(model, dtype=dtype)
    waiting = [driver.add(prompt, NUM_NEW_TOKENS) for prompt in prompts]
    together = list(waiting)
    running: list[DrivenSequence] = []
    while waiting or running:
        if waiting and rng.random() < 0.5:
            running.append(waiting.pop(0))
        work = []
        for sequence in running:
            left = len(sequence.token_ids) - sequence.num_computed_tokens
            if left == 0:
                sequence.token_ids.append(int(sequence.logits[-1].argmax()))
                left = 1
            work.append((sequence, min(left, rng.choice((1, 4, 23, 80)))))
        rng.shuffle(work)
        if work:
            driver.step(work)
        running = [s for s in running if s.num_computed_tokens < len(prompts[together.index(s)]) + NUM_NEW_TOKENS]
    for found, expected in zip(together, alone, strict=True):
        assert_same(found, expected)


def test_half_precision_cache_rounds_the_chunks_own_tokens_too(
    tiny_model: Callable[[str], LanguageModel],
) -> None:
    """Otherwise a token would see its neighbours unrounded in a prefill and rounded in a decode."""
    rounded = generate(MiniDriver(tiny_model("llama"), dtype=KvDtype.BF16), prompt_ids(2, 40), 4)
    token_by_token = generate(MiniDriver(tiny_model("llama"), dtype=KvDtype.BF16), prompt_ids(2, 40), 4, chunk=1)
    exact = generate(MiniDriver(tiny_model("llama")), prompt_ids(2, 40), 4)
    assert_same(token_by_token, rounded)
    assert (torch.stack(rounded.logits[:40]) - torch.stack(exact.logits[:40])).abs().max().item() > 1e-3


@families
def test_garbage_in_foreign_slots_does_not_spread(family: str, tiny_model: Callable[[str], LanguageModel]) -> None:
    """Blocks are reused without being cleared: whatever lies behind a sequence's last token must have no effect."""
    prompts = [prompt_ids(3, 21), prompt_ids(4, 60)]
    expected = [generate(MiniDriver(tiny_model(family)), prompt, 4) for prompt in prompts]
    driver = MiniDriver(tiny_model(family))
    driver.cache.tensor.fill_(float("nan"))
    found = [driver.add(prompt, 4) for prompt in prompts]
    driver.step([(sequence, len(sequence.token_ids)) for sequence in found])
    driver.decode(found, 4)
    for sequence, alone in zip(found, expected, strict=True):
        assert_same(sequence, alone)


def test_layers_are_reported_in_order_with_their_kv_in_the_cache(
    tiny_model: Callable[[str], LanguageModel],
) -> None:
    model = tiny_model("llama")
    driver = MiniDriver(model)
    sequence = driver.add(prompt_ids(5, 16))
    seen: list[int] = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        block = driver.cache.tensor[:, sequence.block_table[0]]
        is_written = block.flatten(1).ne(0).all(dim=1).tolist()
        assert is_written == [index <= layer for index in range(model.config.num_layers)]

    model.forward(whole_prompt_batch(sequence), driver.cache, on_layer)
    assert seen == list(range(model.config.num_layers))


def test_only_the_rows_asked_for_have_logits(tiny_model: Callable[[str], LanguageModel]) -> None:
    model = tiny_model("llama")
    driver = MiniDriver(model)
    sequence = driver.add(prompt_ids(6, 20))
    driver.prefill(sequence)
    batch = whole_prompt_batch(sequence, logit_rows=[19, 3])
    found = model.forward(batch, driver.cache)
    assert found.shape == (2, model.config.vocab_size)
    assert found.dtype is torch.float32
    assert_close(list(found), [sequence.logits[19], sequence.logits[3]])
    assert model.forward(whole_prompt_batch(sequence, logit_rows=[]), driver.cache).shape == (0, 257)
    found += 1.0  # the caller owns the logits


def whole_prompt_batch(sequence: DrivenSequence, logit_rows: Sequence[int] = ()) -> StepBatch:
    count = len(sequence.token_ids)
    positions = torch.arange(count)
    table = torch.tensor(sequence.block_table)
    return StepBatch(
        token_ids=torch.tensor(sequence.token_ids),
        positions=positions,
        slot_mapping=table[positions // 16] * 16 + positions % 16,
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=table[None].int(),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )
