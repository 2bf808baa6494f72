"""The native model on a real checkpoint: the same bits in every way to compute them, and hardly worse than fp32."""

import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.common.data import spec_bench_questions
from engine.config import KvDtype
from engine.kernels.cpu.library import load_library
from engine.model.cpu.model import NativeModel
from engine.model.interface import LanguageModel
from engine.model.loader import load_model
from tests.oracle.mini_driver import MiniDriver
from tests.oracle.native_runs import each_way

TEXT = Path(__file__).parents[1] / "data" / "walk.txt"
NUM_ARTICLES = 6
MAX_PERPLEXITY_COST = 0.005
NUM_NEW_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Explain gravity to a child.",
    "Write a short poem about the sea.",
    "What is 12 times 11?",
    "List three uses of copper.",
    "Why is the sky blue?",
    "Who wrote Romeo and Juliet?",
    "Hi",
)


@pytest.fixture(scope="module")
def native() -> Callable[[int], LanguageModel]:
    return cache(lambda num_threads: load_model("smollm2", num_threads=num_threads))


@pytest.fixture(scope="module")
def text_ids(tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return ids


def test_it_is_the_default_and_loads_in_two_seconds(smollm2_gguf: Path) -> None:
    load_library()  # compiling is another matter
    memory_before, start = resident_bytes(), time.process_time()
    model = load_model("smollm2")
    seconds, memory = time.process_time() - start, resident_bytes() - memory_before
    assert isinstance(model, NativeModel)
    assert seconds < 2.0
    assert memory < 1.3 * smollm2_gguf.stat().st_size
    assert not any(str(smollm2_gguf) in line for line in Path("/proc/self/maps").read_text().splitlines())
    model.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.BF16, KvDtype.INT8], ids=str)
def test_logits_are_the_same_bits_however_a_token_is_computed(
    dtype: KvDtype, native: Callable[[int], LanguageModel], text_ids: Sequence[int]
) -> None:
    prompt = text_ids[:280]  # a whole split of attention, and a part
    expected: Tensor | None = None
    for num_threads in (1, 2):
        # Token by token is the slow way; once is enough.
        chunks = (7, 1) if num_threads == 1 else (7,)
        for way, found in each_way(native(num_threads), prompt, dtype, chunks).items():
            expected = found if expected is None else expected
            assert torch.equal(found, expected), f"{way}, {num_threads} threads"


def test_greedy_answers_in_a_batch_equal_single_ones(
    native: Callable[[int], LanguageModel], tokenizer: Tokenizer
) -> None:
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    prompts += [prompt + prompts[0] for prompt in prompts]
    driver = MiniDriver(native(2), num_blocks=160)
    together = [driver.add(prompt, NUM_NEW_TOKENS) for prompt in prompts]
    driver.step([(sequence, len(sequence.token_ids)) for sequence in together])
    driver.decode(together, NUM_NEW_TOKENS)
    for prompt, sequence in zip(prompts, together, strict=True):
        alone_driver = MiniDriver(native(1), num_blocks=16)
        alone = alone_driver.add(prompt, NUM_NEW_TOKENS)
        alone_driver.prefill(alone)
        alone_driver.decode([alone], NUM_NEW_TOKENS)
        assert alone.token_ids == sequence.token_ids
        assert torch.equal(torch.stack(alone.logits), torch.stack(sequence.logits))


def natural_texts(tokenizer: Tokenizer, text_ids: Sequence[int]) -> list[list[int]]:
    """Enough text that chance moves its perplexity by 0.1 %, not by the 0.25 % of one page."""
    articles = [question.turns[0] for question in spec_bench_questions() if question.category == "summarization"]
    return [list(text_ids), *(tokenizer.encode(article).ids for article in articles[:NUM_ARTICLES])]


def mean_loss(model: LanguageModel, texts: Sequence[Sequence[int]], dtype: KvDtype) -> float:
    losses: list[Tensor] = []
    for token_ids in texts:
        driver = MiniDriver(model, dtype=dtype)
        sequence = driver.add(token_ids)
        driver.prefill(sequence, 256)
        logits, targets = torch.stack(sequence.logits[:-1]).double(), torch.tensor(token_ids[1:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return float(torch.cat(losses).mean())


@pytest.mark.slow
def test_perplexity_is_that_of_the_fp32_path(
    native: Callable[[int], LanguageModel], tokenizer: Tokenizer, text_ids: list[int]
) -> None:
    texts = natural_texts(tokenizer, text_ids)
    exact = mean_loss(load_model("smollm2", compute="torch"), texts, KvDtype.FP32)
    assert math.log(5) < exact < math.log(60), "a text that the model knows nothing of shows little"
    for dtype in (KvDtype.FP32, KvDtype.FP16, KvDtype.INT8):
        cost = math.exp(mean_loss(native(2), texts, dtype) - exact) - 1
        assert cost < MAX_PERPLEXITY_COST, f"{dtype} KV: {cost:+.3%}"
