"""Group-quantized 4-bit weights in the one form that the kernels read, and making it from GGUF, AWQ and GPTQ.

    weight[n, k] = scales[k // group, n] * (q[n, k] - zeros[k // group, n])        q in 0 .. 15
                or scales[k // group, n] * q[n, k] + mins[k // group, n]           GGUF Q4_1

K is cut into chunks of 128 values, all rows of a chunk together. A 16-bit word holds one value from each quarter of the
chunk, its planes:

    packed[chunk, n, j] = q[n, k] | q[n, k + 32] << 4 | q[n, k + 64] << 8 | q[n, k + 96] << 12       k = 128 * chunk + j

so a tile of any rows is one run of memory, and each plane is 32 neighbours of K, in order and within one group: no
value has to change places, and two values at a time are taken from a register of two words. Nothing here runs on the
device or knows a file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.triton.launch import check

CHUNK = 128
"""Values of K in a chunk."""
PLANE = 32
"""Values of K in a plane of a chunk."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of a word in which AWQ keeps each of eight neighbours: 0, 2, 4, 6, 1, 3, 5, 7 from the lowest nibble up."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """One weight matrix [out_features, in_features]."""

    packed: Tensor
    """[num_chunks, out_features, 32] int16; in_features is padded to whole chunks, whose input is taken as 0."""
    scales: Tensor
    """[num_groups, out_features] fp16, bf16 or fp32."""
    zeros: Tensor | None
    """[num_groups, out_features] int8; None = 8 everywhere, unless there are `mins`."""
    mins: Tensor | None
    """[num_groups, out_features] in the dtype of the scales; None = weights have zeros instead."""
    in_features: int
    group: int
    """Values of K that share a scale: 32, 64, 128 or another multiple of 128."""
    permutation: Tensor | None = None
    """[in_features] int64: column k of this matrix belongs to input channel permutation[k] (GPTQ's act-order)."""

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.packed.shape[1]

    def to(self, device: torch.device) -> "Int4Weight":
        """The same weight on a device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Int4Weight(
            self.packed.to(device),
            self.scales.to(device),
            moved(self.zeros),
            moved(self.mins),
            self.in_features,
            self.group,
            moved(self.permutation),
        )


def pack_int4(
    values: Tensor,
    scales: Tensor,
    *,
    zeros: Tensor | None = None,
    mins: Tensor | None = None,
    permutation: Tensor | None = None,
) -> Int4Weight:
    """Pack quantized values.

    Args:
        values: [out_features, in_features] uint8, 0 to 15.
        scales: [num_groups, out_features] of a floating dtype.
        zeros: [num_groups, out_features], 0 to 16; None = 8.
        mins: [num_groups, out_features]; instead of `zeros`.
        permutation: See `Int4Weight.permutation`.

    Raises:
        ValueError: The shapes do not fit, or the groups have a size that the kernels do not read.
    """
    out_features, in_features = values.shape
    num_groups = scales.shape[0]
    check(in_features % num_groups == 0, f"{in_features} values are no whole groups, of which there are {num_groups}")
    group = in_features // num_groups
    check(group in (32, 64) or group % CHUNK == 0, f"groups of {group} values; they must have 32, 64 or 128 * n")
    for name, tensor in (("scales", scales), ("zeros", zeros), ("mins", mins)):
        check(tensor is None or tensor.shape == (num_groups, out_features), f"{name} do not fit the groups")
    check(zeros is None or mins is None, "a weight has zeros or mins, not both")
    padded = torch.nn.functional.pad(values.to(torch.int32), (0, -in_features % CHUNK))
    planes = padded.view(out_features, -1, CHUNK // PLANE, PLANE) << torch.tensor([0, 4, 8, 12])[:, None].to(
        values.device
    )
    packed = planes.sum(2).to(torch.int16).transpose(0, 1).contiguous()
    return Int4Weight(
        packed,
        scales.contiguous(),
        None if zeros is None else zeros.to(torch.int8).contiguous(),
        None if mins is None else mins.to(scales.dtype).contiguous(),
        in_features,
        group,
        permutation,
    )


def from_gguf_q4_0(blocks: Tensor) -> Int4Weight:
    """Weights of GGUF type Q4_0: blocks of 32 values, `d * (q - 8)`.

    Args:
        blocks: [out_features, in_features / 32, 18] uint8: d as fp16, then 16 bytes of low (0-15) and high (16-31)
            nibbles.
    """
    check(blocks.dtype is torch.uint8 and blocks.dim() == 3 and blocks.shape[2] == 18, "blocks of Q4_0 have 18 bytes")
    return pack_int4(_gguf_values(blocks[:, :, 2:]), _gguf_halves(blocks[:, :, 0:2]))


def from_gguf_q4_1(blocks: Tensor) -> Int4Weight:
    """Weights of GGUF type Q4_1: blocks of 32 values, `d * q + m`.

    Args:
        blocks: [out_features, in_features / 32, 20] uint8: d and m as fp16, then 16 bytes as in Q4_0.
    """
    check(blocks.dtype is torch.uint8 and blocks.dim() == 3 and blocks.shape[2] == 20, "blocks of Q4_1 have 20 bytes")
    return pack_int4(
        _gguf_values(blocks[:, :, 4:]), _gguf_halves(blocks[:, :, 0:2]), mins=_gguf_halves(blocks[:, :, 2:4])
    )


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Int4Weight:
    """Weights as AWQ checkpoints have them.

    Args:
        qweight: [in_features, out_features / 8] int32, eight neighbours along out_features in a word, out of order.
        qzeros: [num_groups, out_features / 8] int32, likewise.
        scales: [num_groups, out_features].
    """
    shifts = torch.tensor([4 * nibble for nibble in _AWQ_ORDER], device=qweight.device)
    values = (qweight[:, :, None] >> shifts & 15).flatten(1)
    zeros = (qzeros[:, :, None] >> shifts & 15).flatten(1)
    return pack_int4(values.T.to(torch.uint8), scales, zeros=zeros)


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, adds_one: bool = True
) -> Int4Weight:
    """Weights as GPTQ checkpoints have them.

    Args:
        qweight: [in_features / 8, out_features] int32, eight neighbours along in_features in a word, lowest first.
        qzeros: [num_groups, out_features / 8] int32, lowest first.
        scales: [num_groups, out_features].
        g_idx: [in_features], the group of each input channel. With act-order these are not in sequence; the columns
            are then sorted by group, and inputs must be sorted alike, which `Int4Weight.permutation` says.
        adds_one: Whether stored zeros are one too small (format version 1).

    Raises:
        ValueError: Groups have different sizes.
    """
    shifts = 4 * torch.arange(8, device=qweight.device)
    values = (qweight[:, None, :] >> shifts[:, None] & 15).flatten(0, 1).T.to(torch.uint8)
    zeros = (qzeros[:, :, None] >> shifts & 15).flatten(1) + int(adds_one)
    permutation = None
    if g_idx is not None:
        group = values.shape[1] // scales.shape[0]
        in_sequence = torch.arange(values.shape[1], device=g_idx.device) // group
        if not torch.equal(g_idx.long(), in_sequence):
            permutation = torch.argsort(g_idx.long(), stable=True)
            check(torch.equal(g_idx.long()[permutation], in_sequence), "groups of different sizes are not supported")
            values = values[:, permutation]
    return pack_int4(values.contiguous(), scales, zeros=zeros, permutation=permutation)


def _gguf_values(nibbles: Tensor) -> Tensor:
    """[rows, blocks, 16] -> [rows, blocks * 32]."""
    return torch.cat([nibbles & 15, nibbles >> 4], dim=2).flatten(1)


def _gguf_halves(raw: Tensor) -> Tensor:
    """[rows, blocks, 2] bytes -> [blocks, rows] fp16."""
    return raw.contiguous().view(torch.float16).squeeze(-1).T
