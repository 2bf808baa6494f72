"""What a worker computes with, in words for people: which kernels, and why where better ones exist.

Asks the model that was loaded; never loads or decides anything itself, `bootstrap.py` does.
"""

from engine.kernels.cpu.build import KernelsUnavailable, choose_isa
from engine.kernels.cpu.library import load_library
from engine.model.cpu.model import NativeModel
from engine.model.cpu.weights import has_float_matrices
from engine.model.files.gguf_file import GgufFile
from engine.model.files.source import resolve_model
from engine.model.interface import LanguageModel
from engine.model.llama import LlamaModel


def describe_kernels(model: LanguageModel, compute: str, source: str) -> str:
    """Return the kernels of a model. May compile for a while where compiling has failed before.

    Args:
        model: As it was loaded.
        compute: The setting `compute` that it was loaded with.
        source: The name that it was loaded by.

    Returns:
        One name with details in brackets, e.g. `native (avx512vnni)`; behind a comma the reason for a slow choice.
    """
    if isinstance(model, NativeModel):
        return f"native ({choose_isa()})"
    if not isinstance(model, LlamaModel):
        return "triton"
    if compute != "auto" or model.device.type != "cpu":
        return "torch"
    found = resolve_model(source)
    if found.kind != "gguf" or has_float_matrices(GgufFile(found.path)):
        return "torch (weights are not quantized)"
    try:
        load_library()
    except KernelsUnavailable as error:
        return f"torch, slow: native kernels cannot be had, {error}"
    return "torch, slow: native kernels do not take this model"
