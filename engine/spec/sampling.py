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
from engine.spec.verify import VerifyItem, verify
from engine.types import PositionLogprobs


@dataclass(frozen=True, slots=True)
class NewTokens:
    """What one sequence got in a step."""

    token_ids: tuple[int, ...]
    """The accepted drafts and one more."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token; empty where none were asked for."""


class Sampler(Protocol):
    """Draws the new tokens of a step. Called by the engine thread only, once a step."""

    def sample(self, logits: Tensor, items: Sequence[VerifyItem]) -> list[NewTokens]:
        """Verify the drafts of each sequence and draw one token more.

        Args:
            logits: [num_rows, vocab_size] fp32 on any device; may be changed.
            items: The sequences; each owns `1 + len(draft_token_ids)` consecutive rows.

        Returns:
            One entry per item.

        Raises:
            ValueError: A row that decides allows no token at all or holds NaN.
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
