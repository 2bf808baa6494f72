"""What a worker computes on and how large its KV cache becomes, found out before anything is allocated.

Start-up (`bootstrap.py`) and `kvrelay check` both ask here, so that the one promises what the other does.
"""

import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype, ModelConfig, default_kv_dtype
from engine.model.kernel_choice import Compute
from kvrelay.errors import InvalidRequest
from worker.settings import DEFAULT_KV_MEMORY_MIB, WorkerSettings


def worker_device(name: str) -> torch.device:
    """Return the device that `--device` means here.

    Raises:
        InvalidRequest: There is no such device; names `device`.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidRequest("device", f"{name!r} is not a device; use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest("device", f"{name!r}: there is no usable GPU here")
    return device


def plain_compute(settings: WorkerSettings, device: torch.device) -> Compute | None:
    """Return what `load_model` is to compute with; None = Triton's kernels do, with a cache of their own."""
    if settings.compute == "triton" or (settings.compute == "auto" and device.type == "cuda"):
        return None
    return settings.compute


def kv_layout(
    fingerprint: str, config: ModelConfig, settings: WorkerSettings, *, is_native: bool, num_draft_layers: int
) -> KvLayout:
    """Return the layout of the KV cache of a worker without Triton.

    Args:
        fingerprint: The model's.
        config: The model's.
        settings: The worker's.
        is_native: Whether it computes with native kernels.
        num_draft_layers: Layers of a draft head.

    Raises:
        InvalidRequest: The kernels do not have the element type; names `kv_dtype`.
    """
    dtype = settings.kv_dtype or default_kv_dtype(is_native=is_native)
    if dtype is KvDtype.FP8:
        raise InvalidRequest("kv_dtype", "fp8 needs a GPU")
    if dtype.has_scales and not is_native:
        raise InvalidRequest("kv_dtype", f"{dtype} needs native or triton kernels; this model runs on those of torch")
    return KvLayout.of_model(fingerprint, config, settings.block_size, dtype, num_draft_layers)


def num_kv_blocks(layout: KvLayout, settings: WorkerSettings) -> int:
    """Return how many KV blocks a worker without Triton allocates.

    Raises:
        InvalidRequest: The memory for them holds none; names `kv_memory_mib`.
    """
    if settings.num_blocks is not None:
        return settings.num_blocks
    num_blocks = layout.blocks_within((settings.kv_memory_mib or DEFAULT_KV_MEMORY_MIB) << 20)
    if num_blocks < 1:
        raise InvalidRequest("kv_memory_mib", "does not hold a single KV block of this model")
    return num_blocks
