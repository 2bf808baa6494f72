"""4-bit weights: packing from each format, dequantization and the product."""

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.kernels import reference_quant
from engine.kernels.triton.int4_weight import Int4Weight, from_awq, from_gguf_q4_0, from_gguf_q4_1, from_gptq, pack_int4
from engine.kernels.triton.split_k import GemmTiles
from engine.kernels.triton.w4a16 import dequantize_int4, w4a16_linear

SMALL = GemmTiles(16, 32, 16)
SPLIT = GemmTiles(16, 16, 16, split_k=2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed))


def randint(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=generator(seed))


def parts(N: int, K: int, group: int, kind: str) -> dict[str, Tensor]:
    """Quantized values and factors: symmetric, with zeros or with mins."""
    shape = (K // group, N)
    found = {"values": randint(16, N, K).to(torch.uint8), "scales": (randn(*shape, seed=1).abs() / 8 + 0.01).half()}
    if kind == "zeros":
        found["zeros"] = randint(17, *shape, seed=2)
    if kind == "mins":
        found["mins"] = randn(*shape, seed=2).half()
    return found


def packed(found: dict[str, Tensor]) -> Int4Weight:
    return pack_int4(found["values"], found["scales"], zeros=found.get("zeros"), mins=found.get("mins"))


@pytest.mark.parametrize("tiles", [SMALL, SPLIT], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("M", "N", "K", "group", "kind"),
    [
        (1, 33, 96, 32, "symmetric"),
        (3, 40, 320, 32, "mins"),
        (2, 20, 192, 64, "zeros"),
        (17, 17, 256, 128, "zeros"),
        (5, 64, 384, 128, "symmetric"),
    ],
)
def test_w4a16_linear(M: int, N: int, K: int, group: int, kind: str, dtype: torch.dtype, tiles: GemmTiles) -> None:
    found = parts(N, K, group, kind)
    x, bias = randn(M, K, seed=5).to(dtype), randn(N, seed=6) if M % 2 else None
    out = w4a16_linear(x, packed(found), bias, tiles=tiles, out_dtype=torch.float32)
    wanted = reference_quant.w4a16_linear(x, **found, bias=bias)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("K", "group", "kind"), [(96, 32, "mins"), (192, 64, "zeros"), (256, 128, "symmetric")])
def test_dequantize_int4(K: int, group: int, kind: str) -> None:
    found = parts(70, K, group, kind)
    out = dequantize_int4(packed(found), torch.float32)
    torch.testing.assert_close(out.double(), reference_quant.dequantize_int4(**found), rtol=1e-6, atol=1e-6)


def test_many_rows_give_the_same_product_through_dequantized_weights() -> None:
    found, x = parts(48, 128, 64, "zeros"), randn(130, 128)
    wanted = reference_quant.w4a16_linear(x, **found)
    torch.testing.assert_close(w4a16_linear(x, packed(found)).double(), wanted, rtol=1e-4, atol=1e-4)


def test_rows_do_not_depend_on_their_number_in_the_invariant_mode() -> None:
    found, x = parts(40, 128, 32, "mins"), randn(150, 128)
    whole = w4a16_linear(x, packed(found), is_invariant=True)
    for rows in (slice(0, 1), slice(7, 12)):
        assert torch.equal(w4a16_linear(x[rows].contiguous(), packed(found), is_invariant=True), whole[rows])


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1])
def test_gguf_blocks_give_the_values_that_the_format_defines(kind: gguf.GGMLQuantizationType) -> None:
    raw = gguf.quants.quantize(randn(24, 96).numpy(), kind)
    blocks = torch.from_numpy(raw.reshape(24, 3, -1))
    weight = from_gguf_q4_0(blocks) if kind is gguf.GGMLQuantizationType.Q4_0 else from_gguf_q4_1(blocks)
    wanted = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))
    torch.testing.assert_close(dequantize_int4(weight, torch.float32), wanted, rtol=1e-6, atol=1e-6)


def test_awq_words_are_read_in_their_order() -> None:
    K, N, group = 128, 16, 64
    values, zeros = randint(16, N, K), randint(16, K // group, N, seed=1)
    scales = randn(K // group, N, seed=2).abs().half()

    def words(columns: Tensor) -> Tensor:  # neighbours 0..7 go to nibbles 0, 4, 1, 5, 2, 6, 3, 7
        shifts = 4 * torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
        return (columns.long().view(-1, N // 8, 8) << shifts).sum(-1).to(torch.int32)

    weight = from_awq(words(values.T), words(zeros), scales)
    wanted = reference_quant.dequantize_int4(values, scales, zeros)
    torch.testing.assert_close(dequantize_int4(weight, torch.float32).double(), wanted)


@pytest.mark.parametrize("is_act_order", [False, True])
def test_gptq_words_are_read_and_act_order_moves_the_inputs(is_act_order: bool) -> None:
    K, N, group = 256, 24, 64
    values, zeros = randint(16, N, K), randint(16, K // group, N, seed=1) + 1
    scales = randn(K // group, N, seed=2).abs().half()
    g_idx = torch.arange(K) // group
    if is_act_order:
        g_idx = g_idx[torch.randperm(K, generator=generator(3))]
    shifts = 4 * torch.arange(8)
    qweight = (values.T.reshape(K // 8, 8, N) << shifts[:, None]).sum(1).to(torch.int32)
    qzeros = ((zeros - 1).view(-1, N // 8, 8) << shifts).sum(-1).to(torch.int32)
    weight = from_gptq(qweight, qzeros, scales, g_idx.to(torch.int32))
    assert (weight.permutation is not None) == is_act_order
    x = randn(3, K, seed=4)
    dense = (values.double() - zeros[g_idx].T) * scales[g_idx].T.double()
    torch.testing.assert_close(
        w4a16_linear(x, weight, tiles=SMALL).double(), x.double() @ dense.T, rtol=1e-5, atol=1e-4
    )


def test_groups_that_the_kernel_does_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match="groups of 16 values"):
        pack_int4(torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 4))
    with pytest.raises(ValueError, match="not both"):
        pack_int4(
            torch.zeros(4, 64, dtype=torch.uint8), torch.ones(1, 4), zeros=torch.ones(1, 4), mins=torch.ones(1, 4)
        )
