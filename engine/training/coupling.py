"""How much acceptance the keyed noise costs: Gumbel-coupled drafts against the optimum.

A drafter with distribution q that samples with the target's own noise proposes argmax(log q + noise), and the target
takes argmax(log p + noise). Both are v with probability 1 / sum over u of max(p_u / p_v, q_u / q_v). No scheme that
leaves the target's distribution alone accepts more than sum over v of min(p_v, q_v) (Leviathan et al., arXiv
2211.17192). `measure_coupling` gives the mean of both over held-out rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.training.evaluate import answer_rows, target_logits
from engine.training.features import Features
from engine.training.head import DraftHead

_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Coupling:
    """Means over rows, for the first draft."""

    temperature: float
    num_rows: int
    optimum: float
    """Leviathan's acceptance."""
    coupled: float
    """Acceptance with the target's noise."""
    one_hot: float
    """Acceptance when the drafter proposes its most likely token: the target's probability of it."""


def optimal_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Return sum of min(p, q) of each row, [n], for distributions [n, vocab_size]."""
    return torch.minimum(target, draft).sum(1)


def coupled_acceptance(target: Tensor, draft: Tensor) -> Tensor:
    """Return the chance that both draw the same token with the same Gumbel noise, [n].

    The maximum takes p_u / p_v where p_u / q_u is at least p_v / q_v, else q_u / q_v: with tokens sorted by that ratio,
    the sums are cumulative ones.

    Args:
        target: [n, vocab_size] float64 probabilities.
        draft: Likewise.
    """
    ratio = target / draft.clamp_min(torch.finfo(torch.float64).tiny)
    order = ratio.argsort(1)
    p, q = target.gather(1, order), draft.gather(1, order)
    below_q = q.cumsum(1) - q
    from_p = p.flip(1).cumsum(1).flip(1)
    # 1 / (from_p / p + below_q / q), which is 0 where either is 0.
    both = (p * q) / (from_p * q + below_q * p).clamp_min(torch.finfo(torch.float64).tiny)
    return both.sum(1)


@torch.no_grad()
def measure_coupling(
    head: DraftHead, features: Features, numbers: Sequence[int], temperature: float, max_rows: int = 1000
) -> Coupling:
    """Measure the first draft on held-out conversations.

    Args:
        head: The trained head.
        features: Where the conversations are.
        numbers: Theirs.
        temperature: Of both distributions, > 0.
        max_rows: Most rows to look at.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    num_rows = 0
    for number in numbers:
        batch = features.batch([number])
        rows = answer_rows(batch)[: max_rows - num_rows]
        hidden = head.unroll(batch, 1)[0].hidden
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = rows[start : start + _ROWS_AT_ONCE]
            target = (target_logits(head, batch, part).double() / temperature).softmax(1)
            draft = torch.zeros_like(target)
            logits = hidden[start : start + len(part)] @ head.output_rows.T
            draft[:, head.vocab_ids] = (logits.double() / temperature).softmax(1)
            best = target.gather(1, draft.argmax(1, keepdim=True))
            sums += torch.stack(
                [optimal_acceptance(target, draft).sum(), coupled_acceptance(target, draft).sum(), best.sum()]
            )
        num_rows += len(rows)
        if num_rows >= max_rows:
            break
    optimum, coupled, one_hot = (sums / max(1, num_rows)).tolist()
    return Coupling(temperature, num_rows, optimum, coupled, one_hot)
