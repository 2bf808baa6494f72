"""What every launcher here shares: the typed decorator, argument checks, and small arithmetic. Launches nothing itself.

Why `jit` and not `triton.jit`: Triton has no type information, and a kernel is only ever indexed by its grid and
called.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Element types of activations."""


class Kernel(Protocol):
    """A compiled-on-demand device function."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        """The function to call with the kernel's arguments, `num_warps` and `num_stages`."""

    def __call__(self, *args: tl.tensor, **kwargs: tl.tensor) -> tl.tensor:
        """Calls inside another kernel."""


def jit(function: Callable[..., object]) -> Kernel:
    """Make a kernel, or a device function that kernels call."""
    kernel: Kernel = triton.jit(function)
    return kernel


def jit_for_sizes(*names: str) -> Callable[[Callable[..., object]], Kernel]:
    """`jit` with arguments that change from step to step, such as the number of rows.

    Other integers are compiled in when they are 1 and told apart by divisibility by 16; these are not, so that a new
    batch size never compiles anything, and code does not depend on it.
    """

    def decorate(function: Callable[..., object]) -> Kernel:
        kernel: Kernel = triton.jit(function, do_not_specialize=list(names))
        return kernel

    return decorate


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on the CPU."""
    return not isinstance(_probe, triton.runtime.JITFunction)


@jit
def _probe() -> None:
    return


def check(condition: bool, message: str) -> None:
    """Refuse a launch whose arguments the kernel would misread.

    Raises:
        ValueError: The condition does not hold.
    """
    if not condition:
        raise ValueError(message)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    is_contiguous: bool = True,
) -> None:
    """Refuse a tensor of another shape, type or layout.

    Args:
        name: For the message.
        tensor: The argument.
        shape: Sizes; None = any.
        dtypes: What the kernel takes.
        is_contiguous: Whether every element must follow its neighbour; otherwise only those of the last dimension.

    Raises:
        ValueError: With the argument's name.
    """
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    check(fits, f"{name} has shape {list(tensor.shape)}, not {list(shape)}")
    check(tensor.dtype in dtypes, f"{name} is {tensor.dtype}, not one of {dtypes}")
    dense = tensor.is_contiguous() if is_contiguous else (tensor.dim() == 0 or tensor.stride(-1) == 1)
    check(dense or tensor.numel() == 0, f"{name} has strides {tensor.stride()}, which the kernel does not read")


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least `value` (>= 1)."""
    return 1 << (value - 1).bit_length()


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of products of this type: fp32 operands are multiplied as they are, never as tf32."""
    return "ieee" if dtype is torch.float32 else "tf32"
