"""The plain path's kernels against the oracles of the same name, over odd shapes."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.kernels import reference
from engine.kernels.interface import AttentionGeometry
from engine.kernels.torch_kernels import TorchKernels

KERNELS = TorchKernels()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("M", [2, 3, 4, 7, 16, 65])
@pytest.mark.parametrize(("N", "K"), [(1, 8), (257, 63), (320, 96), (1000, 128)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(M: int, N: int, K: int, has_bias: bool) -> None:
    x, weight, bias = randn(M, K), randn(N, K, seed=1), randn(N, seed=2) if has_bias else None
    found = KERNELS.pack_linear(weight, bias)(x)
    expected = reference.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("N", "K"), [(320, 96), (576, 1536)])
def test_linear_rows_do_not_depend_on_their_number(N: int, K: int) -> None:
    x, linear = randn(100, K), KERNELS.pack_linear(randn(N, K, seed=1), None)
    whole = linear(x)
    for count in (KERNELS.min_rows, 3, 5, 16, 33):
        torch.testing.assert_close(linear(x[7 : 7 + count]), whole[7 : 7 + count], rtol=0, atol=1e-5 * K**0.5)


@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (5, 7, 24), (2, 1)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape), randn(shape[-1], seed=1)
    torch.testing.assert_close(KERNELS.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(("num_rows", "num_heads", "head_dim"), [(1, 1, 2), (5, 3, 24), (33, 12, 64)])
def test_rope(num_rows: int, num_heads: int, head_dim: int) -> None:
    angles = randn(num_rows, head_dim // 2, seed=1) * 100
    heads = randn(num_rows, num_heads + 2, head_dim)
    rotated = reference.rope(heads[:, :num_heads], angles.cos(), angles.sin())
    untouched = heads[:, num_heads:].clone()
    torch.testing.assert_close(KERNELS.rope(heads[:, :num_heads], angles.cos(), angles.sin()), rotated)
    assert torch.equal(heads[:, num_heads:], untouched), "value heads lie behind and are not rotated"


def test_rope_turns_by_position() -> None:
    """A quarter turn takes the first half of a head to the second."""
    heads = torch.tensor([[[1.0, 2.0, 0.0, 0.0]]])
    quarter = torch.tensor([[torch.pi / 2, torch.pi / 2]])
    expected = torch.tensor([[[0.0, 0.0, 1.0, 2.0]]])
    torch.testing.assert_close(reference.rope(heads, quarter.cos(), quarter.sin()), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("shape", [(1, 2), (3, 320), (65, 34)])
def test_silu_mul(shape: tuple[int, int]) -> None:
    gate_up = randn(*shape) * 4
    torch.testing.assert_close(KERNELS.silu_mul(gate_up), reference.silu_mul(gate_up))


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences as (rows in this step, tokens in the cache)."""

    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    sliding_window: int | None = None
    dtype: torch.dtype = torch.float32

    def name(self) -> str:
        heads = f"{self.num_heads}x{self.num_kv_heads}x{self.head_dim}"
        return f"{len(self.seqs)}seqs-{heads}-block{self.block_size}-window{self.sliding_window}-{self.dtype}"


ATTENTION_CASES = [
    AttentionCase(((1, 1),)),
    AttentionCase(((1, 1), (1, 16), (1, 17), (1, 300))),
    AttentionCase(tuple((1, length) for length in range(20, 60)), num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionCase(((5, 5), (1, 40), (5, 33), (20, 20), (1, 7), (16, 90)), num_heads=6, num_kv_heads=1),
    AttentionCase(((300, 300),), num_heads=2, num_kv_heads=2),
    AttentionCase(((130, 259), (1, 1000)), block_size=8),
    AttentionCase(((1, 100), (1, 3), (40, 200), (7, 64)), sliding_window=20),
    AttentionCase(((200, 333), (1, 33)), sliding_window=1),
    AttentionCase(((64, 500), (1, 499), (3, 70)), sliding_window=64, block_size=64, head_dim=24),
    AttentionCase(((33, 47), (1, 80), (2, 80)), dtype=torch.bfloat16),
    AttentionCase(((33, 47), (1, 80), (2, 80)), dtype=torch.float16, block_size=32),
]


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=AttentionCase.name)
def test_write_kv_and_paged_attention(case: AttentionCase) -> None:
    geometry, num_blocks = plan(case)
    num_tokens = geometry.slot_mapping.shape[0]
    cache = randn(num_blocks, 2, case.num_kv_heads, case.block_size, case.head_dim, seed=1).to(case.dtype)
    expected_cache = cache.clone()
    num_rows = num_tokens + 2  # two rows of padding
    kv = randn(num_rows, 2, case.num_kv_heads, case.head_dim, seed=2)
    query = randn(num_rows, case.num_heads, case.head_dim, seed=3)

    attention = KERNELS.prepare_attention(geometry)
    attention.write_kv(kv, cache)
    found = attention.paged_attention(query, cache)

    reference.write_kv(kv[:num_tokens], expected_cache, geometry.slot_mapping)
    assert torch.equal(cache, expected_cache)
    expected = reference.paged_attention(
        query[:num_tokens],
        expected_cache,
        geometry.query_start,
        geometry.context_lens,
        geometry.block_tables,
        case.sliding_window,
    )
    torch.testing.assert_close(found[:num_tokens], expected, rtol=1e-5, atol=1e-5)
    assert not found[num_tokens:].any()


def test_attention_oracle_equals_torch_attention() -> None:
    """The oracle itself, on a case that PyTorch's own attention can compute: one whole prompt."""
    case = AttentionCase(((50, 50),), num_heads=6, num_kv_heads=2)
    geometry, num_blocks = plan(case)
    cache = torch.zeros(num_blocks, 2, 2, 16, 16)
    kv, query = randn(50, 2, 2, 16, seed=2), randn(50, 6, 16, seed=3)
    reference.write_kv(kv, cache, geometry.slot_mapping)
    found = reference.paged_attention(query, cache, geometry.query_start, geometry.context_lens, geometry.block_tables)
    keys, values = kv.permute(1, 2, 0, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


def plan(case: AttentionCase) -> tuple[AttentionGeometry, int]:
    """Block tables out of order, and the geometry of a step over them."""
    counts = [-(-context // case.block_size) for _, context in case.seqs]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).tolist()
    tables: list[list[int]] = []
    slots: list[int] = []
    starts = [0]
    for (rows, context), count in zip(case.seqs, counts, strict=True):
        table, order = order[:count], order[count:]
        tables.append(table + [0] * (max(counts) - count))
        slots += slots_of(table, range(context - rows, context), case.block_size)
        starts.append(starts[-1] + rows)
    geometry = AttentionGeometry(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor([context for _, context in case.seqs], dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        block_size=case.block_size,
        sliding_window=case.sliding_window,
    )
    return geometry, num_blocks


def slots_of(table: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
    return [table[position // block_size] * block_size + position % block_size for position in positions]
