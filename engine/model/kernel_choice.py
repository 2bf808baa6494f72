"""Which kernels compute a model on this machine, and why those. Loads and compiles nothing.

`loader.load_model` follows the choice; `kvrelay check` tells it beforehand. Triton's kernels are another model's
(`engine/model/cuda/loader.py`), for the worker to choose.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from engine.config import ModelConfig
from engine.kernels.cpu.build import KernelsUnavailable, check_compiler
from engine.model.cpu.weights import check_head_dim, has_float_matrices
from engine.model.files.gguf_file import GgufFile
from engine.model.files.source import ModelSource
from kvrelay.errors import InvalidRequest

Compute = Literal["auto", "native", "torch"]
"""`native`: integer kernels on the CPU, weights that are not quantized yet become int8. `torch`: fp32 on any device.
`auto`: native on the CPU for checkpoints whose matrices are all quantized, else torch."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernels and the reason for them."""

    kernels: Literal["native", "torch"]
    reason: str
    is_fallback: bool = False
    """Whether native kernels were wanted and cannot be had."""


def choose_kernels(compute: Compute, device: torch.device, found: ModelSource) -> KernelChoice:
    """Return what is wanted; whether native kernels can be had turns out when they are compiled.

    Raises:
        InvalidRequest: `compute` does not go with the device; names `compute`.
    """
    if compute == "torch":
        return KernelChoice("torch", "asked for")
    if compute == "native":
        if device.type != "cpu":
            raise InvalidRequest("compute", f"native kernels run on the CPU, not on {device}")
        return KernelChoice("native", "asked for")
    if device.type != "cpu":
        return KernelChoice("torch", f"native kernels run on the CPU, not on {device}")
    if found.kind != "gguf":
        return KernelChoice("torch", "the weights are not quantized, and native kernels would round them")
    if has_float_matrices(GgufFile(found.path)):
        return KernelChoice("torch", "not all matrices are quantized, and native kernels would round them")
    return KernelChoice("native", "all matrices are quantized")


def fall_back(compute: Compute, error: KernelsUnavailable) -> KernelChoice:
    """Return what computes where native kernels are wanted and cannot be had.

    Raises:
        InvalidRequest: They were asked for; names `compute`.
    """
    if compute == "native":
        raise InvalidRequest("compute", str(error)) from error
    return KernelChoice("torch", str(error), is_fallback=True)


def plan_kernels(compute: Compute, device: torch.device, found: ModelSource, config: ModelConfig) -> KernelChoice:
    """Return what would compute the model, as far as that can be told without compiling.

    Raises:
        InvalidRequest: As `choose_kernels` and `fall_back`.
    """
    choice = choose_kernels(compute, device, found)
    if choice.kernels == "torch":
        return choice
    try:
        check_head_dim(config)
        isa = check_compiler()
    except KernelsUnavailable as error:
        return fall_back(compute, error)
    return KernelChoice("native", f"{choice.reason}; for {isa}")
