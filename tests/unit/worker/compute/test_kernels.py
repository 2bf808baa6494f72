"""What a worker says that it computes with."""

from pathlib import Path

import pytest

from engine.kernels.cpu.build import KernelsUnavailable, choose_isa
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from worker.compute import kernels
from worker.compute.kernels import describe_kernels


@pytest.fixture(scope="module")
def plain(smollm2_gguf: Path) -> LlamaModel:
    model = load_model(str(smollm2_gguf), compute="torch")
    assert isinstance(model, LlamaModel)
    return model


def test_native_kernels_are_named_with_their_instruction_set() -> None:
    assert describe_kernels(load_model("smollm2"), "auto", "smollm2") == f"native ({choose_isa()})"


def test_fallback_says_why(plain: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise KernelsUnavailable("no C++ compiler")

    monkeypatch.setattr(kernels, "load_library", refuse)
    told = "torch, slow: native kernels cannot be had, no C++ compiler"
    assert describe_kernels(plain, "auto", "smollm2") == told
    assert describe_kernels(plain, "torch", "smollm2") == "torch", "as it was asked for"


def test_weights_that_are_not_quantized_are_no_fallback(plain: LlamaModel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert describe_kernels(plain, "auto", str(tmp_path)) == "torch (weights are not quantized)"
