"""The plain path: every operation of `interface.Kernels` with PyTorch calls, fp32, on any device.

On the CPU, linear layers use oneDNN with weights packed once. Measured against `torch.nn.functional.linear` (MKL) on
AVX-512: as fast for 1 row, a quarter to a third faster for 4 to 16, equal for hundreds; and the bits of a row are the
same from 2 rows up, whatever the number of rows or threads, while MKL's change at 16 rows and with the threads. A
single row takes yet another kernel, hence `min_rows`.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.interface import AttentionGeometry, Linear, StepAttention
from engine.kernels.torch_attention import TorchStepAttention

_PACKING_ROWS = 16
"""Row count for which oneDNN chooses the packed form. Its speed and bits were the same for 2 to 512."""


class TorchKernels:
    """Stateless; one instance serves every model."""

    @property
    def min_rows(self) -> int:
        """2 for oneDNN, as above. Where it is missing 4, below which MKL has kernels of its own."""
        return 2 if _can_pack() else 4

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """See `Kernels.pack_linear`."""
        if weight.device.type == "cpu" and _can_pack():
            return _PackedLinear(weight, bias)
        return _PlainLinear(weight, bias)

    def prepare_attention(self, geometry: AttentionGeometry) -> StepAttention:
        """See `Kernels.prepare_attention`."""
        return TorchStepAttention(geometry)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Kernels.rms_norm`."""
        return functional.rms_norm(x, weight.shape, weight, eps)

    def rope(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `Kernels.rope`."""
        first, second = heads.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        turned_first = (first * cos).sub_(second * sin)
        second.copy_((second * cos).add_(first * sin))
        first.copy_(turned_first)
        return heads

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """See `Kernels.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


class _PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class _PackedLinear:
    """oneDNN inner product over a weight that is laid out for it; the plain weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS)
        self._bias = bias
        self._multiply: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._weight, self._bias, "none", [], "")


@cache
def _can_pack() -> bool:
    # Operations that torch's own compiler uses; a build without oneDNN or a later version may lack them.
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
