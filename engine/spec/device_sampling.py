"""`Sampler` on the logits' device: kernels draw, and only token ids and the logprobs asked for come to the host.

All rows of a step are sampled at once, each as if every draft before it had been accepted, and `verify.py` keeps those
up to the first draft that differs. Loads Triton.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from engine.kernels.triton.sampling import sample_rows
from engine.kernels.triton.sampling_rows import SamplingRow, SamplingRows
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest
from engine.spec.sampling import NewTokens
from engine.spec.verify import VerifyItem, accept, failure, histories
from engine.types import SamplingParams
from kvrelay.values import PositionLogprobs, TokenLogprob

_WORD = 2**32


class DeviceSampler:
    """See the module."""

    def warm_up(self, vocab_size: int, device: torch.device) -> None:
        """Compile what any request may ask for, so that none waits for it."""
        every = SamplingParams(
            top_k=2,
            top_p=0.9,
            repetition_penalty=1.1,
            allowed_token_ids=frozenset({0, 1, 2}),
            logprobs=1,
        )
        for params in (SamplingParams(), every):
            request = SampleRequest(params, TokenHistory((0,), 1), frozenset())
            self.sample(torch.zeros(1, vocab_size, device=device), [VerifyItem(0, (), request)])

    def sample(self, logits: Tensor, items: Sequence[VerifyItem]) -> list[NewTokens]:
        """See `Sampler.sample`. Logits change where a request has a bias, bans or penalties."""
        rows = [
            SamplingRow(
                item.request.params,
                # The others share one list, which grows.
                history.token_ids if history is item.request.history else tuple(history.token_ids),
                history.num_prompt_tokens,
                item.request.stop_ids,
            )
            for item in items
            for history in histories(item)
        ]
        if not rows:
            return []
        logits = _rows_in_order(logits, items)
        # Kept before the request's edits: logprobs are those of the model's own distribution.
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        own = logits.index_select(0, torch.tensor(wanted, device=logits.device)) if wanted else None
        sampled = sample_rows(logits, SamplingRows.build(rows, logits.shape[1], logits.device))
        token_ids, is_valid = torch.stack([sampled.token_ids, sampled.is_valid.long()]).tolist()
        targets = [token_id if valid else None for token_id, valid in zip(token_ids, is_valid, strict=True)]
        logprobs: Mapping[int, PositionLogprobs] = {}
        if own is not None:
            chosen = [token_ids[index] for index in wanted]
            num_top = [rows[index].params.logprobs or 0 for index in wanted]
            logprobs = dict(zip(wanted, position_logprobs(own, chosen, num_top), strict=True))
        results, start = list[NewTokens](), 0
        for item in items:
            new = accept(targets[start:], item.draft_token_ids)
            if not new:
                # Banned tokens are minus infinity by now, so what is larger than any number is the model's own.
                is_finite = bool((logits[start].max() < torch.inf).item())
                results.append(NewTokens((), error=failure(item.request, is_finite=is_finite)))
                start += 1 + len(item.draft_token_ids)
                continue
            found = tuple(logprobs[index] for index in range(start, start + len(new)) if index in logprobs)
            results.append(NewTokens(new, found))
            start += 1 + len(item.draft_token_ids)
        return results


def position_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[PositionLogprobs]:
    """`sampler.position_logprobs` of several rows on their device; only what is reported comes to the host.

    Args:
        logits: [num_rows, vocab_size] fp32, as the model gave them.
        token_ids: The sampled token of each row.
        num_top: How many of the best tokens to report, for each row.
    """
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen_logits = logits.gather(1, chosen)
    normaliser = logits.double().logsumexp(1, keepdim=True)
    ranks = (logits > chosen_logits).sum(1, keepdim=True) + 1
    num_best = min(max(num_top), logits.shape[1])
    best = _best(logits, num_best)
    values = torch.cat([logits.gather(1, best), chosen_logits], 1).double() - normaliser
    ids_and_ranks, logprobs = torch.cat([best, ranks], 1).tolist(), values.tolist()
    return [
        PositionLogprobs(
            TokenLogprob(token_id, row_logprobs[-1], row_ids[-1]),
            tuple(TokenLogprob(row_ids[place], row_logprobs[place], place + 1) for place in range(min(top, num_best))),
        )
        for token_id, top, row_ids, row_logprobs in zip(token_ids, num_top, ids_and_ranks, logprobs, strict=True)
    ]


def _best(logits: Tensor, count: int) -> Tensor:
    """[num_rows, count] ids of the largest logits, best first, equal ones by id."""
    # torch.topk says nothing about equal values, so what is compared holds the id too and has no equals. Flipping all
    # but the sign of negative numbers makes the bits of floats compare as the floats do; -0 becomes 0 before.
    bits = (logits + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = ordered * _WORD - torch.arange(logits.shape[1], device=logits.device)
    best: Tensor = keys.topk(count, dim=1).indices
    return best


def _rows_in_order(logits: Tensor, items: Sequence[VerifyItem]) -> Tensor:
    """The rows of the items, back to back; without a copy where they are so already."""
    places = [item.first_row + offset for item in items for offset in range(1 + len(item.draft_token_ids))]
    if places == list(range(logits.shape[0])):
        return logits.contiguous()
    return logits.index_select(0, torch.tensor(places, device=logits.device))
