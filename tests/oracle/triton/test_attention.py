"""Paged attention kernels, decode and prefill, against the fp64 oracle over odd shapes."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from engine.kernels import reference_quant
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.kernels.triton.paged_decode import DecodeTiles, paged_attention_decode
from engine.kernels.triton.paged_prefill import PrefillTiles, paged_attention_prefill, plan_prefill


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences as (rows in this step, tokens in the cache)."""

    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    sliding_window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32

    @property
    def max_rows(self) -> int:
        return max(rows for rows, _ in self.seqs)

    @property
    def max_context_len(self) -> int:
        return max(context for _, context in self.seqs)


@dataclass(frozen=True, slots=True)
class Inputs:
    query: Tensor
    cache: LayerCache
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor


def build(case: Case) -> Inputs:
    """Block tables out of order, blocks of garbage between the used ones, a strided cache."""
    counts = [-(-context // case.block_size) for _, context in case.seqs]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(4)).tolist()
    tables = torch.zeros(len(case.seqs), max(counts) + 1, dtype=torch.int32)
    bytes_of_block = block_bytes(case.num_kv_heads, case.block_size, case.head_dim, case.kv_dtype)
    # A layer is a slice of a larger buffer, so blocks need not follow each other.
    rows = torch.zeros(num_blocks, bytes_of_block + 64, dtype=torch.uint8)[:, :bytes_of_block]
    cache = LayerCache.from_bytes(rows, case.num_kv_heads, case.block_size, case.head_dim, case.kv_dtype)
    values = randn(*cache.elements.shape, seed=1)
    if cache.scales is None:
        cache.elements.copy_(values)
    else:
        elements, scales = reference_quant.quantize_rows(values, case.kv_dtype)
        cache.elements.copy_(elements)
        cache.scales.copy_(scales)
    starts = [0]
    for seq, ((num_rows, context), count) in enumerate(zip(case.seqs, counts, strict=True)):
        table, order = order[:count], order[count:]
        tables[seq, :count] = torch.tensor(table, dtype=torch.int32)
        starts.append(starts[-1] + num_rows)
        if table and context % case.block_size:  # what lies behind a sequence's last token must not spread
            _spoil(cache, table[-1], context % case.block_size)
    query = randn(starts[-1], case.num_heads, case.head_dim, seed=2).to(case.dtype)
    return Inputs(
        query,
        cache,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([context for _, context in case.seqs], dtype=torch.int32),
        tables,
    )


def _spoil(cache: LayerCache, block: int, offset: int) -> None:
    if cache.scales is not None:
        cache.scales[block, :, :, offset:] = torch.nan
    else:
        cache.elements[block, :, :, offset:] = torch.nan


def expected(case: Case, inputs: Inputs) -> Tensor:
    return reference_quant.paged_attention(
        inputs.query,
        inputs.cache.elements,
        inputs.cache.scales,
        inputs.query_start,
        inputs.context_lens,
        inputs.block_tables,
        case.sliding_window,
        case.soft_cap,
    )


def decode(case: Case, inputs: Inputs, tiles: DecodeTiles) -> Tensor:
    out = torch.full_like(inputs.query, torch.nan)
    return paged_attention_decode(
        inputs.query,
        inputs.cache,
        inputs.query_start,
        inputs.context_lens,
        inputs.block_tables,
        max_rows=case.max_rows,
        max_context_len=case.max_context_len,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        tiles=tiles,
        out=out,
    )


def assert_near(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert torch.isfinite(found).all(), "every element is written"
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


SMALL = DecodeTiles(split_size=32, block_n=16)
DECODE_CASES = [
    Case(((1, 1),)),
    Case(((1, 1), (1, 16), (1, 17), (1, 100))),
    Case(((1, 40), (0, 0), (1, 0), (1, 33)), num_heads=9, num_kv_heads=3, head_dim=24),
    Case(((3, 3), (1, 70), (2, 35), (5, 64)), num_heads=6, num_kv_heads=1),
    Case(((4, 50), (4, 33)), num_heads=14, num_kv_heads=2, head_dim=16),
    Case(((1, 90), (3, 90), (1, 5)), sliding_window=20),
    Case(((2, 70), (1, 64)), sliding_window=1, block_size=8),
    Case(((1, 50), (2, 20)), soft_cap=3.0),
    Case(((1, 65), (1, 31)), num_heads=2, num_kv_heads=2, block_size=64, head_dim=64),
    Case(((1, 50), (2, 37)), dtype=torch.float16, kv_dtype=torch.float16),
    Case(((1, 50), (2, 37)), dtype=torch.float16, kv_dtype=torch.int8, num_kv_heads=1),
    Case(((1, 50), (2, 37)), dtype=torch.float32, kv_dtype=torch.int8, block_size=32),
    Case(((1, 50), (2, 37)), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn),
    Case(((1, 50), (2, 37)), dtype=torch.float32, kv_dtype=torch.float8_e4m3fn, sliding_window=9, soft_cap=5.0),
    Case(((1, 50), (2, 37)), dtype=torch.float32, kv_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", DECODE_CASES, ids=str)
def test_paged_attention_decode(case: Case) -> None:
    inputs = build(case)
    assert_near(decode(case, inputs, SMALL), expected(case, inputs), case.dtype)


def test_rows_are_bit_equal_alone_in_a_batch_and_beside_drafts() -> None:
    case = Case(((3, 90), (1, 41), (2, 70)), num_heads=6, num_kv_heads=2, sliding_window=60)
    inputs = build(case)
    whole = decode(case, inputs, SMALL)
    for seq, (rows, context) in enumerate(case.seqs):
        for row in range(rows):
            first = int(inputs.query_start[seq]) + row
            alone = paged_attention_decode(
                inputs.query[first : first + 1],
                inputs.cache,
                torch.tensor([0, 1], dtype=torch.int32),
                torch.tensor([context - rows + row + 1], dtype=torch.int32),
                inputs.block_tables[seq : seq + 1],
                max_rows=1,
                max_context_len=100,
                sliding_window=case.sliding_window,
                tiles=DecodeTiles(split_size=32, block_n=16, max_split_programs=1),
            )
            assert torch.equal(alone, whole[first : first + 1])


def prefill(case: Case, inputs: Inputs, tiles: PrefillTiles) -> Tensor:
    plan = plan_prefill(inputs.query_start, case.num_heads // case.num_kv_heads, inputs.query.device, tiles=tiles)
    return paged_attention_prefill(
        inputs.query,
        inputs.cache,
        inputs.query_start,
        inputs.context_lens,
        inputs.block_tables,
        plan,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        out=torch.full_like(inputs.query, torch.nan),
    )


PREFILL_CASES = [
    Case(((1, 1),)),
    Case(((50, 50),), num_heads=6),
    Case(((33, 33), (0, 0), (1, 40), (40, 100), (17, 32))),
    Case(((20, 61), (5, 5)), num_heads=9, num_kv_heads=3, head_dim=24, block_size=8),
    Case(((70, 90), (3, 64)), num_heads=7, num_kv_heads=1, head_dim=16),
    Case(((60, 100), (1, 80), (25, 25)), sliding_window=20),
    Case(((100, 100),), sliding_window=40, num_heads=2),
    Case(((40, 73),), sliding_window=1),
    Case(((30, 50), (9, 9)), soft_cap=4.0, block_size=64),
    Case(((30, 50), (9, 9)), dtype=torch.float16, kv_dtype=torch.float16),
    Case(((30, 50), (9, 9)), dtype=torch.float16, kv_dtype=torch.int8, block_size=32),
    Case(((30, 50), (9, 9)), dtype=torch.float32, kv_dtype=torch.int8, sliding_window=12),
    Case(((30, 50), (9, 9)), dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, soft_cap=6.0),
    Case(((30, 50), (9, 9)), dtype=torch.float32, kv_dtype=torch.bfloat16),
]


@pytest.mark.parametrize("case", PREFILL_CASES, ids=str)
def test_paged_attention_prefill(case: Case) -> None:
    inputs = build(case)
    found = prefill(case, inputs, PrefillTiles(block_m=32, block_n=16))
    assert_near(found, expected(case, inputs), case.dtype)


def test_prefill_of_later_sequences_leaves_the_rows_of_earlier_ones() -> None:
    case = Case(((2, 20), (30, 40)))
    inputs = build(case)
    plan = plan_prefill(inputs.query_start, 2, inputs.query.device, first_seq=1, tiles=PrefillTiles(32, 32))
    out = torch.full_like(inputs.query, torch.nan)
    paged_attention_prefill(
        inputs.query, inputs.cache, inputs.query_start, inputs.context_lens, inputs.block_tables, plan, out=out
    )
    assert out[:2].isnan().all()
    assert_near(out[2:], expected(case, inputs)[2:], case.dtype)


def test_arguments_that_do_not_fit_are_refused() -> None:
    case = Case(((1, 20),))
    inputs = build(case)
    with pytest.raises(ValueError, match=r"context_lens is torch\.int64"):
        decode(case, replace(inputs, context_lens=inputs.context_lens.long()), SMALL)
    with pytest.raises(ValueError, match="query has shape"):
        decode(case, replace(inputs, query=inputs.query[:, :, :16].contiguous()), SMALL)
    with pytest.raises(ValueError, match="query has strides"):
        decode(case, replace(inputs, query=torch.stack([inputs.query, inputs.query], dim=-1)[..., 0]), SMALL)
    with pytest.raises(ValueError, match="do not share"):
        decode(case, replace(inputs, query=inputs.query[:, :3].contiguous()), SMALL)
    with pytest.raises(ValueError, match="no whole tiles"):
        DecodeTiles(split_size=40, block_n=16)
