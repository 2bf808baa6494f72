"""`kvrelay check` reads what workers and the gateway read, and promises what they will do."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decode_service.settings import DecodeSettings
from engine.model.files.gguf_file import GgufFile
from engine.model.loader import load_model
from kvrelay.errors import InvalidRequest
from kvrelay.serving.settings import parse_settings
from tests.tiny_models import write_tiny_gguf, write_tiny_model
from tests.unit.kvrelay.cli.test_cli import run
from tests.unit.kvrelay.text.test_hf_tokenizer import byte_level_backend, write_folder
from worker.compute.bootstrap import build_engine

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model with a tokenizer of as many tokens as it has."""
    write_tiny_model(tmp_path, "llama")
    write_folder(tmp_path, byte_level_backend(), config={"chat_template": TEMPLATE})
    (tmp_path / "generation_config.json").unlink()
    fit(tmp_path, 264)
    return tmp_path


def fit(folder: Path, vocab_size: int) -> None:
    """Give the model another number of tokens."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size, "eos_token_id": None}))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = np.resize(tensors[name], (vocab_size, tensors[name].shape[1]))
    save_file(tensors, path)


def findings(*argv: str, exit_code: int = 0) -> dict[str, list[tuple[str, str]]]:
    """Verdict and text of what check says, by subject."""
    result = run("check", "--json", "--port", "0", "--transport", "grpc", *argv)
    assert result.exit_code == exit_code, result.stdout
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in json.loads(result.stdout)["findings"]:
        found.setdefault(finding["subject"], []).append((finding["verdict"], finding["text"]))
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "smollm2", "--speculation", "auto"),  # int8 with scales, and a layer for the draft head
        ("--kv-memory-mib", "3"),
        ("--kv-dtype", "fp16", "--block-size", "32", "--kv-memory-mib", "2"),
        ("--num-blocks", "77"),
    ],
)
def test_blocks_are_as_many_as_a_worker_allocates(flags: tuple[str, ...], folder: Path) -> None:
    flags = flags if "--model" in flags else ("--model", str(folder), *flags)
    ((_, text),) = findings("--prefill", "0", *flags)["KV cache"]
    match = re.search(r"([\d,]+) blocks of (\d+) tokens", text)
    assert match is not None, text
    engine = build_engine(parse_settings(DecodeSettings, [*flags], "test"))
    assert int(match[1].replace(",", "")) == engine.kv_cache.num_blocks
    assert int(match[2]) == engine.kv_cache.layout.block_size


def test_tiers_that_differ_are_told_apart(tmp_path: Path) -> None:
    config = tmp_path / "cluster.yaml"
    config.write_text("prefill:\n  num_blocks: 600\ndecode:\n  num_blocks: 700\n")
    found = findings("--config", str(config))
    assert "600 blocks" in found["KV cache (prefill)"][0][1]
    assert "700 blocks" in found["KV cache (decode)"][0][1]


def test_a_model_that_loads_is_good(folder: Path) -> None:
    save_file({"lora": np.zeros(3, np.float32)}, folder / "adapter_model.safetensors")
    load_model(str(folder))
    found = findings("--model", str(folder))
    assert [verdict for verdict, _ in found["model"]] == ["ok", "ok"]
    assert found["tokenizer"] == [("ok", "264 tokens, with a chat template; a turn ends with </s>")]
    assert found["kernels"] == [
        ("ok", "torch on cpu: the weights are not quantized, and native kernels would round them")
    ]


def test_what_the_load_refuses_the_check_refuses_with_the_same_words(folder: Path) -> None:
    path = folder / "model.safetensors"
    sound = load_file(path)
    for change in ("missing", "shape", "unused", "cut"):
        tensors = dict(sound)
        if change == "missing":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        elif change == "shape":
            tensors["model.norm.weight"] = np.zeros(3, np.float32)
        elif change == "unused":
            tensors["more"] = np.zeros(3, np.float32)
        save_file(tensors, path)
        if change == "cut":
            path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(InvalidRequest) as caught:
            load_model(str(folder))
        assert findings("--model", str(folder), exit_code=1)["model"][-1] == ("error", caught.value.description)


def test_rotary_factors_are_read_too(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    path = write_tiny_gguf(folder, folder / "a.gguf")
    offset = GgufFile(path).tensors["rope_freqs.weight"].offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = bytes(4)
    path.write_bytes(content)
    found = findings("--model", str(path), exit_code=1)
    assert found["model"][-1] == ("error", "rotary factors must be positive and finite")


def test_kernels_without_a_compiler_are_torchs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.delenv("CXX", raising=False)
    ((verdict, text),) = findings()["kernels"]
    assert verdict == "warning"
    assert text.startswith("torch on cpu: no C++ compiler: none of CXX, c++, g++, clang++ is on PATH")
    assert "in fp32" in findings()["KV cache"][0][1]
    ((verdict, text),) = findings("--compute", "native", exit_code=1)["compute"]
    assert verdict == "error"
    assert text.startswith("no C++ compiler")
    assert findings("--model", str(folder))["kernels"][0][0] == "ok"  # was not to be native anyway


def test_kernels_and_their_reason_are_named(folder: Path) -> None:
    assert findings()["kernels"][0][1].startswith("native on cpu: all matrices are quantized; for ")
    assert findings("--compute", "torch")["kernels"] == [("ok", "torch on cpu: asked for")]
    path = write_tiny_gguf(folder, folder / "a.gguf")
    assert findings("--model", str(path), exit_code=1)["kernels"] == [
        ("ok", "torch on cpu: not all matrices are quantized, and native kernels would round them")
    ]


def test_settings_that_a_worker_refuses_are_errors(folder: Path) -> None:
    found = findings("--model", str(folder), "--kv-dtype", "int8", exit_code=1)
    assert found["kv_dtype"] == [("error", "int8 needs native or triton kernels; this model runs on those of torch")]
    found = findings("--model", str(folder), "--speculation", "eagle", exit_code=1)
    assert found["draft_head"][0][0] == "error"
    found = findings("--speculation", "draft", "--draft-model", str(folder), exit_code=1)
    assert found["draft_model (decode)"] == [("error", "has 264 token ids, the model 49152")]


def test_what_a_template_and_a_tokenizer_lack_is_a_warning(folder: Path) -> None:
    fit(folder, 260)
    found = findings("--model", str(folder))["tokenizer"]
    assert ("warning", "has 264 tokens, the model 260: prompts with one of the others will be refused") in found
    refusing = {"chat_template": "{{ raise_exception('no') }}", "eos_token": None, "bos_token": None}
    write_folder(folder, byte_level_backend(), config=refusing)
    found = findings("--model", str(folder))["tokenizer"]
    assert ("warning", "one question and nothing else is refused: the model's chat template refuses them: no") in found
