"""The end of a matrix product whose K is split over programs: partial sums, added in order by whoever comes last.

A product with few rows has too few output tiles to keep the memory busy, so several programs share a tile, each with a
range of K. Each stores its partial sum and draws a number; the one that draws the last adds all partial sums, split 0
first. So the result does not depend on who came when, and no second launch is needed.
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import cdiv, check, jit, next_power_of_2

_WANTED_PROGRAMS = 264
"""Two for each multiprocessor of an H100 or H200."""
_LEAST_STEPS = 4
"""Fewer steps of K than this are not worth a program."""


@dataclass(frozen=True, slots=True)
class GemmTiles:
    """How a product is cut. Everything but `block_m` decides the last bits of a result."""

    block_m: int
    """Rows of a tile; a power of two from 16 up."""
    block_n: int
    """Columns of a tile; a power of two from 16 up."""
    block_k: int
    """Elements of K in a step; a power of two from 16 up."""
    split_k: int = 1
    """Programs that share a tile."""
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k"):
            value: int = getattr(self, name)
            check(value >= 16 and next_power_of_2(value) == value, f"{name} is {value}, no power of two from 16 up")
        check(self.split_k >= 1, f"split_k is {self.split_k}")

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Programs: (tiles, splits)."""
        return cdiv(num_rows, self.block_m) * cdiv(num_columns, self.block_n), self.split_k

    def spread(self, num_rows: int, num_columns: int, num_steps: int) -> "GemmTiles":
        """The same tiles with as many splits as make about `_WANTED_PROGRAMS`."""
        num_tiles = cdiv(num_rows, self.block_m) * cdiv(num_columns, self.block_n)
        return replace(self, split_k=max(1, min(_WANTED_PROGRAMS // num_tiles, num_steps // _LEAST_STEPS)))


@dataclass(slots=True)
class SplitScratch:
    """Device memory for partial sums, shared by all products of one stream, which run one after another."""

    partials: Tensor
    """[n] fp32."""
    arrivals: Tensor
    """[n] int32, 0 between products: the last program of a tile sets its counter back."""

    @classmethod
    def allocate(cls, num_partials: int, num_tiles: int, device: torch.device) -> "SplitScratch":
        """Memory for products of up to `num_partials` = split_k * rows * columns in up to `num_tiles` tiles."""
        return cls(
            torch.empty(max(num_partials, 1), dtype=torch.float32, device=device),
            torch.zeros(max(num_tiles, 1), dtype=torch.int32, device=device),
        )

    @classmethod
    def fitting(
        cls, scratch: "SplitScratch | None", tiles: GemmTiles, num_rows: int, num_columns: int, device: torch.device
    ) -> "SplitScratch":
        """`scratch` if it is there and large enough.

        Raises:
            ValueError: It is there and too small; growing it would break the CUDA graphs that use it.
        """
        num_tiles, _ = tiles.grid(num_rows, num_columns)
        num_partials = tiles.split_k * num_rows * num_columns if tiles.split_k > 1 else 0
        if scratch is None:
            return cls.allocate(num_partials, num_tiles, device)
        check(
            tiles.split_k == 1 or (scratch.partials.numel() >= num_partials and scratch.arrivals.numel() >= num_tiles),
            f"scratch has no room for {num_partials} partial sums of {num_tiles} tiles",
        )
        return scratch


@jit
def store_product(
    product: tl.tensor,
    tile: tl.tensor,
    first_row: tl.tensor,
    first_column: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    partials_ptr: tl.tensor,
    arrivals_ptr: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Write a tile of out [num_rows, num_columns], or this program's part of it.

    Args:
        product: [BLOCK_M, BLOCK_N] fp32, this program's sum; program_id(1) says which split it is.
        tile: Number of the tile.
        first_row: Of the tile.
        first_column: Of the tile.
        num_rows: Of the output.
        num_columns: Of the output.
        bias_ptr: [num_columns], read if HAS_BIAS.
        out_ptr: The output.
        partials_ptr: [SPLIT_K, num_rows, num_columns] fp32.
        arrivals_ptr: [tiles] int32.
        BLOCK_M: Rows of a tile.
        BLOCK_N: Columns of a tile.
        SPLIT_K: Programs that share a tile.
        HAS_BIAS: Whether there is a bias.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_stored = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    size = tl.cast(num_rows, tl.int64) * num_columns
    is_last = True
    if SPLIT_K > 1:
        tl.store(partials_ptr + tl.program_id(1) * size + offsets, product, mask=is_stored)
        # All threads' parts are written before one thread says so.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(arrivals_ptr + tile, 0)
            product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for split in tl.static_range(SPLIT_K):
                # Past the first-level cache, which is not kept in step with other multiprocessors.
                product += tl.load(partials_ptr + split * size + offsets, mask=is_stored, cache_modifier=".cg")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32)
            product += bias[None, :]
        tl.store(out_ptr + offsets, product.to(out_ptr.dtype.element_ty), mask=is_stored)


@jit
def tile_of(
    program: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """(row, column) index of a program's tile: bands of 8 tile rows, column by column.

    Programs that run at the same time then share weights and activations in the second-level cache.
    """
    BAND: tl.constexpr = 8
    num_m = tl.cdiv(num_rows, BLOCK_M)
    num_n = tl.cdiv(num_columns, BLOCK_N)
    band = program // (BAND * num_n)
    band_rows = tl.minimum(num_m - band * BAND, BAND)
    within = program % (BAND * num_n)
    return band * BAND + within % band_rows, within // band_rows
