"""SmolLM2-135M-Instruct (Q4_1) against transformers on the same dequantized weights, in fp32.

The weights reach transformers by a way of their own: the `gguf` package's reader, and an un-permutation written here.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from engine.model.interface import LanguageModel
from engine.model.loader import load_model
from tests.oracle.mini_driver import DrivenSequence, MiniDriver

NUM_NEW_TOKENS = 64
TIE = 1e-4
"""Transformers' two best logits closer than this may come out in either order."""
MAX_LOGIT_DIFFERENCE = 1e-3
"""Thirty layers of fp32 in another order of summation; logits are around 20."""

QUESTIONS = (
    "What is the capital of France?",
    "Explain gravity to a child.",
    "Write a short poem about the sea.",
    "What is 12 times 11?",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "Summarize: The cat sat on the mat. It was raining, so the cat stayed there all day and slept.",
)


@pytest.fixture(scope="module")
def smollm2() -> LanguageModel:
    return load_model("smollm2", compute="torch")


@pytest.fixture(scope="module")
def conversations(smollm2: LanguageModel, tokenizer: Tokenizer) -> list[DrivenSequence]:
    """All questions answered greedily in one batch, without an end."""
    driver = MiniDriver(smollm2, num_blocks=256)
    sequences = []
    for question in QUESTIONS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        sequences.append(driver.add(tokenizer.encode(prompt).ids, NUM_NEW_TOKENS))
        driver.prefill(sequences[-1])
    driver.decode(sequences, NUM_NEW_TOKENS)
    return sequences


def transformers_smollm2(path: Path) -> LlamaForCausalLM:
    reader = gguf.GGUFReader(path)
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if tensor.name == "token_embd.weight":
            state["model.embed_tokens.weight"] = state["lm_head.weight"] = torch.from_numpy(values)
        elif tensor.name == "output_norm.weight":
            state["model.norm.weight"] = torch.from_numpy(values)
        else:
            _, layer, part, _ = tensor.name.split(".")
            if part in ("attn_q", "attn_k"):
                order = np.concatenate([np.arange(0, 64, 2), np.arange(1, 64, 2)])
                values = values.reshape(-1, 64, 576)[:, order].reshape(values.shape)
            state[f"model.layers.{layer}.{parts[part]}.weight"] = torch.from_numpy(np.ascontiguousarray(values))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    oracle = LlamaForCausalLM(config).float().eval()
    oracle.load_state_dict(state, strict=True)
    return oracle


def test_greedy_tokens_equal_transformers(
    conversations: list[DrivenSequence], smollm2_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers reads prompt and answer; each of the 64 tokens must be the one that it would have chosen there.

    By induction that is its own greedy answer, as long as no token differs; where its two best logits tie, either
    token is right and it goes on from ours.
    """
    oracle = transformers_smollm2(smollm2_gguf)
    num_ties, largest = 0, 0.0
    for question, sequence in zip(QUESTIONS, conversations, strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([sequence.token_ids])).logits[0]
        largest = max(largest, (torch.stack(sequence.logits) - expected).abs().max().item())
        first = len(sequence.token_ids) - NUM_NEW_TOKENS
        for position in range(first, len(sequence.token_ids)):
            best = expected[position - 1].topk(2)
            if int(best.indices[0]) == sequence.token_ids[position]:
                continue
            gap = (best.values[0] - expected[position - 1, sequence.token_ids[position]]).item()
            assert gap < TIE, f"{question}: token {position - first} differs by {gap}"
            num_ties += 1
    with capsys.disabled():
        sys.stdout.write(
            f"\nSmolLM2: {num_ties} of {NUM_NEW_TOKENS * len(QUESTIONS)} tokens differ from transformers within a tie; "
            f"largest difference of a logit {largest:.1e}\n"
        )
    assert largest <= MAX_LOGIT_DIFFERENCE


def test_answers_are_sensible(conversations: list[DrivenSequence], tokenizer: Tokenizer) -> None:
    """Wrong rotation or a wrong row order would be wrong in both models above, but not speak English."""
    answers = [tokenizer.decode(sequence.token_ids[-NUM_NEW_TOKENS:]) for sequence in conversations]
    assert "Paris" in answers[0]
    assert "Shakespeare" in answers[8]


def test_batched_answers_equal_single_ones(smollm2: LanguageModel, conversations: list[DrivenSequence]) -> None:
    for together in conversations[:2]:
        driver = MiniDriver(smollm2, num_blocks=16)
        alone = driver.add(together.token_ids[:-NUM_NEW_TOKENS], NUM_NEW_TOKENS)
        driver.prefill(alone, chunk=13)
        driver.decode([alone], 16)
        count = len(alone.token_ids)
        assert alone.token_ids == together.token_ids[:count]
        difference = (torch.stack(alone.logits) - torch.stack(together.logits[:count])).abs().max().item()
        assert difference <= 1e-5
