"""Launches as a Llama-3-8B-shaped model makes them, with tensors that have shapes but no memory."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.triton.activation import silu_mul, silu_mul_quantize
from engine.kernels.triton.gemm import fp8_linear, int8_linear, linear, quantize_rows
from engine.kernels.triton.int4_weight import Int4Weight
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache, block_bytes
from engine.kernels.triton.norms import add_rms_norm, add_rms_norm_quantize, rms_norm
from engine.kernels.triton.paged_decode import DecodeTiles, paged_attention_decode
from engine.kernels.triton.paged_prefill import paged_attention_prefill, plan_prefill
from engine.kernels.triton.rope_kv import rope_and_write_kv
from engine.kernels.triton.sampling import sample_rows
from engine.kernels.triton.sampling_rows import SamplingRow, SamplingRows
from engine.kernels.triton.w4a16 import dequantize_int4, w4a16_linear
from engine.types import SamplingParams

HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
_FP8_CAPABILITY = 89


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a launcher."""

    call: Callable[[], object]
    least_capability: int = 80


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def cache(dtype: torch.dtype, head_dim: int = HEAD_DIM, num_kv_heads: int = KV_HEADS) -> LayerCache:
    rows = empty(1000, block_bytes(num_kv_heads, BLOCK_SIZE, head_dim, dtype), dtype=torch.uint8)
    return LayerCache.from_bytes(rows, num_kv_heads, BLOCK_SIZE, head_dim, dtype)


def decode(
    dtype: torch.dtype, kv_dtype: torch.dtype, *, rows: int = 1, window: int | None = None, cap: float | None = None
) -> None:
    paged_attention_decode(
        empty(64 * rows, HEADS, HEAD_DIM, dtype=dtype),
        cache(kv_dtype),
        empty(65, dtype=torch.int32),
        empty(64, dtype=torch.int32),
        empty(64, 512, dtype=torch.int32),
        max_rows=rows,
        max_context_len=8192,
        sliding_window=window,
        soft_cap=cap,
        tiles=DecodeTiles(),
    )


def prefill(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    window: int | None = None,
    cap: float | None = None,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> None:
    starts = torch.tensor([0, 2048], dtype=torch.int32)
    paged_attention_prefill(
        empty(2048, heads, head_dim, dtype=dtype),
        cache(kv_dtype, head_dim, kv_heads),
        empty(2, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(1, 512, dtype=torch.int32),
        plan_prefill(starts, heads // kv_heads, torch.device("meta")),
        sliding_window=window,
        soft_cap=cap,
    )


def write(dtype: torch.dtype, kv_dtype: torch.dtype, *, has_norms: bool = False) -> None:
    norm = empty(HEAD_DIM, dtype=torch.float32) if has_norms else None
    rope_and_write_kv(
        empty(64, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype),
        empty(64, HEAD_DIM // 2, dtype=torch.float32),
        empty(64, HEAD_DIM // 2, dtype=torch.float32),
        cache(kv_dtype),
        empty(64, dtype=torch.int64),
        empty(1, dtype=torch.int32),
        q_norm=norm,
        k_norm=norm,
    )


def scaled(dtype: torch.dtype, num_rows: int) -> None:
    multiply = int8_linear if dtype is torch.int8 else fp8_linear
    multiply(
        empty(num_rows, HIDDEN, dtype=dtype),
        empty(num_rows, dtype=torch.float32),
        empty(INTERMEDIATE, HIDDEN, dtype=dtype),
        empty(INTERMEDIATE, dtype=torch.float32),
        out_dtype=torch.bfloat16,
    )


def int4_weight(group: int, *, has_zeros: bool = False, has_mins: bool = False, out_features: int = 6144) -> Int4Weight:
    groups = HIDDEN // group
    return Int4Weight(
        empty(HIDDEN // 128, out_features, 32, dtype=torch.int16),
        empty(groups, out_features, dtype=torch.float16),
        empty(groups, out_features, dtype=torch.int8) if has_zeros else None,
        empty(groups, out_features, dtype=torch.float16) if has_mins else None,
        HIDDEN,
        group,
    )


def norm(*, is_quantized: bool) -> None:
    x, residual = empty(64, HIDDEN), empty(64, HIDDEN, dtype=torch.float32)
    if is_quantized:
        add_rms_norm_quantize(x, residual, empty(HIDDEN), 1e-5, torch.float8_e4m3fn)
    else:
        add_rms_norm(x, residual, empty(HIDDEN), 1e-5, out_dtype=torch.bfloat16)


def move(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    slots = empty(512, dtype=torch.int64)
    copy_kv(cache(source_dtype), slots, cache(target_dtype), slots)


def sample(*, is_restricted: bool) -> None:
    restricted = SamplingParams(allowed_token_ids=frozenset({1, 2}), repetition_penalty=1.1)
    row = SamplingRow(restricted if is_restricted else SamplingParams(), (1, 2, 3), 2, frozenset())
    sample_rows(empty(8, VOCAB, dtype=torch.float32), SamplingRows.build([row] * 8, VOCAB, torch.device("meta")))


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT8, FP8 = torch.int8, torch.float8_e4m3fn

LAUNCHES = {
    "decode-bf16": Launch(lambda: decode(BF16, BF16)),
    "decode-bf16-drafts-window": Launch(lambda: decode(BF16, BF16, rows=5, window=4096)),
    "decode-bf16-int8": Launch(lambda: decode(BF16, INT8)),
    "decode-bf16-fp8": Launch(lambda: decode(BF16, FP8), _FP8_CAPABILITY),
    "decode-fp16-int8-cap": Launch(lambda: decode(FP16, INT8, cap=50.0)),
    "decode-fp32": Launch(lambda: decode(FP32, FP32)),
    "prefill-bf16": Launch(lambda: prefill(BF16, BF16)),
    "prefill-bf16-window": Launch(lambda: prefill(BF16, BF16, window=4096)),
    "prefill-bf16-int8": Launch(lambda: prefill(BF16, INT8)),
    "prefill-bf16-fp8": Launch(lambda: prefill(BF16, FP8), _FP8_CAPABILITY),
    "prefill-fp16-cap-odd-heads": Launch(lambda: prefill(FP16, FP16, cap=50.0, heads=9, kv_heads=3, head_dim=80)),
    "write-bf16": Launch(lambda: write(BF16, BF16)),
    "write-bf16-int8-norms": Launch(lambda: write(BF16, INT8, has_norms=True)),
    "write-bf16-fp8": Launch(lambda: write(BF16, FP8), _FP8_CAPABILITY),
    "linear-bf16": Launch(lambda: linear(empty(64, HIDDEN), empty(6144, HIDDEN))),
    "linear-fp32": Launch(lambda: linear(empty(64, HIDDEN, dtype=FP32), empty(6144, HIDDEN, dtype=FP32))),
    "int8-one-row": Launch(lambda: scaled(INT8, 1)),
    "int8-many-rows": Launch(lambda: scaled(INT8, 2048)),
    "fp8-one-row": Launch(lambda: scaled(FP8, 1), _FP8_CAPABILITY),
    "fp8-many-rows": Launch(lambda: scaled(FP8, 2048), _FP8_CAPABILITY),
    "quantize-int8": Launch(lambda: quantize_rows(empty(64, HIDDEN), INT8)),
    "quantize-fp8": Launch(lambda: quantize_rows(empty(64, HIDDEN), FP8), _FP8_CAPABILITY),
    "w4a16-bf16-gguf": Launch(lambda: w4a16_linear(empty(1, HIDDEN), int4_weight(32, has_mins=True))),
    "w4a16-bf16-awq": Launch(lambda: w4a16_linear(empty(1, HIDDEN), int4_weight(128, has_zeros=True))),
    "w4a16-fp16-symmetric": Launch(lambda: w4a16_linear(empty(8, HIDDEN, dtype=FP16), int4_weight(64))),
    "w4a16-bf16-64-rows": Launch(lambda: w4a16_linear(empty(64, HIDDEN), int4_weight(128, has_zeros=True))),
    "w4a16-bf16-dequantize": Launch(lambda: dequantize_int4(int4_weight(128, has_zeros=True), BF16)),
    "move-bf16": Launch(lambda: move(BF16, BF16)),
    "move-bf16-int8": Launch(lambda: move(BF16, INT8)),
    "move-fp8-bf16": Launch(lambda: move(FP8, BF16), _FP8_CAPABILITY),
    "sample": Launch(lambda: sample(is_restricted=False)),
    "sample-restricted": Launch(lambda: sample(is_restricted=True)),
    "norm-bf16": Launch(lambda: rms_norm(empty(64, HIDDEN), empty(HIDDEN), 1e-5)),
    "norm-bf16-add": Launch(lambda: norm(is_quantized=False)),
    "norm-bf16-add-fp8": Launch(lambda: norm(is_quantized=True), _FP8_CAPABILITY),
    "silu-bf16": Launch(lambda: silu_mul(empty(64, 2 * INTERMEDIATE))),
    "silu-bf16-int8": Launch(lambda: silu_mul_quantize(empty(64, 2 * INTERMEDIATE), INT8)),
    "silu-bf16-fp8": Launch(lambda: silu_mul_quantize(empty(64, 2 * INTERMEDIATE), FP8), _FP8_CAPABILITY),
}
