"""The head's loss: cross entropy against the target's most likely tokens, with the output product fused in.

The logits of thousands of rows over thousands of tokens are never kept: each block of rows gives its loss and, at once,
its gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK_ROWS = 512


@dataclass(frozen=True, slots=True)
class Teaching:
    """What the target itself expects at some rows, over the head's vocabulary."""

    indices: Tensor
    """[num_rows, k] int64, places in `vocab_ids` of its most likely tokens."""
    shares: Tensor
    """[num_rows, k] fp32, their probabilities, summing to 1."""
    weights: Tensor
    """[num_rows] fp32, how much a row counts: 0 where the text goes on with a token that the head cannot propose."""

    def select(self, rows: Tensor) -> "Teaching":
        """Return these rows only."""
        return Teaching(self.indices[rows], self.shares[rows], self.weights[rows])


def head_loss(hidden: Tensor, output_rows: Tensor, teaching: Teaching) -> Tensor:
    """Return the weighted sum of the rows' cross entropies; divide by the sum of weights for the mean.

    Args:
        hidden: [num_rows, hidden_size] fp32, gets a gradient.
        output_rows: [num_vocab_ids, hidden_size], gets none; of the type in which it is multiplied.
        teaching: Of the same rows.
    """
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(hidden, output_rows, teaching.indices, teaching.shares, teaching.weights)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, output_rows: Tensor, indices: Tensor, shares: Tensor, weights: Tensor
    ) -> Tensor:
        dtype = output_rows.dtype
        given = hidden.to(dtype)
        gradient = torch.empty_like(hidden)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            logits = (given[part] @ output_rows.T).to(hidden.dtype)
            largest = logits.amax(1, keepdim=True)
            expected = (logits.gather(1, indices[part]) * shares[part]).sum(1)
            odds = logits.sub_(largest).exp_()
            normaliser = odds.sum(1, keepdim=True)
            row_losses = largest[:, 0] + normaliser[:, 0].log() - expected
            total += (row_losses * weights[part]).sum()
            scale = weights[part][:, None]
            difference = odds.mul_(scale / normaliser).scatter_add_(1, indices[part], -shares[part] * scale)
            gradient[part] = difference.to(dtype) @ output_rows
        context.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(context: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = context.saved_tensors
        return gradient * outer[0], None, None, None, None
