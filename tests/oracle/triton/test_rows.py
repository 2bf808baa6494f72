"""Kernels that work row by row: norms, SwiGLU, quantization, rotation and the KV write."""

import pytest
import torch
from torch import Tensor

from engine.kernels import reference, reference_quant
from engine.kernels.triton.activation import silu_mul, silu_mul_quantize
from engine.kernels.triton.gemm import quantize_rows
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.kernels.triton.norms import add_rms_norm, add_rms_norm_quantize, rms_norm
from engine.kernels.triton.rope_kv import rope_and_write_kv

FLOATS = [torch.float32, torch.float16]
QUANTIZED = [torch.int8, torch.float8_e4m3fn]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tolerance(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3}[dtype]


def assert_quantized_alike(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Equal scales up to fp32 rounding, and elements that differ by one step of the type at most, and seldom."""
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=0)
    assert found[0].dtype is wanted[0].dtype
    have, want = found[0].float(), wanted[0].float()
    # An int8 step is 1; neighbouring fp8 numbers are at most an eighth apart.
    step = torch.ones_like(want) if wanted[0].dtype is torch.int8 else want.abs().clamp(min=2.0**-6) / 8
    assert ((have - want).abs() <= step).all()
    assert int((have != want).sum()) <= 0.01 * want.numel()


def test_memory_is_poisoned_before_kernels_write_it() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.ones(3, dtype=torch.float16)).isnan().all()
    assert torch.empty(3, dtype=torch.float8_e4m3fn).float().isnan().all()
    assert (torch.empty(3, dtype=torch.int8) == 127).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 64), (5, 576), (2, 1000)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(*shape).to(dtype), randn(shape[1], seed=1).to(dtype)
    wanted = reference.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), wanted, rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.parametrize("residual_dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 100), (2, 576)])
def test_add_rms_norm(shape: tuple[int, int], residual_dtype: torch.dtype) -> None:
    x, residual = randn(*shape).half(), (randn(*shape, seed=1) * 3).to(residual_dtype)
    weight = randn(shape[1], seed=2)
    kept = residual.clone()
    wanted = reference_quant.add_rms_norm(x, kept, weight, 1e-6)
    found = add_rms_norm(x, residual, weight, 1e-6, out_dtype=torch.float32)
    assert torch.equal(residual, kept)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("adds", [False, True])
def test_add_rms_norm_quantize(dtype: torch.dtype, adds: bool) -> None:
    x, residual, weight = randn(4, 300), randn(4, 300, seed=1), randn(300, seed=2)
    kept = residual.clone()
    wanted = reference_quant.add_rms_norm(x if adds else torch.zeros_like(x), kept, weight, 1e-6)
    found = add_rms_norm_quantize(x if adds else None, residual, weight, 1e-6, dtype)
    assert torch.equal(residual, kept)
    assert_quantized_alike(found, reference_quant.quantize_rows(wanted, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 320), (2, 2500)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (randn(*shape) * 4).to(dtype)
    wanted = reference.silu_mul(gate_up.double())
    torch.testing.assert_close(silu_mul(gate_up).double(), wanted, rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_silu_mul_quantize(dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * 130) * 4
    assert_quantized_alike(silu_mul_quantize(gate_up, dtype), reference_quant.silu_mul_quantize(gate_up, dtype))


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (3, 100), (2, 513)])
def test_quantize_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(*shape) * 5
    x[shape[0] // 2 :: 5] = 0.0
    assert_quantized_alike(quantize_rows(x, dtype), reference_quant.quantize_rows(x, dtype))


def test_int8_rounds_half_to_even() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 63.5]])
    elements, scales = quantize_rows(x, torch.int8)
    assert elements.tolist() == [[127, 0, 2, 2, 0, -2, -2, 64]]
    assert scales.tolist() == [1.0]


def test_fp8_rounds_half_to_even() -> None:
    """Also with a carry into the exponent (127 is nearer to 128 than to 120), and among subnormal numbers."""
    x = torch.tensor([[448.0, 127.0, -127.0, 17.0, 19.0, 0.0615, 2.0**-9, 1.5 * 2.0**-9, 2.5 * 2.0**-9, 0.4 * 2.0**-9]])
    elements, scales = quantize_rows(x, torch.float8_e4m3fn)
    assert scales.tolist() == [1.0]
    assert elements.float().tolist() == [[448.0, 128.0, -128.0, 16.0, 20.0, 0.0625, 2.0**-9, 2.0**-8, 2.0**-8, 0.0]]


CACHES = [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("kv_dtype", CACHES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "has_norms"),
    [(4, 2, 32, False), (9, 3, 24, True), (1, 1, 2, False), (14, 2, 80, True)],
)
def test_rope_and_write_kv(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool, kv_dtype: torch.dtype
) -> None:
    num_rows, num_tokens, block_size = 7, 5, 8
    qkv = randn(num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    angles = randn(num_rows, head_dim // 2, seed=1) * 100
    slots = torch.tensor([3, 17, 16, 39, 8, 10**12, 10**12])  # what padding rows say is not read
    norms = [randn(head_dim, seed=seed) if has_norms else None for seed in (2, 3)]
    found, wanted = (cache_of(num_kv_heads, block_size, head_dim, kv_dtype) for _ in range(2))

    out = torch.full((num_rows, num_heads, head_dim), torch.nan)
    query = rope_and_write_kv(
        qkv,
        angles.cos(),
        angles.sin(),
        found,
        slots,
        torch.tensor([num_tokens], dtype=torch.int32),
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
        out=out,
    )

    assert query is out
    expected = reference_quant.rope_and_write_kv(
        qkv[:num_tokens],
        angles[:num_tokens].cos(),
        angles[:num_tokens].sin(),
        wanted.elements,
        wanted.scales,
        slots[:num_tokens],
        norms[0],
        norms[1],
        1e-6,
    )
    torch.testing.assert_close(query[:num_tokens], expected, rtol=1e-5, atol=1e-5)
    assert not query[num_tokens:].any()
    if found.scales is not None and wanted.scales is not None:
        assert_quantized_alike((found.elements, found.scales), (wanted.elements, wanted.scales))
    else:
        torch.testing.assert_close(found.elements, wanted.elements, rtol=1e-3, atol=1e-5)


def cache_of(num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> LayerCache:
    """Five blocks that are not all zeros, so that a write to the wrong place shows."""
    rows = torch.zeros(5, block_bytes(num_kv_heads, block_size, head_dim, dtype), dtype=torch.uint8)
    cache = LayerCache.from_bytes(rows, num_kv_heads, block_size, head_dim, dtype)
    cache.elements.copy_((randn(*cache.elements.shape, seed=9) * 8).to(dtype))
    return cache
