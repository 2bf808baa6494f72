"""Device memory for KV blocks on their way between workers, and what tells whether they arrived whole.

A transport that can send device memory gets it from here and gives it back. Knows nothing of caches or frames. All work
on it runs on the stream that copies blocks, so it comes after the copies that were queued there.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GRAIN_BYTES = 256 << 10
_LIMIT_BYTES = 64 << 20


class TensorBytes:
    """A run of bytes in device memory."""

    def __init__(
        self,
        tensor: Tensor,
        stream: "torch.cuda.Stream | None",
        on_release: Callable[[], None] | None = None,
    ) -> None:
        """View memory.

        Args:
            tensor: [num_bytes] uint8, dense.
            stream: Where work on it is queued; None = the host's memory.
            on_release: Called by the first `release`.
        """
        self.tensor = tensor
        self._stream = stream
        self._on_release = on_release

    @property
    def array(self) -> object:
        """The memory for libraries that do not know PyTorch: `__cuda_array_interface__`, or numpy's on the host."""
        return self.tensor if self.tensor.is_cuda else self.tensor.numpy()

    def __len__(self) -> int:
        """Its bytes."""
        return self.tensor.numel()

    def part(self, start: int, end: int) -> "TensorBytes":
        """The bytes [start, end), without a copy."""
        return TensorBytes(self.tensor[start:end], self._stream)

    def fingerprint(self) -> bytes:
        """16 bytes that differ where any word differs, but for sums that happen to be equal. Waits for queued copies.

        words w of 32 bits:    sum(w), sum((2 * i + 1) * w[i])    modulo 2 ** 64
        """
        with torch.cuda.stream(self._stream):
            padding = -len(self) % 4
            whole = torch.nn.functional.pad(self.tensor, (0, padding)) if padding else self.tensor
            words = whole.view(torch.int32).long()
            factors = torch.arange(1, 2 * words.shape[0], 2, device=words.device)
            sums: list[int] = torch.stack([words.sum(), (words * factors).sum()]).tolist()
        return b"".join(value.to_bytes(8, "little", signed=True) for value in sums)

    def release(self) -> None:
        """Give lent memory back; nobody may look at it any more. Does nothing for parts, or a second time."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def to_host(self) -> memoryview:
        """A copy on the host."""
        with torch.cuda.stream(self._stream):
            host: npt.NDArray[np.uint8] = self.tensor.to("cpu", copy=True).numpy()
        return host.data


class TensorMemory:
    """Lends memory of one device and keeps some of it for the next loan.

    Invariant: memory is either kept or lent, never both.
    """

    def __init__(self, device: torch.device, stream: "torch.cuda.Stream | None") -> None:
        """Lend from `device`; `stream` as for `TensorBytes`."""
        self._device = device
        self._stream = stream
        self._free: dict[int, list[Tensor]] = {}
        self.num_bytes = 0
        """Bytes that are kept."""

    def take(self, num_bytes: int) -> TensorBytes:
        """Lend memory; its content is whatever was there before."""
        size = -(-max(num_bytes, 1) // _GRAIN_BYTES) * _GRAIN_BYTES
        free = self._free.get(size)
        if free:
            whole = free.pop()
            self.num_bytes -= size
        else:
            whole = torch.empty(size, dtype=torch.uint8, device=self._device)
        return TensorBytes(whole[:num_bytes], self._stream, lambda: self._keep(whole))

    def _keep(self, whole: Tensor) -> None:
        size = whole.numel()
        if self.num_bytes + size <= _LIMIT_BYTES:
            self.num_bytes += size
            self._free.setdefault(size, []).append(whole)
