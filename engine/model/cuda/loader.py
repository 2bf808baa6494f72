"""Loading a model by name straight to a CUDA device; the twin of `loader.load_model` for `cuda.CudaModel`.

Which device and which formats go together is checked here, before anything large is read. Loads Triton, so only who
computes with it imports this.
"""

from collections.abc import Callable

import torch

from engine.config import KvDtype
from engine.kernels.triton.launch import is_interpreted
from engine.model.cuda.gguf import GgufInt4Blocks
from engine.model.cuda.linear import WeightFormat
from engine.model.cuda.model import CudaModel, CudaSettings, build_cuda_model
from engine.model.files.gguf_file import GgufFile
from engine.model.files.gguf_weights import GgufWeights
from engine.model.files.open import open_weights
from engine.model.files.source import resolve_model
from kvrelay.errors import InvalidRequest

_LEAST_CAPABILITY = (8, 0)
_LEAST_FP8_CAPABILITY = (8, 9)


def load_cuda_model(
    source: str,
    device: torch.device,
    settings: CudaSettings,
    progress: Callable[[int, int], None] | None = None,
) -> CudaModel:
    """Load a model.

    Args:
        source: A name as `resolve_model` takes it.
        device: A CUDA device, or the CPU under Triton's interpreter.
        settings: How to compute. int4 keeps a GGUF file's own Q4_0 and Q4_1 blocks and rounds everything else.
        progress: Called on this thread with (layers loaded, layers in all) after each.

    Raises:
        InvalidRequest: As `open_weights`; or the weights do not fit the device, which names `weight_format`.
    """
    config, reader = open_weights(source)
    blocks = None
    if settings.weight_format is WeightFormat.INT4 and isinstance(reader, GgufWeights):
        blocks = GgufInt4Blocks(GgufFile(resolve_model(source).path), reader, config)
    try:
        return build_cuda_model(config, reader, device, settings, blocks=blocks, progress=progress)
    except torch.OutOfMemoryError as error:
        raise InvalidRequest(
            "weight_format", f"the weights in {settings.weight_format} do not fit on {device}: {_first_line(error)}"
        ) from error


def check_device(device: torch.device, weight_format: WeightFormat, kv_dtype: KvDtype) -> None:
    """Refuse what the device cannot compute.

    Raises:
        InvalidRequest: Names `compute`, `device`, `weight_format` or `kv_dtype`.
    """
    if device.type != "cuda":
        if not is_interpreted():
            raise InvalidRequest("compute", f"triton needs a GPU, not {device} (TRITON_INTERPRET=1 simulates one)")
        return
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
    check_capability(capability, name, weight_format, kv_dtype)


def check_capability(capability: tuple[int, int], name: str, weight_format: WeightFormat, kv_dtype: KvDtype) -> None:
    """`check_device` for a compute capability; `name` begins the messages."""
    if capability < _LEAST_CAPABILITY:
        raise InvalidRequest("device", f"{name}; at least 8.0 is needed")
    if capability < _LEAST_FP8_CAPABILITY:
        for field, value in (("weight_format", weight_format), ("kv_dtype", kv_dtype)):
            if value == "fp8":
                raise InvalidRequest(field, f"{name}; fp8 needs 8.9")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
