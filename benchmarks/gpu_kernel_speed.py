"""Kernels against their floors and against PyTorch, at the shapes of Llama 3 8B; a few ways to cut each, side by side.

Floor: the bytes an operation must move over the measured copy bandwidth, or its operations over the measured rate of a
large product, whichever is longer.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_bench import Bench
from benchmarks.gpu_kernel_checks import AttentionInputs, int4_parts, packed_int4, sampling_rows
from engine.kernels import reference, reference_quant
from engine.kernels.triton import activation, gemm, norms
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache
from engine.kernels.triton.paged_decode import DecodeTiles, paged_attention_decode
from engine.kernels.triton.paged_prefill import PrefillTiles, paged_attention_prefill, plan_prefill
from engine.kernels.triton.rope_kv import rope_and_write_kv
from engine.kernels.triton.sampling import sample_rows
from engine.kernels.triton.sampling_rows import SamplingRows
from engine.kernels.triton.split_k import GemmTiles
from engine.kernels.triton.w4a16 import w4a16_linear
from engine.model.cuda.attention import decode_tiles

_FP8 = torch.float8_e4m3fn
_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
_CACHE_BYTES = 256 << 20
"""Inputs are rotated until they pass this: several times the second-level cache."""
DECODE_TILES = (
    DecodeTiles(),
    DecodeTiles(split_size=512),
    DecodeTiles(split_size=512, block_n=32),
    DecodeTiles(split_size=512, block_n=128, num_warps=8),
    DecodeTiles(split_size=512, num_stages=3),
)
PREFILL_TILES = (PrefillTiles(), PrefillTiles(64, 64, 4), PrefillTiles(128, 128, 8), PrefillTiles(128, 64, 8, 5))
INT4_TILES = (
    GemmTiles(16, 128, 16, split_k=1, num_stages=4),
    GemmTiles(16, 64, 16, split_k=1, num_warps=2, num_stages=4),
    GemmTiles(16, 64, 16, split_k=1, num_warps=4, num_stages=6),
    GemmTiles(16, 128, 16, split_k=1, num_warps=4, num_stages=6),
)


def measure_ceilings(bench: Bench) -> None:
    """Copy bandwidth and matrix rate of this device, on random data."""
    size = bench.size(1 << 30, 1 << 16)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    copy_s = bench.seconds([partial(target.copy_, source)])
    edge = bench.size(8192, 64)
    a, b = (bench.randn(edge, edge, dtype=bench.dtype) for _ in range(2))
    product_s = bench.seconds([partial(torch.matmul, a, b)])
    bench.emit(
        "ceilings",
        "ceilings",
        ok=True,
        copy_bytes_per_s=2 * size / copy_s,
        matmul_flop_per_s=2 * edge**3 / product_s,
    )


def time_attention(bench: Bench) -> None:
    """Decode attention at 64 x 4096 in each KV type and at fewer sequences, prefill of 2048 tokens."""
    for kv_dtype in (bench.dtype, _FP8, torch.int8):
        _time_decode(bench, 64, 4096, kv_dtype, DECODE_TILES)
    for num_seqs in (8, 1):
        _time_decode(bench, num_seqs, 4096, bench.dtype, (decode_tiles(num_seqs, is_batch_invariant=False),))
    rows = bench.size(2048, 40)
    inputs = AttentionInputs(bench, [(rows, rows)], bench.dtype)
    for tiles in PREFILL_TILES:
        _time_prefill(bench, inputs, rows, tiles)


def _time_decode(
    bench: Bench, num_seqs: int, context: int, kv_dtype: torch.dtype, candidates: tuple[DecodeTiles, ...]
) -> None:
    length, count = bench.size(context, 40), bench.size(num_seqs, 2)
    inputs = AttentionInputs(bench, [(1, length)] * count, kv_dtype)
    token_bytes = _HEAD_DIM * kv_dtype.itemsize + (0 if inputs.cache.scales is None else 4)
    num_bytes = count * length * 2 * _KV_HEADS * token_bytes
    baseline: list[Callable[[], object]] | None = None
    if kv_dtype is bench.dtype:
        query = bench.randn(count, _HEADS, 1, _HEAD_DIM, dtype=bench.dtype)
        key, value = (bench.randn(count, _KV_HEADS, length, _HEAD_DIM, dtype=bench.dtype) for _ in range(2))
        baseline = [partial(functional.scaled_dot_product_attention, query, key, value, enable_gqa=True)]
    for tiles in candidates:
        call = partial(
            paged_attention_decode,
            inputs.query,
            inputs.cache,
            inputs.query_start,
            inputs.context_lens,
            inputs.block_tables,
            max_rows=1,
            max_context_len=length,
            tiles=tiles,
            out=torch.empty_like(inputs.query),
        )
        name = f"decode attention {num_seqs} x {context} {kv_dtype}"
        bench.speed(name, [call], num_bytes=num_bytes, baseline=baseline, tiles=str(tiles))
        baseline = None  # once is enough


def _time_prefill(bench: Bench, inputs: AttentionInputs, rows: int, tiles: PrefillTiles) -> None:
    call = partial(
        paged_attention_prefill,
        inputs.query,
        inputs.cache,
        inputs.query_start,
        inputs.context_lens,
        inputs.block_tables,
        plan_prefill(inputs.starts, inputs.group, bench.device, tiles=tiles),
        out=torch.empty_like(inputs.query),
    )
    query, key, value = (bench.randn(1, n, rows, _HEAD_DIM, dtype=bench.dtype) for n in (_HEADS, _KV_HEADS, _KV_HEADS))
    bench.speed(
        "prefill attention 2048",
        [call],
        num_bytes=2.0 * rows * _HEAD_DIM * (2 * _HEADS + 2 * _KV_HEADS),
        flop=4.0 * _HEADS * _HEAD_DIM * rows * rows / 2,
        baseline=[partial(functional.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)],
        tiles=str(tiles),
    )


def time_products(bench: Bench) -> None:
    """Linear layers of the 8B shape: 4 bits for 1, 16 and 64 rows, 8 bits and fixed tiles for 1 and 2048."""
    for layer, (n, k) in {"qkv": (6144, 4096), "output": (4096, 4096), "down": (4096, 14336)}.items():
        _time_int4(bench, layer, bench.size(n, 96), bench.size(k, 128), (1,), ())
    n, k = bench.size(28672, 96), bench.size(4096, 128)
    _time_int4(bench, "gate_up", n, k, (1, 16, 64), INT4_TILES)
    for rows in (1, bench.size(2048, 70)):
        _time_bytes(bench, rows, n, k)


def _time_int4(
    bench: Bench, layer: str, n: int, k: int, row_counts: tuple[int, ...], candidates: tuple[GemmTiles, ...]
) -> None:
    copies = bench.size(max(1, -(-_CACHE_BYTES // (n * k // 2))), 1)
    weights = [packed_int4(int4_parts(bench, n, k, "zeros")) for _ in range(copies)]
    dense = [bench.randn(n, k, dtype=bench.dtype) for _ in range(-(-copies // 4))]
    num_bytes = n * k / 2 + (n * k / 128) * 3  # values, fp16 scales and 8-bit zeros
    for rows in row_counts:
        x = bench.randn(rows, k, dtype=bench.dtype)
        bench.speed(
            f"w4a16 {layer}, {rows} rows",
            [partial(w4a16_linear, x, weight) for weight in weights],
            num_bytes=num_bytes,
            baseline=[partial(functional.linear, x, weight) for weight in dense],
        )
    x = bench.randn(1, k, dtype=bench.dtype)
    for tiles in candidates:
        bench.speed(
            f"w4a16 {layer}, 1 row, other tiles",
            [partial(w4a16_linear, x, weight, tiles=tiles) for weight in weights],
            num_bytes=num_bytes,
            tiles=str(tiles),
        )


def _time_bytes(bench: Bench, rows: int, n: int, k: int) -> None:
    x, weight = bench.randn(rows, k, dtype=bench.dtype), bench.randn(n, k, dtype=bench.dtype)
    flop = 2.0 * rows * n * k
    baseline = [partial(functional.linear, x, weight)]
    bench.speed(
        f"invariant linear gate_up, {rows} rows",
        [partial(gemm.linear, x, weight)],
        num_bytes=2.0 * n * k,
        flop=flop,
        baseline=baseline,
    )
    for dtype, multiply in ((torch.int8, gemm.int8_linear), (_FP8, gemm.fp8_linear)):
        (xq, x_scales), (wq, w_scales) = (reference_quant.quantize_rows(tensor, dtype) for tensor in (x, weight))
        bench.speed(
            f"{dtype} linear gate_up, {rows} rows",
            [partial(multiply, xq, x_scales, wq, w_scales, out_dtype=bench.dtype)],
            num_bytes=float(n * k),
            flop=flop / 2,  # 8-bit products run at twice the rate of bf16 ones
            baseline=baseline,
        )


def time_rows(bench: Bench) -> None:
    """Row-wise kernels at 2048 rows, copies of KV, and sampling of 64 rows."""
    rows, hidden, inner = bench.size(2048, 4), bench.size(4096, 64), bench.size(14336, 96)
    x, residual = bench.randn(rows, hidden, dtype=bench.dtype), bench.randn(rows, hidden, dtype=torch.float32)
    weight = bench.randn(hidden)
    bench.speed(
        "add_rms_norm 2048",
        [partial(norms.add_rms_norm, x, residual, weight, 1e-5, out_dtype=bench.dtype)],
        num_bytes=rows * hidden * (2 + 4 + 4 + 2),
        baseline=[lambda: reference.rms_norm(residual + x, weight, 1e-5).to(bench.dtype)],
    )
    gate_up = bench.randn(rows, 2 * inner, dtype=bench.dtype)
    bench.speed(
        "silu_mul 2048",
        [partial(activation.silu_mul, gate_up)],
        num_bytes=rows * inner * 6,
        baseline=[lambda: functional.silu(gate_up[:, :inner]) * gate_up[:, inner:]],
    )
    _time_kv_moves(bench, rows)
    num_rows, vocab_size = bench.size(64, 8), bench.size(128256, 2100)
    logits = bench.randn(num_rows, vocab_size, dtype=torch.float32, scale=3.0)
    params = SamplingRows.build(sampling_rows(num_rows, vocab_size), vocab_size, bench.device)
    bench.speed(
        "sample_rows 64 x 128256, mixed fields",
        [partial(sample_rows, logits, params)],
        num_bytes=num_rows * vocab_size * 4,
        baseline=[partial(_sorted_sample, logits)],
    )


def _time_kv_moves(bench: Bench, rows: int) -> None:
    inputs = AttentionInputs(bench, [(1, rows)], bench.dtype)
    qkv = bench.randn(rows, (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM, dtype=bench.dtype)
    angles = bench.randn(rows, _HEAD_DIM // 2, dtype=torch.float32)
    slots, count = torch.arange(rows, device=bench.device), torch.tensor([rows], dtype=torch.int32, device=bench.device)
    bench.speed(
        "rope_and_write_kv 2048",
        [partial(rope_and_write_kv, qkv, angles.cos(), angles.sin(), inputs.cache, slots, count)],
        num_bytes=2.0 * qkv.numel() * 2,
    )
    staged = LayerCache(torch.empty_like(inputs.cache.elements), None)
    order = torch.randperm(rows, device=bench.device)
    bench.speed(
        "copy_kv 2048 tokens, scattered",
        [partial(copy_kv, inputs.cache, order, staged, slots)],
        num_bytes=2.0 * rows * 2 * _KV_HEADS * _HEAD_DIM * 2,
    )


def _sorted_sample(logits: Tensor) -> Tensor:
    """Top-p sampling the usual way: sort, cumulate, draw."""
    shares, ids = torch.softmax(logits, -1).sort(-1, descending=True)
    kept = shares.masked_fill(shares.cumsum(-1) - shares > 0.9, 0.0)
    noisy = kept / torch.empty_like(kept).exponential_()
    return ids.gather(-1, noisy.argmax(-1, keepdim=True))
