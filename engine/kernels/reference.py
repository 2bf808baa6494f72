"""Every operation of a model step in plain PyTorch: the oracles for all faster kernels. Written for reading, not speed.

Holds no state and no weights. The names are those of `interface.Kernels`; each takes its geometry as plain arguments.
"""

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: [num_rows, in_features].
        weight: [out_features, in_features].
        bias: [out_features] or None.
    """
    product = x @ weight.T
    return product if bias is None else product + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product (arXiv 2002.05202): [num_rows, 2 * n] -> [num_rows, n], `silu(first half) * second half`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def rope(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves layout: element i turns with element i + head_dim / 2.

    Args:
        heads: [num_rows, heads, head_dim].
        cos: [num_rows, head_dim / 2], cosine of position * inverse frequency.
        sin: [num_rows, head_dim / 2].
    """
    first, second = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def write_kv(kv: Tensor, layer_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write K and V of each token into its slot, rounded to the cache dtype.

    Args:
        kv: [num_tokens, 2, num_kv_heads, head_dim].
        layer_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], changed in place.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset.
    """
    block_size = layer_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        layer_cache[slot // block_size, :, :, slot % block_size] = kv[token].to(layer_cache.dtype)


def paged_attention(
    query: Tensor,
    layer_cache: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    sliding_window: int | None = None,
) -> Tensor:
    """Causal attention of each sequence's rows over its own blocks.

        row i of a sequence with n rows has position p = context_len - n + i
        and sees the keys at max(0, p - sliding_window + 1) .. p

    Several query heads share a KV head: head h reads KV head h // (num_heads / num_kv_heads).

    Args:
        query: [num_tokens, num_heads, head_dim].
        layer_cache: [num_blocks, 2, num_kv_heads, block_size, head_dim], the step's own tokens included.
        query_start: [num_seqs + 1], half-open row ranges.
        context_lens: [num_seqs].
        block_tables: [num_seqs, max_blocks].
        sliding_window: Tokens a position looks back at, itself included; None = all.

    Returns:
        [num_tokens, num_heads, head_dim] fp32.
    """
    num_kv_heads, block_size, head_dim = layer_cache.shape[2:]
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    for seq, context_len in enumerate(context_lens.tolist()):
        first_row, end_row = int(query_start[seq]), int(query_start[seq + 1])
        num_blocks = -(-context_len // block_size)
        blocks = layer_cache[block_tables[seq, :num_blocks].long()].float()
        tokens = blocks.permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)[:, :, :context_len]
        keys, values = tokens.repeat_interleave(query.shape[1] // num_kv_heads, dim=1)  # [num_heads, context, dim]
        rows = query[first_row:end_row].float().transpose(0, 1)  # [num_heads, rows, dim]
        positions = torch.arange(context_len - (end_row - first_row), context_len, device=query.device)[:, None]
        key_positions = torch.arange(context_len, device=query.device)[None]
        is_visible = key_positions <= positions
        if sliding_window is not None:
            is_visible &= key_positions > positions - sliding_window
        scores = rows @ keys.transpose(1, 2) * head_dim**-0.5
        weights = torch.softmax(scores.masked_fill(~is_visible, -torch.inf), dim=-1)
        out[first_row:end_row] = (weights @ values).transpose(0, 1)
    return out
