"""What a step's rows ask of sampling, as tensors: made once a step on the host from the requests' parameters.

Says the same as `engine/sampling/distribution.py`, in the form that `sampling.py` reads: a few changes of single
tokens a row, a bit mask where a row allows only some tokens, and one number a row for each field. Samples nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.types import SamplingParams

BANNED, SEEN = 1, 2
"""Flags of an edit: the token must not come; the token was seen, so the repetition penalty holds."""
_MASK_BITS = 32


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row to sample."""

    params: SamplingParams
    token_ids: Sequence[int]
    """Prompt and output before the position that is sampled."""
    num_prompt_tokens: int
    stop_ids: frozenset[int]
    """Every token that would end the request."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes of single tokens: `value = penalized(logit + bias) - subtracted`, or -inf where banned.

    A token occurs at most once in a row, so the edits of a row do not depend on their order.
    """

    start: Tensor
    """[num_rows + 1] int32, half-open ranges of edits."""
    token_ids: Tensor
    """[num_edits] int32."""
    biases: Tensor
    """[num_edits] fp32."""
    subtracted: Tensor
    """[num_edits] fp32, presence and frequency penalty together, rounded as the CPU path rounds them."""
    flags: Tensor
    """[num_edits] int32, of `BANNED` and `SEEN`."""
    repetition: Tensor
    """[num_rows] fp32."""


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Parameters of all rows of a step, on the device."""

    edits: LogitEdits | None
    """None = no row has any."""
    allowed: Tensor | None
    """[num_rows, vocab_size / 32] int32, bit t % 32 of word t / 32 for token t; None = every row allows all."""
    temperature: Tensor
    """[num_rows] fp32; 0 = greedy."""
    top_k: Tensor
    """[num_rows] int32; 0 = off."""
    top_p: Tensor
    """[num_rows] fp64; 1 = off."""
    log_min_p: Tensor
    """[num_rows] fp32; -inf = off."""
    seeds: Tensor
    """[num_rows] int64, the bits of the unsigned seed."""
    positions: Tensor
    """[num_rows] int32, absolute position of the token to be sampled."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> "SamplingRows":
        """Gather the rows' parameters and bring them to the device."""
        params = [row.params for row in rows]
        # log of a zero min_p is the bound that bounds nothing.
        log_min_p = [np.float32(np.log(p.min_p)) if p.min_p > 0.0 else np.float32(-np.inf) for p in params]
        return cls(
            edits=_edits(rows, vocab_size, device),
            allowed=_allowed(params, vocab_size, device),
            temperature=torch.tensor(
                [0.0 if p.is_greedy else p.temperature for p in params], dtype=torch.float32, device=device
            ),
            top_k=torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            log_min_p=torch.tensor(np.array(log_min_p, dtype=np.float32), device=device),
            seeds=torch.tensor(np.array([p.seed for p in params], dtype=np.uint64).view(np.int64), device=device),
            positions=torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int32, device=device),
        )


@dataclass(slots=True)
class _Edit:
    bias: np.float32 | float = 0.0
    subtracted: np.float32 | float = 0.0
    flags: int = 0


def _edits(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> LogitEdits | None:
    by_row = [_row_edits(row, vocab_size) for row in rows]
    if not any(by_row):
        return None
    flat = [(token_id, edit) for edits in by_row for token_id, edit in edits.items()]
    starts = np.cumsum([0, *(len(edits) for edits in by_row)])
    return LogitEdits(
        start=torch.tensor(starts, dtype=torch.int32, device=device),
        token_ids=torch.tensor([token_id for token_id, _ in flat], dtype=torch.int32, device=device),
        biases=torch.tensor(np.array([edit.bias for _, edit in flat], dtype=np.float32), device=device),
        subtracted=torch.tensor(np.array([edit.subtracted for _, edit in flat], dtype=np.float32), device=device),
        flags=torch.tensor([edit.flags for _, edit in flat], dtype=torch.int32, device=device),
        repetition=torch.tensor([r.params.repetition_penalty for r in rows], dtype=torch.float32, device=device),
    )


def _row_edits(row: SamplingRow, vocab_size: int) -> dict[int, _Edit]:
    params, edits = row.params, dict[int, _Edit]()

    def edit(token_id: int) -> _Edit:
        return edits.setdefault(token_id, _Edit())

    for token_id, bias in params.logit_bias.items():
        edit(token_id).bias = np.float32(bias)
    for word in params.bad_words:
        prefix = word[:-1]
        if not prefix or tuple(row.token_ids[-len(prefix) :]) == prefix:
            edit(word[-1]).flags |= BANNED
    if len(row.token_ids) - row.num_prompt_tokens < params.min_tokens:
        for token_id in row.stop_ids:
            if token_id < vocab_size:
                edit(token_id).flags |= BANNED
    if params.repetition_penalty != 1.0:
        for token_id in set(row.token_ids):
            edit(token_id).flags |= SEEN
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        tokens, counts = _counts(row.token_ids[row.num_prompt_tokens :])
        # In fp32 and in this order, as the CPU path does; on the device the two operations could become one.
        subtracted = np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        for token_id, value in zip(tokens.tolist(), subtracted, strict=True):
            edit(token_id).subtracted = value
    return edits


def _counts(token_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    tokens, counts = np.unique(np.asarray(token_ids, dtype=np.int64), return_counts=True)
    return tokens, counts.astype(np.float32)


def _allowed(params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Tensor | None:
    if all(p.allowed_token_ids is None for p in params):
        return None
    words = -(-vocab_size // _MASK_BITS)
    bits = np.ones((len(params), words * _MASK_BITS), dtype=bool)
    for row, p in enumerate(params):
        if p.allowed_token_ids is not None:
            bits[row] = False
            bits[row, list(p.allowed_token_ids)] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32)).to(device)
