"""Puts the tokens of one completion in order: no duplicate, no gap, whatever order the workers' outputs come in.

Decode's second token may arrive before prefill's first, and after a retry both may send what was there already. Pure;
used by `output.py`.
"""

from dataclasses import dataclass

from engine.types import SequenceOutput
from kvrelay.errors import EngineError
from kvrelay.values import FinishReason, PositionLogprobs


@dataclass(frozen=True, slots=True)
class OrderedToken:
    """The next token in order."""

    token_id: int
    logprobs: PositionLogprobs | None


@dataclass(frozen=True, slots=True)
class _End:
    num_tokens: int
    finish_reason: FinishReason
    matched_stop_token_id: int | None


class OutputSequencer:
    """Reorders one completion's outputs by token index.

    Invariants: `num_taken` grows by exactly the tokens given out; what waits lies at or beyond it and below
    `max_tokens`.
    """

    def __init__(self, max_tokens: int, *, has_logprobs: bool) -> None:
        self._max_tokens = max_tokens
        self._has_logprobs = has_logprobs
        self._waiting: dict[int, OrderedToken] = {}
        self._end: _End | None = None
        self.num_taken = 0
        """Tokens given out so far; the index of the next one."""

    def push(self, output: SequenceOutput) -> None:
        """Add one output; tokens known already are dropped.

        Raises:
            EngineError: the worker broke the contract: a token beyond max_tokens, or not one logprob entry per token.
        """
        end = output.token_index + len(output.token_ids)
        if end > self._max_tokens:
            raise EngineError(f"a worker sent token {end - 1} of a request limited to {self._max_tokens} tokens")
        if self._has_logprobs and len(output.logprobs) != len(output.token_ids):
            raise EngineError(f"a worker sent {len(output.logprobs)} logprobs for {len(output.token_ids)} tokens")
        for offset, token_id in enumerate(output.token_ids):
            index = output.token_index + offset
            if index >= self.num_taken and index not in self._waiting:
                self._waiting[index] = OrderedToken(token_id, output.logprobs[offset] if self._has_logprobs else None)
        if output.finish_reason is not None and self._end is None:
            self._end = _End(end, output.finish_reason, output.matched_stop_token_id)

    def has_token(self, index: int) -> bool:
        """Whether the token at `index` was pushed, taken or not."""
        return index < self.num_taken or index in self._waiting

    def take(self) -> list[OrderedToken]:
        """Return the tokens that follow in order, none when the next one is still missing."""
        taken: list[OrderedToken] = []
        while (token := self._waiting.pop(self.num_taken, None)) is not None:
            taken.append(token)
            self.num_taken += 1
        return taken

    @property
    def end(self) -> _End | None:
        """How the workers ended it, once every token before the end was taken; None before that."""
        return self._end if self._end is not None and self.num_taken >= self._end.num_tokens else None

    def forget_waiting(self) -> None:
        """Drop what was not taken, and an end that was not reached: the attempt that sent it is given up."""
        self._waiting.clear()
        if self.end is None:
            self._end = None
