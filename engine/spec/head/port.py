"""DraftHead: the port between drafting and a head that runs on the target's hidden states.

What a head computes is in `format.py`; `eager.py` and `native.py` run it, `loader.py` picks one.
What it needs to know of all that came before a position, beside K and V, is the *state* before it: the features of the
position before, then the id + 1 of that position's token and of the one before, 0 where there is none, all fp32.
Its K and V are the layer behind the target's own in the target's KV cache, so blocks, prefix cache, hand-off, rollback
and preemption need no word about it.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.model.batch import StepBatch
from engine.model.kv_cache import KvCache

NUM_STATE_TOKENS: Final = 2
"""Token ids in a state."""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What drafting rows gave."""

    logits: NDArray[np.float32]
    """[num_rows, number of vocabulary ids]."""
    states: Tensor
    """[num_rows, state_size] fp32: the states with which drafting goes on behind the rows."""
    best: NDArray[np.int32]
    """[num_rows]: index of each row's largest logit, the first of equal ones."""
    shares: NDArray[np.float32]
    """[num_rows]: its share of the sum of e^logit."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """When a run of drafts ends."""

    least_reach: tuple[float, ...]
    """By tokens drafted so far: no more are drafted when the chance that all is accepted is less. As many entries as
    tokens may be drafted, at least one."""
    chances: tuple[float, ...]
    """That a draft is accepted, by equal steps of its share of the head's distribution."""
    stop_ids: frozenset[int]
    """Nothing is drafted behind these tokens."""


@dataclass(frozen=True, slots=True)
class HeadRun:
    """What `DraftHead.run` drafted."""

    drafts: list[tuple[int, float]]
    """Each token and its share of the head's distribution; at least one."""
    first_s: float
    """Seconds until the first one was there."""


class DraftHead(Protocol):
    """A head beside its target. Called by the engine thread only."""

    @property
    def tap_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs it wants."""

    @property
    def vocab_ids(self) -> NDArray[np.int64]:
        """[number of vocabulary ids], ascending: the tokens it can propose."""

    @property
    def hidden_size(self) -> int:
        """The target's, and the size of features."""

    @property
    def state_size(self) -> int:
        """`hidden_size` and `NUM_STATE_TOKENS`."""

    def absorb(self, batch: StepBatch, taps: Tensor, carried: Tensor, kv_cache: KvCache) -> Tensor:
        """Take in tokens that the target has computed: make features of them, and write the head's K and V.

        Rows of drafts that turn out wrong may be among them; they are written again when their positions are computed
        anew.

        Args:
            batch: The tokens, of one step of the target or several.
            taps: [num_tokens, number of tap layers, hidden_size] fp32, from the target.
            carried: [num_seqs, state_size] fp32: the state before each sequence's first row; zeros at position 0 and
                where it is not known.
            kv_cache: The target's, with one layer more.

        Returns:
            [num_tokens, state_size] fp32: the states behind the rows.
        """

    def draft(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache) -> HeadRows:
        """Compute rows up to their logits, each of which predicts the token behind its row.

        Args:
            batch: The rows, one for each sequence, whose K and V are written too; all of them want logits.
            previous: [num_rows, state_size] fp32: the state before each row.
            kv_cache: As in `absorb`; the head's K and V of everything before the rows is there.
        """

    def run(self, batch: StepBatch, previous: Tensor, kv_cache: KvCache, limits: RunLimits) -> HeadRun:
        """Draft one sequence's likeliest tokens one after the other.

        Args:
            batch: The first row, as in `draft`; its block table covers a row for each draft. May be changed.
            previous: [1, state_size] fp32, as in `draft`. May be changed.
            kv_cache: As in `draft`.
            limits: At least one token is drafted.
        """
