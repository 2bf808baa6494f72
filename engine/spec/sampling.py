"""Sampler: the port between a step's logits and its new tokens. Two sides that give the same tokens.

`HostSampler` brings the logits to the host and goes through `verify.py`; a model on the CPU has them there already.
`device_sampling.DeviceSampler` does the same with kernels on the logits' device, so that only token ids and the
logprobs that were asked for cross the bus. Knows neither plans nor sequences.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.sampling.rows import LogprobQuery, NumpyRows, RowSampler
from engine.spec.verify import VerifyItem, failure, verify
from kvrelay.errors import EngineError
from kvrelay.values import PositionLogprobs


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one sequence got in a step."""

    token_ids: tuple[int, ...]
    """The accepted drafts and one more; none where there is an `error`."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token; empty where none were asked for."""
    error: EngineError | None = None
    """Why the sequence's row gave no token. The others of the step have theirs."""


class Sampler(Protocol):
    """Draws the new tokens of a step. Called by the engine thread only, once a step."""

    def sample(self, logits: Tensor, items: Sequence[VerifyItem]) -> list[NewTokens]:
        """Verify the drafts of each sequence and draw one token more.

        Args:
            logits: [num_rows, vocab_size] fp32 on any device; may be changed.
            items: The sequences; each owns `1 + len(draft_token_ids)` consecutive rows.

        Returns:
            One entry per item. A row that gives no token, because its fields ban all or the model's logits are not
            finite, is an error of that entry alone.
        """


class HostSampler:
    """`Sampler` over `verify`."""

    def __init__(self, rows: RowSampler | None = None) -> None:
        """Make a sampler that draws with `rows`; `NumpyRows` by default."""
        self._rows = rows or NumpyRows()

    def sample(self, logits: Tensor, items: Sequence[VerifyItem]) -> list[NewTokens]:
        """See `Sampler.sample`."""
        on_host: NDArray[np.float32] = (logits if logits.is_cpu else logits.cpu()).numpy()
        new_tokens = verify(on_host, items, self._rows)
        if not all(new_tokens):
            return self._without_failed(on_host, items, new_tokens)
        return self._with_logprobs(on_host, items, new_tokens)

    def _without_failed(
        self, on_host: NDArray[np.float32], items: Sequence[VerifyItem], new_tokens: Sequence[tuple[int, ...]]
    ) -> list[NewTokens]:
        """Put the reason where there is no token, and finish the others."""
        good = [index for index, token_ids in enumerate(new_tokens) if token_ids]
        finished = iter(
            self._with_logprobs(on_host, [items[index] for index in good], [new_tokens[index] for index in good])
        )
        results: list[NewTokens] = []
        for item, token_ids in zip(items, new_tokens, strict=True):
            if token_ids:
                results.append(next(finished))
                continue
            # NaN and plus infinity are larger than any number, for `max` too.
            is_finite = bool(on_host[item.first_row].max() < np.inf)
            results.append(NewTokens((), error=failure(item.request, is_finite=is_finite)))
        return results

    def _with_logprobs(
        self, on_host: NDArray[np.float32], items: Sequence[VerifyItem], new_tokens: Sequence[tuple[int, ...]]
    ) -> list[NewTokens]:
        if not any(_wants_logprobs(item) for item in items):
            return [NewTokens(token_ids) for token_ids in new_tokens]
        queries = [
            LogprobQuery(on_host[item.first_row + offset], token_id, item.request.params.logprobs)
            for item, token_ids in zip(items, new_tokens, strict=True)
            if item.request.params.logprobs is not None
            for offset, token_id in enumerate(token_ids)
        ]
        answers = iter(self._rows.logprobs(queries))
        return [
            NewTokens(token_ids, tuple(islice(answers, len(token_ids) if _wants_logprobs(item) else 0)))
            for item, token_ids in zip(items, new_tokens, strict=True)
        ]


def _wants_logprobs(item: VerifyItem) -> bool:
    return item.request.params.logprobs is not None
