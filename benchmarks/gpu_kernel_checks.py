"""Every kernel against its oracle on the device: fresh random inputs, outputs poisoned, fp64 or fp32 to compare with.

Relative distances to expect: bf16 and fp16 operands 1e-3 to 1e-2, fp32 far below 1e-4. Parts run side by side.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench
from engine.kernels import reference, reference_quant
from engine.kernels.triton import activation, gemm, norms
from engine.kernels.triton.int4_weight import Int4Weight, pack_int4
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.kernels.triton.paged_decode import DecodeTiles, paged_attention_decode
from engine.kernels.triton.paged_prefill import paged_attention_prefill, plan_prefill
from engine.kernels.triton.rope_kv import rope_and_write_kv
from engine.kernels.triton.sampling import sample_rows
from engine.kernels.triton.sampling_rows import SamplingRow, SamplingRows
from engine.kernels.triton.w4a16 import dequantize_int4, w4a16_linear
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest, sample_row
from engine.types import SamplingParams

_BLOCK = 16
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
_FP8 = torch.float8_e4m3fn


class AttentionInputs:
    """A step over random caches: block tables out of order, garbage in every block that no sequence owns."""

    def __init__(
        self,
        bench: Bench,
        seqs: Sequence[tuple[int, int]],
        kv_dtype: torch.dtype,
        *,
        dtype: torch.dtype | None = None,
        num_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
    ) -> None:
        """Sequences as (rows, context length)."""
        device = bench.device
        counts = [-(-context // _BLOCK) for _, context in seqs]
        num_blocks = sum(counts) + 2
        rows = torch.zeros(
            num_blocks, block_bytes(num_kv_heads, _BLOCK, head_dim, kv_dtype), dtype=torch.uint8, device=device
        )
        self.cache = LayerCache.from_bytes(rows, num_kv_heads, _BLOCK, head_dim, kv_dtype)
        fill(self.cache)
        order = torch.randperm(num_blocks, device=device)
        self.block_tables = torch.zeros(len(seqs), max(counts), dtype=torch.int32, device=device)
        first = 0
        for seq, count in enumerate(counts):
            self.block_tables[seq, :count] = order[first : first + count]
            first += count
        starts = np.cumsum([0, *(num_rows for num_rows, _ in seqs)])
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.query_start = self.starts.to(device)
        self.context_lens = torch.tensor([context for _, context in seqs], dtype=torch.int32, device=device)
        self.query = bench.randn(int(starts[-1]), num_heads, head_dim, dtype=dtype or bench.dtype)
        self.max_rows = max(num_rows for num_rows, _ in seqs)
        self.max_context_len = max(context for _, context in seqs)
        self.group = num_heads // num_kv_heads

    def wanted(self, window: int | None, cap: float | None) -> Tensor:
        """The oracle's result."""
        cache = self.cache
        return reference_quant.paged_attention(
            self.query,
            cache.elements,
            cache.scales,
            self.query_start,
            self.context_lens,
            self.block_tables,
            window,
            cap,
        )

    def decode(self, window: int | None = None, cap: float | None = None, tiles: DecodeTiles | None = None) -> Tensor:
        """The split-KV kernel's result."""
        return paged_attention_decode(
            self.query,
            self.cache,
            self.query_start,
            self.context_lens,
            self.block_tables,
            max_rows=self.max_rows,
            max_context_len=self.max_context_len,
            sliding_window=window,
            soft_cap=cap,
            tiles=tiles or DecodeTiles(),
            out=torch.full_like(self.query, torch.nan),
        )

    def prefill(self, window: int | None = None, cap: float | None = None) -> Tensor:
        """The tiled kernel's result."""
        return paged_attention_prefill(
            self.query,
            self.cache,
            self.query_start,
            self.context_lens,
            self.block_tables,
            plan_prefill(self.starts, self.group, self.query.device),
            sliding_window=window,
            soft_cap=cap,
            out=torch.full_like(self.query, torch.nan),
        )


def fill(cache: LayerCache) -> None:
    """Random values in every slot."""
    values = torch.randn(cache.elements.shape, device=cache.elements.device)
    if cache.scales is None:
        cache.elements.copy_(values)
    else:
        elements, scales = reference_quant.quantize_rows(values, cache.elements.dtype)
        cache.elements.copy_(elements)
        cache.scales.copy_(scales)


def check_decode(bench: Bench) -> None:
    """Split-KV attention: types, windows, caps, drafts, odd heads; and rows that are bit-equal alone and together."""
    long = bench.size(3000, 40)
    seqs = [(1, long), (1, 1), (1, long // 2 + 5), (1, 17)]
    for kv_dtype in (bench.dtype, torch.int8, _FP8):
        inputs = AttentionInputs(bench, seqs, kv_dtype)
        bench.check(f"decode {kv_dtype}", inputs.decode(), inputs.wanted(None, None), 1e-2)
    for dtype, kv_dtype in ((torch.float16, torch.int8), (torch.float32, torch.float32), (torch.float32, torch.int8)):
        inputs = AttentionInputs(bench, seqs, kv_dtype, dtype=dtype)
        bench.check(f"decode {dtype} over {kv_dtype}", inputs.decode(), inputs.wanted(None, None), _TOLERANCES[dtype])
    inputs = AttentionInputs(bench, [(5, long), (1, 40), (3, long // 3)], bench.dtype)
    for window, cap in ((None, None), (long // 4, None), (None, 5.0), (30, 20.0)):
        name = f"decode drafts, window {window}, cap {cap}"
        bench.check(name, inputs.decode(window, cap), inputs.wanted(window, cap), 1e-2)
    inputs = AttentionInputs(bench, seqs, bench.dtype, num_heads=9, num_kv_heads=3, head_dim=64)
    bench.check("decode, groups of 3, heads of 64", inputs.decode(), inputs.wanted(None, None), 1e-2)
    _check_decode_bits(bench, long)


def _check_decode_bits(bench: Bench, long: int) -> None:
    inputs = AttentionInputs(bench, [(4, long), (1, long // 2), (2, long - 7)], bench.dtype)
    together = inputs.decode()
    is_equal = True
    for seq, (rows, context) in enumerate([(4, long), (1, long // 2), (2, long - 7)]):
        for row in range(rows):
            place = int(inputs.starts[seq]) + row
            alone = paged_attention_decode(
                inputs.query[place : place + 1],
                inputs.cache,
                torch.tensor([0, 1], dtype=torch.int32, device=bench.device),
                torch.tensor([context - rows + row + 1], dtype=torch.int32, device=bench.device),
                inputs.block_tables[seq : seq + 1].contiguous(),
                max_rows=1,
                max_context_len=2 * long,
            )
            is_equal &= torch.equal(alone[0], together[place])
    bench.expect("decode rows bit-equal alone, in a batch and beside drafts", is_equal)


def check_prefill(bench: Bench) -> None:
    """Tiled attention over cached prefixes."""
    rows, prefix = bench.size(700, 20), bench.size(900, 13)
    seqs = [(rows, rows + prefix), (1, 33), (rows // 3, rows // 3), (40, 41)]
    for kv_dtype in (bench.dtype, torch.int8, _FP8):
        inputs = AttentionInputs(bench, seqs, kv_dtype)
        bench.check(f"prefill {kv_dtype}", inputs.prefill(), inputs.wanted(None, None), 1e-2)
    inputs = AttentionInputs(bench, seqs, bench.dtype)
    for window, cap in ((200, None), (None, 5.0), (17, 20.0)):
        name = f"prefill, window {window}, cap {cap}"
        bench.check(name, inputs.prefill(window, cap), inputs.wanted(window, cap), 1e-2)
    inputs = AttentionInputs(bench, seqs, bench.dtype, num_heads=14, num_kv_heads=2, head_dim=64)
    bench.check("prefill, groups of 7, heads of 64", inputs.prefill(), inputs.wanted(None, None), 1e-2)
    inputs = AttentionInputs(bench, seqs[:2], torch.float32, dtype=torch.float32)
    bench.check("prefill fp32", inputs.prefill(), inputs.wanted(None, None), 1e-5)


def check_rows(bench: Bench) -> None:
    """Norms, SwiGLU, quantization, rotation and KV writes, copies of KV."""
    n, rows = bench.size(4096, 96), bench.size(77, 3)
    x, residual, weight = bench.randn(rows, n), bench.randn(rows, n, dtype=torch.float32), bench.randn(n)
    x = x.to(bench.dtype)
    kept = residual.clone()
    wanted = reference_quant.add_rms_norm(x, kept, weight, 1e-5)
    found = norms.add_rms_norm(x, residual, weight, 1e-5, out_dtype=bench.dtype)
    bench.check("add_rms_norm", found, wanted, 1e-2)
    bench.expect("add_rms_norm residual bits", torch.equal(residual, kept))
    gate_up = bench.randn(rows, 2 * n, dtype=bench.dtype)
    bench.check("silu_mul", activation.silu_mul(gate_up), reference.silu_mul(gate_up.double()), 1e-2)
    for dtype in (torch.int8, _FP8):
        elements, scales = gemm.quantize_rows(x, dtype)
        oracle_elements, oracle_scales = reference_quant.quantize_rows(x, dtype)
        is_equal = torch.equal(elements.view(torch.uint8), oracle_elements.view(torch.uint8))
        bench.expect(f"quantize_rows bits {dtype}", is_equal and torch.equal(scales, oracle_scales))
        elements, scales = activation.silu_mul_quantize(gate_up, dtype)
        found = reference_quant.dequantize(elements, scales)
        bench.check(f"silu_mul_quantize {dtype}", found, reference.silu_mul(gate_up.double()), 4e-2)
        elements, scales = norms.add_rms_norm_quantize(None, residual, weight, 1e-5, dtype)
        wanted = reference.rms_norm(residual.double(), weight.double(), 1e-5)
        bench.check(f"rms_norm_quantize {dtype}", reference_quant.dequantize(elements, scales), wanted, 4e-2)
    _check_rope(bench, rows)
    _check_copies(bench)


def _check_rope(bench: Bench, rows: int) -> None:
    heads, kv_heads, dim = 8, 2, 128
    for kv_dtype in (bench.dtype, torch.int8, _FP8):
        caches = [AttentionInputs(bench, [(1, 16 * rows)], kv_dtype, num_heads=heads, num_kv_heads=kv_heads).cache]
        caches.append(LayerCache(caches[0].elements.clone(), None if (s := caches[0].scales) is None else s.clone()))
        qkv = bench.randn(rows, (heads + 2 * kv_heads) * dim, dtype=bench.dtype)
        angles = bench.randn(rows, dim // 2, dtype=torch.float32, scale=100.0)
        slots = torch.randperm(caches[0].num_blocks * _BLOCK, device=bench.device)[:rows]
        norm = bench.randn(dim, dtype=torch.float32)
        count = torch.tensor([rows], dtype=torch.int32, device=bench.device)
        found = rope_and_write_kv(
            qkv, angles.cos(), angles.sin(), caches[0], slots, count, q_norm=norm, k_norm=norm, eps=1e-6
        )
        oracle = caches[1]
        wanted = reference_quant.rope_and_write_kv(
            qkv, angles.cos(), angles.sin(), oracle.elements, oracle.scales, slots, norm, norm, 1e-6
        )
        bench.check(f"rope {kv_dtype}", found, wanted, 1e-2)
        have, want = (reference_quant.dequantize(c.elements, c.scales) for c in caches)
        bench.check(f"write_kv {kv_dtype}", have, want, 1e-2)


def _check_copies(bench: Bench) -> None:
    tokens = bench.size(1000, 40)
    for source_dtype, target_dtype in ((bench.dtype, torch.int8), (torch.int8, bench.dtype), (_FP8, _FP8)):
        source = AttentionInputs(bench, [(1, 2 * tokens)], source_dtype).cache
        caches = [AttentionInputs(bench, [(1, 2 * tokens)], target_dtype).cache]
        caches.append(LayerCache(caches[0].elements.clone(), None if (s := caches[0].scales) is None else s.clone()))
        slots = [torch.randperm(2 * tokens, device=bench.device)[:tokens] for _ in range(2)]
        copy_kv(source, slots[0], caches[0], slots[1])
        oracle = caches[1]
        reference_quant.copy_kv(source.elements, source.scales, slots[0], oracle.elements, oracle.scales, slots[1])
        is_equal = torch.equal(caches[0].elements.view(torch.uint8), oracle.elements.view(torch.uint8))
        bench.expect(f"copy_kv bits {source_dtype} to {target_dtype}", is_equal)


def check_products(bench: Bench) -> None:
    """Dense, int8, fp8 and 4-bit products for few and many rows; rows that are bit-equal whatever their number."""
    n, k = bench.size(1536, 80), bench.size(4096, 128)
    counts = [1, 5, bench.size(64, 6), bench.size(300, 7)]
    x, weight, bias = (
        bench.randn(counts[-1], k, dtype=bench.dtype),
        bench.randn(n, k, dtype=bench.dtype),
        bench.randn(n),
    )
    for rows in counts:
        found = gemm.linear(x[:rows], weight, bias, out_dtype=torch.float32)
        wanted = reference.linear(x[:rows].double(), weight.double(), bias.double())
        bench.check(f"linear, {rows} rows", found, wanted, 1e-4)
        for dtype, multiply in ((torch.int8, gemm.int8_linear), (_FP8, gemm.fp8_linear)):
            quantized_x, quantized_weight = (reference_quant.quantize_rows(t, dtype) for t in (x[:rows], weight))
            found = multiply(*quantized_x, *quantized_weight, bias, out_dtype=torch.float32)
            oracle = reference_quant.int8_linear(*quantized_x, *quantized_weight, bias)
            bench.check(f"{dtype} linear, {rows} rows", found, oracle, 1e-5 if dtype is torch.int8 else 2e-3)
    whole = gemm.linear(x, weight)
    is_equal = all(torch.equal(gemm.linear(x[:rows].contiguous(), weight), whole[:rows]) for rows in counts)
    bench.expect("linear rows bit-equal for any number of rows", is_equal)
    for kind in ("zeros", "mins", "symmetric"):
        _check_int4(bench, kind, x, counts, n, k)


def int4_parts(bench: Bench, n: int, k: int, kind: str) -> dict[str, Tensor]:
    """Random 4-bit values with their factors, groups of 32 for mins and of 128 else."""
    groups = k // (32 if kind == "mins" else 128)
    parts = {
        "values": torch.randint(0, 16, (n, k), device=bench.device).to(torch.uint8),
        "scales": (torch.rand(groups, n, device=bench.device) / 50 + 0.001).half(),
    }
    if kind == "zeros":
        parts["zeros"] = torch.randint(0, 17, (groups, n), device=bench.device).to(torch.int8)
    if kind == "mins":
        parts["mins"] = (-torch.rand(groups, n, device=bench.device) / 5).half()
    return parts


def packed_int4(parts: dict[str, Tensor]) -> Int4Weight:
    """The kernel's form of `int4_parts`."""
    return pack_int4(parts["values"], parts["scales"], zeros=parts.get("zeros"), mins=parts.get("mins"))


def _check_int4(bench: Bench, kind: str, x: Tensor, counts: Sequence[int], n: int, k: int) -> None:
    parts = int4_parts(bench, n, k, kind)
    weight = packed_int4(parts)
    wanted = reference_quant.dequantize_int4(**parts)
    bench.check(f"dequantize_int4 {kind}", dequantize_int4(weight, torch.float32), wanted, 1e-6)
    for rows in counts:
        # 1e-4 tells the kernel's exact operands from a wrong one; PyTorch's product of many rows rounds to bf16.
        found = w4a16_linear(x[:rows], weight, out_dtype=torch.float32)
        oracle = reference_quant.w4a16_linear(x[:rows], **parts)
        bench.check(f"w4a16 {kind}, {rows} rows", found, oracle, 1e-4 if rows < 128 else 1e-2)
    whole = w4a16_linear(x, weight, is_invariant=True)
    is_equal = all(
        torch.equal(w4a16_linear(x[:rows].contiguous(), weight, is_invariant=True), whole[:rows]) for rows in counts
    )
    bench.expect(f"w4a16 {kind} rows bit-equal for any number of rows", is_equal)


SAMPLING_CASES = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.6, top_p=0.9),
    SamplingParams(temperature=1.2, top_k=40),
    SamplingParams(temperature=1.0, top_k=50, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=1.0, logit_bias={5: 3.0}, allowed_token_ids=frozenset(range(0, 50, 3))),
)


def sampling_rows(num_rows: int, vocab_size: int) -> list[SamplingRow]:
    """Rows of every kind, each with a seed and a history of its own."""
    rng = np.random.default_rng()
    rows = []
    for index in range(num_rows):
        case = SAMPLING_CASES[index % len(SAMPLING_CASES)]
        fields = {name: getattr(case, name) for name in case.__slots__}
        fields["seed"] = int(rng.integers(0, 2**64, dtype=np.uint64))
        history = tuple(rng.integers(0, vocab_size, 50 + index).tolist())
        rows.append(SamplingRow(SamplingParams(**fields), history, 20, frozenset({2})))
    return rows


def check_sampling(bench: Bench) -> None:
    """The CPU path's tokens for the same logits."""
    num_rows, vocab_size = bench.size(64, 8), bench.size(128256, 2100)
    for spread in (1.0, 3.0):
        logits = bench.randn(num_rows, vocab_size, dtype=torch.float32, scale=spread)
        rows = sampling_rows(num_rows, vocab_size)
        found = sample_rows(logits.clone(), SamplingRows.build(rows, vocab_size, bench.device))
        requests = [
            SampleRequest(row.params, TokenHistory(row.token_ids, row.num_prompt_tokens), row.stop_ids) for row in rows
        ]
        wanted = [sample_row(row, request) for row, request in zip(logits.cpu().numpy(), requests, strict=True)]
        tokens = found.token_ids.tolist()
        equal = sum(a == b for a, b in zip(tokens, wanted, strict=True))
        bench.expect(f"sampled tokens, spread {spread}", tokens == wanted, num_rows=num_rows, num_equal=equal)
