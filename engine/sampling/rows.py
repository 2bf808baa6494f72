"""RowSampler: the port behind which a step's rows are drawn from, all in one call.

`NumpyRows` is the definition, `sampler.draw` and `sampler.position_logprobs` row by row; `NativeRows` has the same
answers from compiled kernels on several threads, and asks the definition where rounding could decide.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import load_library
from engine.kernels.cpu.sampling import NativeSampler, RowDraw
from engine.sampling.distribution import candidates
from engine.sampling.sampler import draw, position_logprobs
from engine.types import SamplingParams
from kvrelay.values import PositionLogprobs, TokenLogprob

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Draw:
    """One row of a request that is not greedy."""

    logits: NDArray[np.float32]
    """[vocab_size], as `process_logits` left it."""
    params: SamplingParams
    position: int
    """Absolute index of the token to be sampled."""


@dataclass(frozen=True, slots=True)
class LogprobQuery:
    """What is asked about one row."""

    logits: NDArray[np.float32]
    """[vocab_size], as the model gave it."""
    token_id: int
    num_top: int


class RowSampler(Protocol):
    """Draws from rows. Called by one thread only."""

    def best(self, logits: NDArray[np.float32]) -> list[int | None]:
        """Return the likeliest token of each row [rows, vocab_size], the first of equals; None as in `draw`."""
        ...

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        """Return each row's token; None where no token is allowed, or the row holds NaN or infinity."""
        ...

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[PositionLogprobs]:
        """Return the logprobs of each row's token and of its best ones under the model's own distribution."""
        ...


class NumpyRows:
    """`RowSampler` row by row."""

    def best(self, logits: NDArray[np.float32]) -> list[int | None]:
        """See `RowSampler.best`."""
        best = logits.argmax(axis=1)
        is_usable = np.isfinite(logits[np.arange(len(best)), best])
        return [token if usable else None for token, usable in zip(best.tolist(), is_usable.tolist(), strict=True)]

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        """See `RowSampler.draw`."""
        return [_draw(one) for one in draws]

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[PositionLogprobs]:
        """See `RowSampler.logprobs`."""
        return [position_logprobs(query.logits, query.token_id, query.num_top) for query in queries]


class NativeRows:
    """`RowSampler` on the compiled kernels."""

    def __init__(self, sampler: NativeSampler) -> None:
        self._sampler = sampler

    def best(self, logits: NDArray[np.float32]) -> list[int | None]:
        """See `RowSampler.best`."""
        return self._sampler.best(logits)

    def draw(self, draws: Sequence[Draw]) -> list[int | None]:
        """See `RowSampler.draw`."""
        answers = self._sampler.draw(
            [
                RowDraw(
                    np.ascontiguousarray(one.logits),
                    one.params.temperature,
                    one.params.top_k,
                    one.params.top_p,
                    one.params.min_p,
                    one.params.seed,
                    one.position,
                )
                for one in draws
            ]
        )
        return [
            _draw(one) if not answer.is_decided else answer.token_id for one, answer in zip(draws, answers, strict=True)
        ]

    def logprobs(self, queries: Sequence[LogprobQuery]) -> list[PositionLogprobs]:
        """See `RowSampler.logprobs`."""
        answers = self._sampler.logprobs(
            [(np.ascontiguousarray(query.logits), query.token_id, query.num_top) for query in queries]
        )
        return [
            PositionLogprobs(
                TokenLogprob(query.token_id, float(query.logits[query.token_id]) - answer.normaliser, answer.rank),
                tuple(
                    TokenLogprob(token_id, float(query.logits[token_id]) - answer.normaliser, rank + 1)
                    for rank, token_id in enumerate(answer.top)
                ),
            )
            for query, answer in zip(queries, answers, strict=True)
        ]


def row_sampler(num_threads: int | None) -> RowSampler:
    """Return the fastest sampler of rows that this machine has.

    Args:
        num_threads: Threads that share a step's rows, the caller's included; None = one per core that this process may
            use.
    """
    try:
        return NativeRows(NativeSampler(load_library(), num_threads or len(os.sched_getaffinity(0))))
    except KernelsUnavailable as error:
        _log.warning("sampling.kernels_unavailable", reason=str(error), fallback="numpy")
        return NumpyRows()


def _draw(one: Draw) -> int | None:
    return draw(candidates(one.logits, one.params), one.params.seed, one.position)
