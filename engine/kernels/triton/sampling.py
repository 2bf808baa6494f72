"""Sampling on the device, token for token what `engine/sampling/sampler.py` does on the CPU.

    logits → edits (bias, bans, penalties) → temperature → top_k → top_p → min_p → argmax of weight + Gumbel noise

Noise is Philox4x32-10 with counter (token id, position, 0, 0) and the seed as key: u = (word + 0.5) / 2 ** 32, noise =
-log(-log(u)). Everything that decides a comparison is fp32 or fp64 as on the CPU, so tokens differ only where two sums
of fp64 exponentials do in their last bits.

No sort. The tokens that top_k, top_p and min_p leave are the first ones in one order, larger weights first, equal ones
by token id. So the winner among all tokens is also the winner among those left if it is one of them: its rank and the
probability before it tell. If it is not, no token behind it is left either, and the search goes on among those before
it. Two launches: one finds winners in chunks of the vocabulary, many programs a row; one puts them together and, for
rows with filters, checks and searches on.

The oracle is `reference_sampling.sample_rows`; the rows' parameters come from `sampling_rows.py`.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.launch import cdiv, check, check_tensor, jit, next_power_of_2
from engine.kernels.triton.sampling_rows import BANNED, SEEN, SamplingRows
from engine.kernels.triton.sampling_search import (
    first_of_chunks,
    gumbel_noise,
    is_within,
    kth_best,
    mass,
    search,
    weights_of,
)

_CHUNK = 2048
_TILE = 4096
_EDITS_TILE = 256
_BANNED, _SEEN = tl.constexpr(BANNED), tl.constexpr(SEEN)
_NO_LIMIT = tl.constexpr(0x7FFFFFFF)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens of a step's rows, still on the device."""

    token_ids: Tensor
    """[num_rows] int64."""
    is_valid: Tensor
    """[num_rows] bool; False = the row allows no token or holds NaN, and its token means nothing."""


def sample_rows(logits: Tensor, rows: SamplingRows) -> SampledTokens:
    """Sample one token a row.

    Args:
        logits: [num_rows, vocab_size] fp32; changed in place where a row has edits.
        rows: The rows' parameters.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    check_tensor("logits", logits, (rows.temperature.shape[0], None), (torch.float32,))
    check(
        rows.allowed is None or rows.allowed.shape == (num_rows, cdiv(vocab_size, 32)), "the mask is for other logits"
    )
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    is_valid = torch.empty(num_rows, dtype=torch.bool, device=device)
    if num_rows == 0:
        return SampledTokens(token_ids, is_valid)
    if rows.edits is not None:
        edits = rows.edits
        _edit_logits[(num_rows,)](
            logits,
            edits.start,
            edits.token_ids,
            edits.biases,
            edits.subtracted,
            edits.flags,
            edits.repetition,
            vocab_size,
            TILE=_EDITS_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    allowed = logits if rows.allowed is None else rows.allowed
    num_chunks = cdiv(vocab_size, _CHUNK)
    best = torch.empty(2, num_rows, num_chunks, dtype=torch.float64, device=device)  # weights, noisy weights
    best_ids = torch.empty(2, num_rows, num_chunks, dtype=torch.int32, device=device)
    _best_of_chunks[(num_rows, num_chunks)](
        logits,
        allowed,
        rows.temperature,
        rows.seeds,
        rows.positions,
        best,
        best_ids,
        vocab_size,
        HAS_MASK=rows.allowed is not None,
        CHUNK=_CHUNK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    _choose[(num_rows,)](
        logits,
        allowed,
        rows.temperature,
        rows.top_k,
        rows.top_p,
        rows.log_min_p,
        rows.seeds,
        rows.positions,
        best,
        best_ids,
        token_ids,
        is_valid,
        vocab_size,
        num_chunks,
        HAS_MASK=rows.allowed is not None,
        BLOCK_CHUNKS=next_power_of_2(num_chunks),
        TILE=min(_TILE, next_power_of_2(vocab_size)),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return SampledTokens(token_ids, is_valid)


@jit
def _edit_logits(
    logits_ptr: tl.tensor,
    start_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    biases_ptr: tl.tensor,
    subtracted_ptr: tl.tensor,
    flags_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    vocab_size: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """The edits of row program_id(0). Launched without fused multiply-adds, which the CPU path has not."""
    row = tl.program_id(0)
    end = tl.load(start_ptr + row + 1)
    repetition = tl.load(repetition_ptr + row)
    for first in range(tl.load(start_ptr + row), end, TILE):
        edits = first + tl.arange(0, TILE)
        is_edit = edits < end
        ids = tl.load(token_ids_ptr + edits, mask=is_edit, other=0)
        flags = tl.load(flags_ptr + edits, mask=is_edit, other=0)
        places = logits_ptr + row.to(tl.int64) * vocab_size + ids
        value = tl.load(places, mask=is_edit, other=0.0) + tl.load(biases_ptr + edits, mask=is_edit, other=0.0)
        value = tl.where((flags & _BANNED) != 0, float("-inf"), value)
        penalized = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        value = tl.where((flags & _SEEN) != 0, penalized, value)
        value -= tl.load(subtracted_ptr + edits, mask=is_edit, other=0.0)
        tl.store(places, value, mask=is_edit)


@jit
def _best_of_chunks(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    vocab_size: tl.tensor,
    HAS_MASK: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Largest weight and largest noisy weight of chunk program_id(1) of row program_id(0), with their token ids."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    weights = weights_of(logits_ptr, allowed_ptr, row, ids, vocab_size, temperature, HAS_MASK)
    place = row * tl.num_programs(1) + chunk
    size = tl.num_programs(0) * tl.num_programs(1)
    largest, index = tl.max(weights, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + place, largest.to(tl.float64))
    tl.store(best_ids_ptr + place, chunk * CHUNK + index)
    if temperature > 0:
        noise = gumbel_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), ids)
        noisy = weights.to(tl.float64) + noise
        largest_noisy, index = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_ptr + size + place, largest_noisy)
        tl.store(best_ids_ptr + size + place, chunk * CHUNK + index)


@jit
def _choose(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    log_min_p_ptr: tl.tensor,
    seeds_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    best_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    is_valid_ptr: tl.tensor,
    vocab_size: tl.tensor,
    num_chunks: tl.tensor,
    HAS_MASK: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """The token of row program_id(0) from its chunks' winners.

    top_k and min_p leave the tokens up to the floor; with each winner that top_p does not leave, all tokens behind it
    are ruled out.
    """
    row = tl.program_id(0)
    size = tl.num_programs(0) * num_chunks
    largest, token = first_of_chunks(best_ptr, best_ids_ptr, row, num_chunks, BLOCK_CHUNKS)
    is_valid = (largest > float("-inf")) & (largest < float("inf"))
    tl.store(is_valid_ptr + row, is_valid)
    temperature = tl.load(temperature_ptr + row)
    if is_valid & (temperature > 0):
        peak = largest.to(tl.float32)
        _, token = first_of_chunks(best_ptr + size, best_ids_ptr + size, row, num_chunks, BLOCK_CHUNKS)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        k_weight, k_id = tl.full([], float("-inf"), tl.float32), tl.full([], _NO_LIMIT, tl.int32)
        if top_k > 0:
            k_weight, k_id = kth_best(logits_ptr, allowed_ptr, row, vocab_size, temperature, top_k, HAS_MASK, TILE)
        wanted = tl.full([], float("inf"), tl.float64)
        if top_p < 1.0:
            # top_p is a share of what top_k leaves.
            wanted = top_p * mass(
                logits_ptr, allowed_ptr, row, vocab_size, temperature, peak, k_weight, k_id, HAS_MASK, True, TILE
            )
        least = peak + tl.load(log_min_p_ptr + row)
        floor_weight = tl.maximum(k_weight, least)
        floor_id = tl.where(least > k_weight, _NO_LIMIT, k_id)
        is_settled = tl.full([], 0, tl.int32)
        while is_settled == 0:
            weight = weights_of(logits_ptr, allowed_ptr, row, token, vocab_size, temperature, HAS_MASK)
            is_left = is_within(weight, token, floor_weight, floor_id)
            if is_left & (top_p < 1.0):
                before = mass(
                    logits_ptr, allowed_ptr, row, vocab_size, temperature, peak, weight, token, HAS_MASK, False, TILE
                )
                is_left = before < wanted
            is_settled = is_left.to(tl.int32)
            if is_settled == 0:
                # Never empty-handed: the best token of all is always left.
                token = search(
                    logits_ptr,
                    allowed_ptr,
                    row,
                    vocab_size,
                    temperature,
                    tl.load(seeds_ptr + row),
                    tl.load(positions_ptr + row),
                    floor_weight,
                    floor_id,
                    weight,
                    token,
                    HAS_MASK,
                    TILE,
                )
    tl.store(token_ids_ptr + row, token.to(tl.int64))
