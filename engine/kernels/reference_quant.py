"""Oracles for kernels on quantized data, in plain PyTorch: KV caches, 4-bit and 8-bit weights. Written for reading.

Holds no state. The names are those of the launchers in `engine/kernels/triton`; `reference.py` has the rest.
"""

import torch
from torch import Tensor

from engine.kernels import reference

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric quantization of each row: its largest magnitude becomes the type's largest value.

        scale = max(|row|) / 127 (int8) or / 448 (fp8 e4m3)        element = round(x / scale)

    Args:
        x: [..., n] of any floating dtype.
        dtype: int8 or float8_e4m3fn.

    Returns:
        Elements [..., n] of `dtype` and scales [...] fp32; a row of zeros has scale 0.
    """
    values = x.float()
    scales = values.abs().amax(-1, keepdim=True) / _LARGEST[dtype]
    scaled = values / torch.where(scales > 0, scales, 1.0)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales.squeeze(-1)


def dequantize(elements: Tensor, scales: Tensor | None) -> Tensor:
    """Elements [..., n] times scales [...], fp32; None = 1."""
    return elements.float() if scales is None else elements.float() * scales.unsqueeze(-1)


def write_kv(kv: Tensor, elements: Tensor, scales: Tensor | None, slot_mapping: Tensor) -> None:
    """Write K and V of each token into its slot, rounded to the cache dtype or quantized per (K or V, head, token).

    Args:
        kv: [num_tokens, 2, num_kv_heads, head_dim].
        elements: [num_blocks, 2, num_kv_heads, block_size, head_dim], changed in place.
        scales: [num_blocks, 2, num_kv_heads, block_size] fp32, changed in place; None for floating caches.
        slot_mapping: [num_tokens], block_id * block_size + offset.
    """
    block_size = elements.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        place = slot // block_size, slice(None), slice(None), slot % block_size
        if scales is None:
            elements[place] = kv[token].to(elements.dtype)
        else:
            elements[place], scales[place] = quantize_rows(kv[token], elements.dtype)


def paged_attention(
    query: Tensor,
    elements: Tensor,
    scales: Tensor | None,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """`reference.paged_attention` over a cache that may be quantized, with capped scores, in fp64.

        scores = q . k / sqrt(head_dim)        with a soft cap: soft_cap * tanh(scores / soft_cap)

    Args:
        query: [num_rows, num_heads, head_dim].
        elements: [num_blocks, 2, num_kv_heads, block_size, head_dim], the step's own tokens included.
        scales: [num_blocks, 2, num_kv_heads, block_size] or None.
        query_start: [num_seqs + 1], half-open row ranges.
        context_lens: [num_seqs]; 0 = a padding sequence, whose rows are 0.
        block_tables: [num_seqs, max_blocks].
        sliding_window: Tokens a position looks back at, itself included; None = all.
        soft_cap: Bound of the scores; None = none.

    Returns:
        [num_rows, num_heads, head_dim] fp64; rows that belong to no sequence are 0.
    """
    num_kv_heads, block_size, head_dim = elements.shape[2:]
    cache = dequantize(elements, scales)
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for seq, context_len in enumerate(context_lens.tolist()):
        first_row, end_row = int(query_start[seq]), int(query_start[seq + 1])
        if context_len == 0 or first_row == end_row:
            continue
        blocks = cache[block_tables[seq, : -(-context_len // block_size)].long()].double()
        tokens = blocks.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :context_len]
        keys, values = tokens.repeat_interleave(query.shape[1] // num_kv_heads, dim=1)  # [num_heads, context, dim]
        rows = query[first_row:end_row].double().transpose(0, 1)  # [num_heads, rows, dim]
        positions = torch.arange(context_len - (end_row - first_row), context_len, device=query.device)[:, None]
        key_positions = torch.arange(context_len, device=query.device)[None]
        is_visible = key_positions <= positions
        if sliding_window is not None:
            is_visible &= key_positions > positions - sliding_window
        scores = rows @ keys.transpose(1, 2) * head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = torch.softmax(scores.masked_fill(~is_visible, -torch.inf), dim=-1)
        out[first_row:end_row] = (weights @ values).transpose(0, 1)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of the residual stream after `x` is added to it.

    Args:
        x: [num_rows, n].
        residual: [num_rows, n], changed in place; its dtype is what the sum is rounded to.
        weight: [n].
        eps: Added to the mean square.

    Returns:
        [num_rows, n] fp64.
    """
    residual.copy_(residual.float() + x.float())
    return reference.rms_norm(residual.double(), weight.double(), eps)


def silu_mul_quantize(gate_up: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantize_rows` of `reference.silu_mul`."""
    return quantize_rows(reference.silu_mul(gate_up.float()), dtype)


def rope_and_write_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    elements: Tensor,
    scales: Tensor | None,
    slot_mapping: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Norm (if there are weights) and rotate query and key heads, write K and V, and return the queries.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads.
        cos: [num_tokens, head_dim / 2].
        sin: [num_tokens, head_dim / 2].
        elements: As in `write_kv`, changed in place.
        scales: As in `write_kv`.
        slot_mapping: [num_tokens].
        q_norm: [head_dim] or None.
        k_norm: [head_dim] or None.
        eps: Of the norms.

    Returns:
        [num_tokens, num_heads, head_dim] fp32.
    """
    num_kv_heads, _, head_dim = elements.shape[2:]
    heads = qkv.float().view(qkv.shape[0], -1, head_dim)
    query, key, value = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = reference.rms_norm(query, q_norm, eps), reference.rms_norm(key, k_norm, eps)
    query, key = reference.rope(query, cos, sin), reference.rope(key, cos, sin)
    write_kv(torch.stack([key, value], dim=1), elements, scales, slot_mapping)
    return query


def int8_linear(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`(x * x_scales) @ (weight * weight_scales).T + bias` in fp64.

    Args:
        x: [num_rows, in_features] int8.
        x_scales: [num_rows].
        weight: [out_features, in_features] int8.
        weight_scales: [out_features].
        bias: [out_features] or None.
    """
    rows, columns = x.double() * x_scales.double()[:, None], weight.double() * weight_scales.double()[:, None]
    return reference.linear(rows, columns, None if bias is None else bias.double())


fp8_linear = int8_linear
"""The same formula; only the element type differs."""


def dequantize_int4(values: Tensor, scales: Tensor, zeros: Tensor | None = None, mins: Tensor | None = None) -> Tensor:
    """4-bit group quantization: `scale * (q - zero)`, or `scale * q + min` where there are mins.

    Args:
        values: [out_features, in_features] integers from 0 to 15.
        scales: [num_groups, out_features]; a group is in_features / num_groups neighbours.
        zeros: [num_groups, out_features]; None = 8.
        mins: [num_groups, out_features]; instead of zeros.

    Returns:
        [out_features, in_features] fp64.
    """
    group = values.shape[1] // scales.shape[0]

    def spread(factors: Tensor) -> Tensor:
        return factors.double().T.repeat_interleave(group, dim=1)

    if mins is not None:
        return values.double() * spread(scales) + spread(mins)
    return (values.double() - (8.0 if zeros is None else spread(zeros))) * spread(scales)


def w4a16_linear(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    mins: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x @ dequantize_int4(...).T + bias` in fp64.

    Args:
        x: [num_rows, in_features].
        values: As in `dequantize_int4`, like the rest.
        scales: [num_groups, out_features].
        zeros: [num_groups, out_features] or None.
        mins: [num_groups, out_features] or None.
        bias: [out_features] or None.
    """
    weight = dequantize_int4(values, scales, zeros, mins)
    return reference.linear(x.double(), weight, None if bias is None else bias.double())


def copy_kv(
    source: Tensor,
    source_scales: Tensor | None,
    source_slots: Tensor,
    target: Tensor,
    target_scales: Tensor | None,
    target_slots: Tensor,
) -> None:
    """Copy tokens between caches, converted to the target's type; equal types keep their bits.

    Args:
        source: [num_blocks, 2, num_kv_heads, block_size, head_dim].
        source_scales: [num_blocks, 2, num_kv_heads, block_size] or None.
        source_slots: [num_tokens].
        target: As the source with a block size and type of its own, changed in place.
        target_scales: As for the source, changed in place.
        target_slots: [num_tokens].
    """
    for source_slot, target_slot in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
        read = source_slot // source.shape[3], slice(None), slice(None), source_slot % source.shape[3]
        written = target_slot // target.shape[3], slice(None), slice(None), target_slot % target.shape[3]
        if source.dtype is target.dtype:
            target[written] = source[read]
            if target_scales is not None and source_scales is not None:
                target_scales[written] = source_scales[read]
            continue
        values = dequantize(source[read], None if source_scales is None else source_scales[read])
        if target_scales is None:
            target[written] = values.to(target.dtype)
        else:
            target[written], target_scales[written] = quantize_rows(values, target.dtype)
