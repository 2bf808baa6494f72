"""Every supported family against transformers, and GGUF against safetensors, on tiny random models in fp32."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.model.files.open import load_config
from engine.model.interface import LanguageModel
from engine.model.loader import load_model
from tests.oracle.mini_driver import MiniDriver, generate
from tests.tiny_models import (
    TINY_FAMILIES,
    TinyFamily,
    read_tiny_model,
    write_tiny_gguf,
    write_tiny_model,
)

MAX_LOGIT_DIFFERENCE = 1e-4
NUM_PROMPT_TOKENS = 70
"""Longer than Mistral's window here, and than the original context of the Llama 3 scaling."""
NUM_NEW_TOKENS = 64

families = pytest.mark.parametrize("family", sorted(TINY_FAMILIES))


def prompt_ids(seed: int = 1, count: int = NUM_PROMPT_TOKENS) -> list[int]:
    return torch.randint(4, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompt_logits(model: LanguageModel, prompt: Sequence[int]) -> Tensor:
    driver = MiniDriver(model)
    sequence = driver.add(prompt)
    driver.prefill(sequence)
    return torch.stack(sequence.logits)


@families
def test_logits_and_greedy_tokens_equal_transformers(family: str, tiny_folder: Callable[[str], Path]) -> None:
    folder, prompt = tiny_folder(family), prompt_ids()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generated = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )
    with torch.no_grad():
        expected = oracle(generated[:, :-1]).logits[0]
    # min_new_tokens keeps transformers from ending, by banning its end-of-sequence ids; so must the comparison.
    banned = torch.zeros(expected.shape[1]).index_fill(0, torch.tensor([2, 3]), -torch.inf)

    driver = MiniDriver(load_model(str(folder)))
    sequence = driver.add(prompt, NUM_NEW_TOKENS)
    driver.prefill(sequence)
    for _ in range(NUM_NEW_TOKENS - 1):
        sequence.token_ids.append(int((sequence.logits[-1] + banned).argmax()))
        driver.step([(sequence, 1)])
    sequence.token_ids.append(int((sequence.logits[-1] + banned).argmax()))

    assert sequence.token_ids == generated[0].tolist()
    assert len(set(sequence.token_ids[NUM_PROMPT_TOKENS:])) > NUM_NEW_TOKENS // 3, "a repeating model shows little"
    difference = (torch.stack(sequence.logits) - expected).abs().max().item()
    assert difference <= MAX_LOGIT_DIFFERENCE
    assert expected.std().item() > 1.0, "flat logits show little"


@families
def test_gguf_equals_safetensors_bit_for_bit(
    family: str, tiny_folder: Callable[[str], Path], tiny_gguf: Callable[[str], Path]
) -> None:
    from_folder, from_gguf = load_model(str(tiny_folder(family))), load_model(str(tiny_gguf(family)))
    assert torch.equal(prompt_logits(from_folder, prompt_ids()), prompt_logits(from_gguf, prompt_ids()))
    assert from_folder.fingerprint == from_gguf.fingerprint
    assert from_folder.config.eos_token_ids == from_gguf.config.eos_token_ids == {2, 3}


def test_fingerprint_tells_weights_and_geometry_apart(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    other_seed = write_tiny_model(tmp_path / "seed", "llama", seed=1)
    other_rope = write_tiny_model(tmp_path / "rope", TinyFamily("Llama", {"vocab_size": 257}, {"rope_theta": 9999.0}))
    folders = [tiny_folder("llama"), other_seed, other_rope, tiny_folder("llama_linear")]
    assert len({load_model(str(folder)).fingerprint for folder in folders}) == len(folders)


def test_interleaved_biases_of_a_llama_gguf_are_put_in_order(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "biased", TinyFamily("Llama", {"attention_bias": True}))
    model = load_model(str(write_tiny_gguf(folder, tmp_path / "biased.gguf")))
    assert model.config.attention_bias
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder).eval()(torch.tensor([prompt_ids()])).logits[0]
    assert (prompt_logits(model, prompt_ids()) - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_gguf_equals_its_dequantized_weights(
    quantization: str, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    folder, kind = tiny_folder("llama"), gguf.GGMLQuantizationType[quantization]
    model = load_model(str(write_tiny_gguf(folder, tmp_path / "quantized.gguf", kind)), compute="torch")
    rounded = {
        name: values if values.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
        for name, values in read_tiny_model(folder).items()
    }
    shutil.copy(folder / "config.json", tmp_path)
    save_file(rounded, tmp_path / "model.safetensors")
    assert torch.equal(prompt_logits(model, prompt_ids()), prompt_logits(load_model(str(tmp_path)), prompt_ids()))
    assert not torch.equal(prompt_logits(model, prompt_ids()), prompt_logits(load_model(str(folder)), prompt_ids()))


def test_sharded_checkpoint_equals_single_file(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    sharded = write_tiny_model(tmp_path, "qwen3", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    single = load_model(str(tiny_folder("qwen3")))
    assert torch.equal(prompt_logits(load_model(str(sharded)), prompt_ids()), prompt_logits(single, prompt_ids()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoint_is_upcast(
    dtype: torch.dtype, tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(tiny_folder("llama_tied"), dtype=dtype).eval()
    oracle.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = oracle.float()(torch.tensor([prompt_ids()])).logits[0]
    found = prompt_logits(load_model(str(tmp_path)), prompt_ids())
    assert (found - expected).abs().max().item() <= MAX_LOGIT_DIFFERENCE


def test_old_style_rope_fields_give_the_same_model(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    shutil.copytree(tiny_folder("llama3"), tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    scaling = fields.pop("rope_parameters")
    fields |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert load_config(str(tmp_path)) == load_config(str(tiny_folder("llama3")))


def test_progress_ends_at_the_total(tiny_folder: Callable[[str], Path]) -> None:
    calls: list[tuple[int, int]] = []
    load_model(str(tiny_folder("llama")), progress=lambda done, total: calls.append((done, total)))
    num_bytes = sum(values.nbytes for values in read_tiny_model(tiny_folder("llama")).values())
    assert calls[-1] == (num_bytes, num_bytes)
    assert np.all(np.diff([done for done, _ in calls]) > 0)


def test_greedy_continuation_is_long_enough_to_cross_blocks(tiny_folder: Callable[[str], Path]) -> None:
    driver = MiniDriver(load_model(str(tiny_folder("llama"))))
    sequence = generate(driver, prompt_ids(), NUM_NEW_TOKENS)
    assert sequence.num_computed_tokens == NUM_PROMPT_TOKENS + NUM_NEW_TOKENS
    assert len(sequence.block_table) == 9
