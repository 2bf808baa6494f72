"""Matrix products: floating, int8 and fp8, split and whole, against fp64."""

import pytest
import torch
from torch import Tensor

from engine.kernels import reference, reference_quant
from engine.kernels.triton.gemm import fast_tiles, fp8_linear, int8_linear, invariant_tiles, linear
from engine.kernels.triton.split_k import GemmTiles, SplitScratch

SMALL = GemmTiles(16, 16, 32)
SPLIT = GemmTiles(16, 32, 16, split_k=3)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 1, 8), (3, 65, 40), (17, 48, 96), (40, 33, 130)])
def test_linear(M: int, N: int, K: int, dtype: torch.dtype, tiles: GemmTiles) -> None:
    x, weight = randn(M, K).to(dtype), randn(N, K, seed=1).to(dtype)
    bias = randn(N, seed=2).to(dtype) if M % 2 else None
    found = linear(x, weight, bias, tiles=tiles, out_dtype=torch.float32)
    wanted = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


def test_rows_of_linear_do_not_depend_on_their_number() -> None:
    x, weight = randn(70, 300), randn(40, 300, seed=1)
    tiles = invariant_tiles(40, 300, 4)
    whole = linear(x, weight, tiles=tiles)
    for rows in (slice(0, 1), slice(5, 8), slice(3, 68)):
        assert torch.equal(linear(x[rows].contiguous(), weight, tiles=tiles), whole[rows])


def test_split_sums_leave_their_counters_at_zero() -> None:
    scratch = SplitScratch.allocate(3 * 20 * 40, 4, torch.device("cpu"))
    x, weight = randn(20, 128), randn(40, 128, seed=1)
    first = linear(x, weight, tiles=SPLIT, scratch=scratch)
    scratch.partials.fill_(torch.nan)
    assert torch.equal(linear(x, weight, tiles=SPLIT, scratch=scratch), first)
    assert not scratch.arrivals.any()


def test_scratch_that_is_too_small_is_refused() -> None:
    scratch = SplitScratch.allocate(3 * 20 * 40, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="no room"):
        linear(randn(20, 128), randn(40, 128), tiles=SPLIT, scratch=scratch)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=str)
@pytest.mark.parametrize(("M", "N", "K"), [(1, 5, 16), (3, 65, 48), (33, 40, 128)])
def test_int8_linear_and_fp8_linear(M: int, N: int, K: int, tiles: GemmTiles, dtype: torch.dtype) -> None:
    x, x_scales = reference_quant.quantize_rows(randn(M, K), dtype)
    weight, weight_scales = reference_quant.quantize_rows(randn(N, K, seed=1), dtype)
    bias = randn(N, seed=2) if M % 2 else None
    kernel, oracle = (
        (int8_linear, reference_quant.int8_linear) if dtype is torch.int8 else (fp8_linear, reference_quant.fp8_linear)
    )
    found = kernel(x, x_scales, weight, weight_scales, bias, out_dtype=torch.float32, tiles=tiles)
    wanted = oracle(x, x_scales, weight, weight_scales, bias)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6 if dtype is torch.int8 else 1e-5, atol=1e-5)


def test_int8_sums_are_exact_where_fp32_is_not() -> None:
    """The sum passes 2 ** 24, where fp32 has no odd numbers, before it comes back to 1."""
    x = torch.full((1, 2208), 127, dtype=torch.int8)
    weight = torch.zeros(1, 2208, dtype=torch.int8)
    weight[0, :1100], weight[0, 1101:2201] = 127, -127
    x[0, 1100] = weight[0, 1100] = 1
    ones = torch.ones(1)
    assert int8_linear(x, ones, weight, ones, out_dtype=torch.float32, tiles=SMALL).item() == 1.0


def test_tiles_suit_their_sizes() -> None:
    one, many = fast_tiles(1, 4096, 4096, 1), fast_tiles(2048, 4096, 4096, 1)
    assert one.block_m == 16
    assert one.split_k > 1
    assert many.block_m == 128
    assert many.split_k == 1
    assert invariant_tiles(4096, 4096, 2) == invariant_tiles(4096, 4096, 2)


def test_operands_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch\.float16"):
        linear(randn(2, 16), randn(4, 16).half())
    with pytest.raises(ValueError, match="x has shape"):
        linear(randn(2, 8), randn(4, 16))
    with pytest.raises(ValueError, match="weight has strides"):
        linear(randn(2, 16), randn(16, 4).T)
