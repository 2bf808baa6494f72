"""PrefillGate: holds prompts back while the prefill tier has enough to do.

A prompt that waits at a prefill worker already holds its blocks on decode, and they sit idle for the whole queue. So
only what keeps the tier busy for a moment is sent; the rest waits here and holds nothing. Ordered by priority, then
deadline, then arrival. Used by `gateway/relay/driver.py` before each reservation; knows no request and no worker.
"""

import asyncio
import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass, field

MIN_PROMPTS = 2
"""Prompts that each prefill worker may have whatever their length: one to compute, one to come next."""


@dataclass(slots=True, eq=False)
class Turn:
    """One prompt's place before and behind the gate. Left exactly when its prefill is over, or not needed."""

    order: tuple[int, float, int]
    """Priority, deadline, arrival."""
    num_tokens: int
    gate: "PrefillGate" = field(repr=False)
    is_granted: bool = False
    is_left: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def wait(self) -> None:
        """Return once it is granted, or left by somebody else."""
        await self._changed.wait()

    def leave(self) -> None:
        """Give the place back. Does nothing the second time."""
        self.gate.leave(self)

    def wake(self) -> None:
        """Let `wait` return."""
        self._changed.set()


class PrefillGate:
    """One gateway's gate. One event loop.

    Invariants: `num_tokens` and `num_prompts` are the sums over granted turns that have not been left; nobody waits
    while the first in line would fit.

    Args:
        max_tokens: Prompt tokens that each prefill worker may have at once.
        num_workers: Returns the number of prefill workers now. Without any nobody waits: decode prefills itself.
    """

    def __init__(self, max_tokens: int, num_workers: Callable[[], int]) -> None:
        self._max_tokens = max_tokens
        self._num_workers = num_workers
        self._waiting: list[Turn] = []
        self._num_arrivals = 0
        self.num_tokens = 0
        """Tokens of the prompts that passed and are not prefilled yet."""
        self.num_prompts = 0
        """Prompts that passed and are not prefilled yet."""

    @property
    def num_waiting(self) -> int:
        """Prompts that are held back."""
        return len(self._waiting)

    def enter(
        self, num_tokens: int, *, priority: int = 0, deadline: float | None = None, is_resumed: bool = False
    ) -> Turn:
        """Take a place.

        Args:
            num_tokens: Tokens to prefill.
            priority: Lower goes first.
            deadline: Clock seconds at which the client stops waiting; None = never.
            is_resumed: Whether the request has waited before and lost its worker: it passes at once.
        """
        self._num_arrivals += 1
        turn = Turn((priority, math.inf if deadline is None else deadline, self._num_arrivals), num_tokens, self)
        if is_resumed:
            self._grant(turn)
        else:
            bisect.insort(self._waiting, turn, key=lambda waiting: waiting.order)
            self.let_pass()
        return turn

    def leave(self, turn: Turn) -> None:
        """See `Turn.leave`."""
        if turn.is_left:
            return
        turn.is_left = True
        turn.wake()
        if turn.is_granted:
            self.num_tokens -= turn.num_tokens
            self.num_prompts -= 1
        else:
            self._waiting.remove(turn)
        self.let_pass()

    def let_pass(self) -> None:
        """Grant what fits now; to be called when workers come or go."""
        while self._waiting and self._has_room(self._waiting[0].num_tokens):
            self._grant(self._waiting.pop(0))

    def _has_room(self, num_tokens: int) -> bool:
        num_workers = self._num_workers()
        return (
            num_workers == 0
            or self.num_prompts < MIN_PROMPTS * num_workers
            or self.num_tokens + num_tokens <= self._max_tokens * num_workers
        )

    def _grant(self, turn: Turn) -> None:
        turn.is_granted = True
        turn.wake()
        self.num_tokens += turn.num_tokens
        self.num_prompts += 1
