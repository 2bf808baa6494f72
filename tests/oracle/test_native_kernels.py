"""Each native kernel against its oracle, in every variant that this CPU runs, and the variants against each other."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.kernels import reference
from engine.kernels.cpu.build import ISA_VARIABLE, Isa, KernelsUnavailable, build_library, choose_isa
from engine.kernels.cpu.library import CacheType, WeightKind, open_library
from engine.kernels.cpu.single import PagedCache, SingleKernels
from engine.model.kv_convert import quantize, split_blocks
from tests.oracle.quantized_oracle import int8_attention

_Floats = npt.NDArray[np.float32]


def runnable_isas() -> Iterator[Isa]:
    before = os.environ.get(ISA_VARIABLE)
    for isa in Isa:
        os.environ[ISA_VARIABLE] = isa
        try:
            yield choose_isa()
        except KernelsUnavailable:
            continue
        finally:
            os.environ.pop(ISA_VARIABLE)
            if before is not None:
                os.environ[ISA_VARIABLE] = before


ISAS = tuple(runnable_isas())
each_isa = pytest.mark.parametrize("isa", ISAS, ids=str)


@cache
def kernels(isa: Isa) -> SingleKernels:
    return SingleKernels(open_library(build_library(isa)))


def randn(*shape: int, seed: int = 0) -> _Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- functions ------------------------------------------------------------------------------------------------------


@each_isa
def test_exp_is_within_two_units_in_the_last_place(isa: Isa) -> None:
    x = np.concatenate([np.linspace(-87, 0, 16 * 4000), -np.logspace(-8, 1, 1600)]).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(kernels(isa).exp(x) - exact) / exact).max() < 2 * 2**-24 * 2


@each_isa
def test_exp_ends_at_zero(isa: Isa) -> None:
    x = np.array([0.0, -0.0, -87.5, -1000.0, -np.inf] + [0.0] * 11, np.float32)
    assert kernels(isa).exp(x)[:5].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


@each_isa
def test_silu_equals_the_oracle(isa: Isa) -> None:
    x = np.concatenate([randn(1600) * 5, np.array([0.0, -0.0, 200.0, -200.0, 1e-30, -1e30, 1e30, -87.2] * 2)])
    gate_up = torch.from_numpy(np.concatenate([x, np.ones_like(x)])[None]).double()
    expected = reference.silu_mul(gate_up)[0].numpy()
    np.testing.assert_allclose(kernels(isa).silu(x.astype(np.float32)), expected, rtol=5e-6, atol=1e-30)


# --- quantized activations -------------------------------------------------------------------------------------------


def quantized(x: _Floats) -> tuple[npt.NDArray[np.int8], _Floats]:
    """The oracle: symmetric int8 per row and group of 32."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(x.shape[0], -1, 32)
    largest = np.abs(padded).max(-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    quants = np.rint(padded * inverse[..., None]).astype(np.int8)
    return quants.reshape(x.shape[0], -1), largest / np.float32(127)


@each_isa
@pytest.mark.parametrize("shape", [(1, 32), (3, 576), (2, 33), (5, 100), (1, 1), (4, 17)])
def test_rows_are_quantized_group_by_group(isa: Isa, shape: tuple[int, int]) -> None:
    x = randn(*shape) * np.exp(randn(*shape, seed=1) * 3)
    x[0, : shape[1] // 2] = 0.0  # a group of zeros, where there is one
    quants, scales = kernels(isa).quantize_rows(x)
    expected_quants, expected_scales = quantized(x)
    assert np.array_equal(quants, expected_quants)
    assert np.array_equal(scales, expected_scales)


@each_isa
@pytest.mark.parametrize("shape", [(1, 32), (3, 576), (2, 48), (3, 100), (1, 5)])
def test_rms_norm_quantize_equals_the_oracle(isa: Isa, shape: tuple[int, int]) -> None:
    x, weight = randn(*shape) * 3, randn(shape[1], seed=1)
    quants, scales = kernels(isa).quantize_rows(x, weight, 1e-5)
    expected = reference.rms_norm(torch.from_numpy(x).double(), torch.from_numpy(weight).double(), 1e-5).numpy()
    values = quants.reshape(*scales.shape, 32) * scales[..., None]
    difference = np.abs(values.reshape(shape[0], -1)[:, : shape[1]] - expected)
    steps = np.repeat(scales, 32, axis=1)[:, : shape[1]]
    assert (difference <= steps * 0.501 + 1e-6).all()


# --- products --------------------------------------------------------------------------------------------------------

KINDS = {
    WeightKind.Q4_0: gguf.GGMLQuantizationType.Q4_0,
    WeightKind.Q4_1: gguf.GGMLQuantizationType.Q4_1,
    WeightKind.Q8_0: gguf.GGMLQuantizationType.Q8_0,
}
each_kind = pytest.mark.parametrize("kind", list(KINDS), ids=str)


def blocks_and_values(kind: WeightKind, num_columns: int, num_inputs: int) -> tuple[npt.NDArray[np.uint8], _Floats]:
    blocks = gguf.quants.quantize(randn(num_columns, num_inputs, seed=7), KINDS[kind])
    return blocks, gguf.quants.dequantize(blocks, KINDS[kind])


@each_isa
@each_kind
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 25, 64])
@pytest.mark.parametrize(("num_columns", "num_inputs"), [(1, 32), (48, 96), (257, 576)])
def test_gemm_equals_the_oracle(isa: Isa, kind: WeightKind, num_rows: int, num_columns: int, num_inputs: int) -> None:
    x = randn(num_rows, num_inputs)
    blocks, weights = blocks_and_values(kind, num_columns, num_inputs)
    quants, scales = quantized(x)
    activations = (quants.reshape(*scales.shape, 32).astype(np.float64) * scales[..., None]).reshape(x.shape)
    expected = reference.linear(torch.from_numpy(activations), torch.from_numpy(weights).double()).numpy()
    found = kernels(isa).gemm(x, kind, blocks)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * num_inputs**0.5)


@each_isa
@each_kind
def test_extreme_weights_and_activations_do_not_overflow(isa: Isa, kind: WeightKind) -> None:
    """All weights and activations at their limits and of one sign: the largest sums that narrow integers must hold."""
    header = {WeightKind.Q4_0: [0, 60], WeightKind.Q4_1: [0, 60, 0, 60], WeightKind.Q8_0: [0, 60]}[kind]  # fp16 1.0
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        size = 32 if kind is WeightKind.Q8_0 else 16
        blocks = np.array([header + [byte] * size] * 16, np.uint8)
        weights = gguf.quants.dequantize(blocks, KINDS[kind]).astype(np.float64)
        for sign in (1.0, -1.0):
            x = np.full((3, 32), 127.0 * sign, np.float32)
            assert np.array_equal(kernels(isa).gemm(x, kind, blocks), (x @ weights.T).astype(np.float32))


@each_isa
@each_kind
def test_a_row_of_a_product_does_not_depend_on_the_others(isa: Isa, kind: WeightKind) -> None:
    blocks, _ = blocks_and_values(kind, 80, 320)
    x = randn(70, 320) * np.exp(randn(70, 1, seed=2) * 2)
    whole = kernels(isa).gemm(x, kind, blocks)
    for start, count in ((0, 1), (5, 2), (9, 3), (1, 7), (60, 8), (33, 13), (2, 16), (40, 30)):
        assert np.array_equal(kernels(isa).gemm(x[start : start + count], kind, blocks), whole[start : start + count])


@each_isa
@pytest.mark.parametrize("kind", [WeightKind.Q8_0, WeightKind.Q4_1], ids=str)
@pytest.mark.parametrize("num_inputs", [32, 40, 100])
def test_values_are_quantized_to_within_half_a_step(isa: Isa, kind: WeightKind, num_inputs: int) -> None:
    """Unit rows read the weights back: within half a step, and the scale's own rounding to fp16."""
    values = randn(24, num_inputs, seed=3) * (np.arange(24) > 0)[:, None]
    found = kernels(isa).gemm(np.eye(num_inputs, dtype=np.float32), kind, values).T
    groups = np.pad(values, ((0, 0), (0, -num_inputs % 32))).reshape(24, -1, 32)
    spans = np.abs(groups).max(-1) / 127 if kind is WeightKind.Q8_0 else np.ptp(groups, axis=-1) / 15
    assert (np.abs(found - values) <= np.repeat(spans * 0.56, 32, axis=1)[:, :num_inputs]).all()
    assert not found[0].any()


def test_every_variant_gives_the_same_bits() -> None:
    x, weight = randn(13, 320) * 3, randn(320, seed=1)
    for kind in WeightKind:
        blocks, _ = blocks_and_values(kind, 80, 320)
        products = [kernels(isa).gemm(x, kind, blocks) for isa in ISAS]
        assert all(np.array_equal(product, products[0]) for product in products)
    rows = [kernels(isa).quantize_rows(x, weight, 1e-6) for isa in ISAS]
    assert all(np.array_equal(q, rows[0][0]) and np.array_equal(s, rows[0][1]) for q, s in rows)
    values = np.concatenate([-np.abs(randn(1600)) * 30, [-np.inf, -87.0] * 8]).astype(np.float32)
    for results in ([kernels(isa).exp(values) for isa in ISAS], [kernels(isa).silu(values[:1600]) for isa in ISAS]):
        assert all(np.array_equal(result, results[0]) for result in results)
    case = AttentionCase(((40, 700), (1, 300), (8, 13)), head_dim=40, sliding_window=300)
    outputs = [run_attention(isa, case, 4).out for isa in ISAS]
    assert all(np.array_equal(out, outputs[0]) for out in outputs)


# --- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences as (rows in this step, tokens in the cache)."""

    seqs: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    sliding_window: int | None = None
    dtype: KvDtype = KvDtype.FP32


ATTENTION_CASES = [
    AttentionCase(((1, 1),)),
    AttentionCase(((1, 1), (1, 16), (1, 17), (1, 256), (1, 257), (1, 700)), num_heads=9, num_kv_heads=3),
    AttentionCase(((5, 5), (1, 40), (5, 33), (20, 20), (1, 7), (16, 90)), num_heads=7, num_kv_heads=1, head_dim=24),
    AttentionCase(((300, 300),), num_heads=2, num_kv_heads=2, head_dim=128),
    AttentionCase(((130, 559), (1, 1000)), block_size=8, head_dim=80),
    AttentionCase(((1, 100), (1, 3), (40, 600), (7, 64)), sliding_window=20, block_size=8),
    AttentionCase(((200, 333), (1, 33)), sliding_window=1, head_dim=16),
    AttentionCase(((64, 900), (1, 899), (3, 70)), sliding_window=300, block_size=64, head_dim=2),
    AttentionCase(((33, 47), (1, 380), (2, 80)), dtype=KvDtype.BF16, num_heads=6, num_kv_heads=2),
    AttentionCase(((33, 47), (1, 380), (2, 80)), dtype=KvDtype.BF16, head_dim=20),
    AttentionCase(((33, 47), (1, 380), (2, 80)), dtype=KvDtype.FP16, block_size=32, head_dim=128),
    AttentionCase(((33, 47), (1, 380), (2, 80)), dtype=KvDtype.INT8, num_heads=6, num_kv_heads=2),
    AttentionCase(((33, 47), (1, 380), (2, 80)), dtype=KvDtype.INT8, head_dim=40, sliding_window=50),
    AttentionCase(((5, 600), (1, 1), (1, 257)), dtype=KvDtype.INT8, num_heads=8, num_kv_heads=1, head_dim=128),
    AttentionCase(((9, 300), (1, 33)), dtype=KvDtype.INT8, num_heads=2, head_dim=2, block_size=8, sliding_window=1),
]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """A step's geometry as the kernels take it."""

    slot_mapping: npt.NDArray[np.int64]
    query_start: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionRun:
    """What went in and came out."""

    query: _Floats
    kv: _Floats
    out: _Floats
    cache: npt.NDArray[np.uint8]
    before: npt.NDArray[np.uint8]
    layout: KvLayout
    step: StepArrays


def plan(case: AttentionCase) -> tuple[StepArrays, int]:
    counts = [-(-context // case.block_size) for _, context in case.seqs]
    order = np.random.default_rng(4).permutation(sum(counts) + 3).tolist()
    tables: list[list[int]] = []
    slots: list[int] = []
    starts = [0]
    for (rows, context), count in zip(case.seqs, counts, strict=True):
        table, order = order[:count], order[count:]
        tables.append(table + [0] * (max(counts) - count))
        positions = range(context - rows, context)
        slots += [table[p // case.block_size] * case.block_size + p % case.block_size for p in positions]
        starts.append(starts[-1] + rows)
    lens = [context for _, context in case.seqs]
    arrays = (np.array(starts, np.int32), np.array(lens, np.int32), np.array(tables, np.int32))
    return StepArrays(np.array(slots, np.int64), *arrays), sum(counts) + 3


def random_cache(layout: KvLayout, num_blocks: int, seed: int = 1) -> npt.NDArray[np.uint8]:
    """Blocks [num_blocks, block_bytes] of random KV."""
    data = torch.zeros(num_blocks, layout.block_bytes, dtype=torch.uint8)
    elements, scales = split_blocks(data, layout)
    values = torch.from_numpy(randn(*elements.shape, seed=seed))
    if scales is None:
        elements.copy_(values)
    else:  # one token per row of [tokens, 2, heads, dim]
        tokens = quantize(values.permute(0, 3, 1, 2, 4).flatten(0, 1), KvDtype.INT8)
        assert tokens.scales is not None
        shape = (num_blocks, layout.block_size)
        elements.copy_(tokens.elements.unflatten(0, shape).permute(0, 2, 3, 1, 4))
        scales.copy_(tokens.scales.unflatten(0, shape).permute(0, 2, 3, 1))
    return data.numpy()


def run_attention(isa: Isa, case: AttentionCase, rows_at_once: int, garbage: float | None = None) -> AttentionRun:
    """Run the kernel; `garbage` fills every slot that belongs to no sequence."""
    step, num_blocks = plan(case)
    layout = KvLayout("", 1, case.num_kv_heads, case.head_dim, case.block_size, case.dtype)
    cache = random_cache(layout, num_blocks)
    if garbage is not None:
        elements, scales = split_blocks(torch.from_numpy(cache), layout)
        is_used = torch.zeros(num_blocks * case.block_size, dtype=torch.bool)
        for table, length in zip(step.block_tables, step.context_lens, strict=True):
            positions = np.arange(length)
            is_used[table[positions // case.block_size] * case.block_size + positions % case.block_size] = True
        unused = ~is_used.view(num_blocks, 1, 1, case.block_size)
        if scales is None:
            elements.masked_fill_(unused[..., None], garbage)
        else:
            scales.masked_fill_(unused, garbage)
    num_rows = int(step.query_start[-1])
    query = randn(num_rows, case.num_heads, case.head_dim, seed=3) * 2
    kv = randn(num_rows, 2, case.num_kv_heads, case.head_dim, seed=2)
    before = cache.copy()
    paged = PagedCache(cache, CacheType[case.dtype.name], case.block_size)
    out = kernels(isa).attention(query, kv, paged, step, case.sliding_window, rows_at_once)
    return AttentionRun(query, kv, out, cache, before, layout, step)


def expected_cache(run: AttentionRun) -> torch.Tensor:
    """The cache after the step's KV is written, by the oracle, as bytes."""
    data = torch.from_numpy(run.before.copy())
    elements, scales = split_blocks(data, run.layout)
    if scales is None:
        reference.write_kv(torch.from_numpy(run.kv), elements, torch.from_numpy(run.step.slot_mapping))
        return data
    tokens = quantize(torch.from_numpy(run.kv), KvDtype.INT8)
    assert tokens.scales is not None
    for row, slot in enumerate(run.step.slot_mapping.tolist()):
        block, offset = divmod(slot, run.layout.block_size)
        elements[block, :, :, offset] = tokens.elements[row]
        scales[block, :, :, offset] = tokens.scales[row]
    return data


def expected_attention(run: AttentionRun, cache: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
    """[rows, heads, dim] by the oracle of the cache's type."""
    step, (elements, scales) = run.step, split_blocks(cache, run.layout)
    if scales is None:
        arrays = (run.query, step.query_start, step.context_lens, step.block_tables)
        query, starts, lens, tables = (torch.from_numpy(array) for array in arrays)
        return reference.paged_attention(query, elements.float(), starts, lens, tables, sliding_window)
    out = torch.zeros(run.query.shape, dtype=torch.float64)
    group = run.query.shape[1] // run.layout.num_kv_heads
    for sequence, table in enumerate(step.block_tables.tolist()):
        # [2, kv heads, tokens, dim] and [2, kv heads, tokens]
        tokens = elements[table].permute(1, 2, 0, 3, 4).flatten(2, 3)
        token_scales = scales[table].permute(1, 2, 0, 3).flatten(2, 3)
        end = int(step.query_start[sequence + 1])
        for row in range(int(step.query_start[sequence]), end):
            position = int(step.context_lens[sequence]) - (end - row)
            seen = slice(0 if sliding_window is None else max(0, position - sliding_window + 1), position + 1)
            for head in range(run.query.shape[1]):
                (keys, values), (key_scales, value_scales) = tokens[:, head // group], token_scales[:, head // group]
                query = torch.from_numpy(run.query[row, head])
                out[row, head] = int8_attention(query, keys, key_scales, values, value_scales, seen)
    return out.float()


@each_isa
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_write_kv_and_paged_attention(isa: Isa, case: AttentionCase) -> None:
    run = run_attention(isa, case, rows_at_once=3)
    written = expected_cache(run)
    assert torch.equal(torch.from_numpy(run.cache), written)
    expected = expected_attention(run, written, case.sliding_window)
    out = torch.from_numpy(run.out)
    if case.dtype is KvDtype.INT8:
        # A weight between two of its steps, 1 / 16383 of the largest, may be rounded either way: rarely, and by one.
        is_close = torch.isclose(out, expected, rtol=2e-5, atol=2e-5)
        assert is_close.float().mean() > 0.995
        out = torch.where(is_close | ((out - expected).abs() < expected.abs().max() / 16383), expected, out)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


@each_isa
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_rows_attended_together_give_the_bits_of_rows_attended_alone(isa: Isa, case: AttentionCase) -> None:
    alone = run_attention(isa, case, rows_at_once=1).out
    for rows_at_once in (2, 8, 21):
        assert np.array_equal(run_attention(isa, case, rows_at_once).out, alone)


@each_isa
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_garbage_in_foreign_slots_does_not_spread(isa: Isa, case: AttentionCase) -> None:
    expected = run_attention(isa, case, rows_at_once=4).out
    for garbage in (float("nan"), float("inf")):
        assert np.array_equal(run_attention(isa, case, 4, garbage).out, expected)


@pytest.mark.parametrize("dtype", [KvDtype.BF16, KvDtype.FP16])
@each_isa
def test_halves_are_rounded_as_torch_rounds(isa: Isa, dtype: KvDtype) -> None:
    """Ties, subnormals, overflow and NaN."""
    values: Sequence[float] = [
        0.0, -0.0, 1.0, 1.0 + 2**-9, 1.0 + 3 * 2**-9, 1.0 + 2**-12, 1.0 + 2**-11, 1.0 + 3 * 2**-11, 65504.0, 65519.9,
        65520.0, 3e38, 3.4e38, 2**-14, 2**-24, 2**-25, 2**-25 * 1.01, 2**-26, 6e-8, 1e-40, -5.9e-8, np.inf, -np.inf,
        np.nan, 2**-15 + 2**-25, 2**-15 + 3 * 2**-25, -1.1, 1023.75, 2049.0, 2051.0, 0.1, -0.3,
    ]  # fmt: skip
    kv = np.tile(np.array(values, np.float32), (1, 2, 1, 1))
    layout = KvLayout("", 1, 1, 32, 16, dtype)
    cache = np.zeros((1, layout.block_bytes), np.uint8)
    step = StepArrays(np.array([3]), np.array([0, 1], np.int32), np.array([4], np.int32), np.zeros((1, 1), np.int32))
    query = np.zeros((1, 1, 32), np.float32)
    kernels(isa).attention(query, kv, PagedCache(cache, CacheType[dtype.name], 16), step, None, 1)
    elements, _ = split_blocks(torch.from_numpy(cache), layout)
    expected = torch.tensor(values).to(elements.dtype)
    for part in (0, 1):
        torch.testing.assert_close(elements[0, part, 0, 3], expected, rtol=0, atol=0, equal_nan=True)
