"""Linear layers of the CUDA model: one weight each, in the form that its kernel reads. No step logic.

    dense    activation type      PyTorch's product; in batch-invariant mode the Triton kernel with fixed tiles
    int8     per-row scales       activations quantized per row, exact sums
    fp8      per-row scales       the same with fp8 e4m3 (compute capability 8.9 and up)
    int4     per-group scales     activations stay as they are

Next: `weights.py` makes them from a checkpoint, `step.py` calls them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.triton import gemm, w4a16
from engine.kernels.triton.gemm import fp8_linear, int8_linear, linear, quantize_rows
from engine.kernels.triton.int4_weight import Int4Weight
from engine.kernels.triton.launch import cdiv
from engine.kernels.triton.split_k import GemmTiles, SplitScratch
from engine.kernels.triton.w4a16 import w4a16_linear


class WeightFormat(StrEnum):
    """How the matrices of the layers are kept on the device. Embedding and lm_head are always dense."""

    DENSE = "dense"
    INT8 = "int8"
    FP8 = "fp8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class LinearSettings:
    """What all linear layers of a model share."""

    dtype: torch.dtype
    """Type of activations."""
    is_batch_invariant: bool
    scratch: SplitScratch | None = None
    """For products of up to `max_scratch_rows` rows; larger ones take memory of their own. None = all do."""
    max_scratch_rows: int = 0

    def scratch_for(self, num_rows: int) -> SplitScratch | None:
        """The shared scratch, if the product is small enough for it."""
        return self.scratch if num_rows <= self.max_scratch_rows else None


class DeviceLinear(Protocol):
    """A linear layer on the device."""

    @property
    def input_dtype(self) -> torch.dtype | None:
        """The 8-bit type it multiplies; None = activations as they are."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    def __call__(self, x: Tensor, settings: LinearSettings) -> Tensor:
        """[num_rows, in_features] activations -> [num_rows, out_features] activations."""

    def multiply_quantized(self, x: Tensor, scales: Tensor, settings: LinearSettings) -> Tensor:
        """The same for rows that are quantized already: elements of `input_dtype` and scales [num_rows] fp32."""

    def scratch_size(self, num_rows: int, settings: LinearSettings) -> tuple[int, int]:
        """(partial sums, tiles) that a product of up to `num_rows` rows needs of the scratch."""


@dataclass(frozen=True, slots=True)
class DenseLinear:
    """A weight in the activation type."""

    weight: Tensor
    """[out_features, in_features]."""
    bias: Tensor | None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """See `DeviceLinear.input_dtype`."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """See `DeviceLinear.shape`."""
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.__call__`."""
        if settings.is_batch_invariant:
            return linear(x, self.weight, self.bias, scratch=settings.scratch_for(x.shape[0]))
        return functional.linear(x, self.weight, self.bias)

    def logits(self, x: Tensor, settings: LinearSettings) -> Tensor:
        """The product as fp32, not rounded to the activation type on the way where the library can."""
        if settings.is_batch_invariant:
            scratch = settings.scratch_for(x.shape[0])
            return linear(x, self.weight, self.bias, scratch=scratch, out_dtype=torch.float32)
        if x.is_cuda and x.dtype is not torch.float32 and self.bias is None:
            return torch.mm(x, self.weight.T, out_dtype=torch.float32)
        return functional.linear(x, self.weight, self.bias).float()

    def multiply_quantized(self, x: Tensor, scales: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.multiply_quantized`."""
        return self((x.float() * scales[:, None]).to(settings.dtype), settings)

    def scratch_size(self, num_rows: int, settings: LinearSettings) -> tuple[int, int]:
        """See `DeviceLinear.scratch_size`."""
        if not settings.is_batch_invariant:
            return 0, 0
        tiles = gemm.invariant_tiles(*self.shape, self.weight.dtype.itemsize)
        return _scratch_size(tiles, num_rows, self.shape[0])


@dataclass(frozen=True, slots=True)
class ByteLinear:
    """An int8 or fp8 weight with a scale per row of the weight; rows of x are quantized to its type."""

    weight: Tensor
    """[out_features, in_features] int8 or float8_e4m3fn."""
    scales: Tensor
    """[out_features] fp32."""
    bias: Tensor | None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """See `DeviceLinear.input_dtype`."""
        return self.weight.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """See `DeviceLinear.shape`."""
        return self.weight.shape[0], self.weight.shape[1]

    def __call__(self, x: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.__call__`."""
        return self.multiply_quantized(*quantize_rows(x, self.weight.dtype), settings)

    def multiply_quantized(self, x: Tensor, scales: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.multiply_quantized`."""
        multiply = int8_linear if self.weight.dtype is torch.int8 else fp8_linear
        return multiply(
            x,
            scales,
            self.weight,
            self.scales,
            self.bias,
            out_dtype=settings.dtype,
            tiles=gemm.invariant_tiles(*self.shape, 1) if settings.is_batch_invariant else None,
            scratch=settings.scratch_for(x.shape[0]),
        )

    def scratch_size(self, num_rows: int, settings: LinearSettings) -> tuple[int, int]:
        """See `DeviceLinear.scratch_size`."""
        if settings.is_batch_invariant:
            return _scratch_size(gemm.invariant_tiles(*self.shape, 1), num_rows, self.shape[0])
        sizes = [
            _scratch_size(gemm.fast_tiles(rows, *self.shape, 1), rows, self.shape[0]) for rows in _row_counts(num_rows)
        ]
        return max(partials for partials, _ in sizes), max(tiles for _, tiles in sizes)


@dataclass(frozen=True, slots=True)
class Int4Linear:
    """A 4-bit weight with scales per group."""

    weight: Int4Weight
    bias: Tensor | None

    @property
    def input_dtype(self) -> torch.dtype | None:
        """See `DeviceLinear.input_dtype`."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """See `DeviceLinear.shape`."""
        return self.weight.out_features, self.weight.in_features

    def __call__(self, x: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.__call__`."""
        return w4a16_linear(
            x,
            self.weight,
            self.bias,
            scratch=settings.scratch_for(x.shape[0]),
            is_invariant=settings.is_batch_invariant,
        )

    def multiply_quantized(self, x: Tensor, scales: Tensor, settings: LinearSettings) -> Tensor:
        """See `DeviceLinear.multiply_quantized`."""
        return self((x.float() * scales[:, None]).to(settings.dtype), settings)

    def scratch_size(self, num_rows: int, settings: LinearSettings) -> tuple[int, int]:
        """See `DeviceLinear.scratch_size`."""
        num_chunks = self.weight.packed.shape[0]
        sizes = [
            _scratch_size(
                w4a16.fast_tiles(1 if settings.is_batch_invariant else rows, self.shape[0], num_chunks),
                rows,
                self.shape[0],
            )
            for rows in _row_counts(num_rows)
        ]
        return max(partials for partials, _ in sizes), max(tiles for _, tiles in sizes)


def _row_counts(num_rows: int) -> list[int]:
    """Every number of rows at which tiles may change, and the largest."""
    return [rows for rows in (1, 16, 32, 64, 128) if rows < num_rows] + [num_rows]


def _scratch_size(tiles: GemmTiles, num_rows: int, num_columns: int) -> tuple[int, int]:
    if tiles.split_k == 1:
        return 0, 0
    return tiles.split_k * num_rows * num_columns, cdiv(num_rows, tiles.block_m) * cdiv(num_columns, tiles.block_n)
