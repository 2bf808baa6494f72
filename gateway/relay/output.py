"""From workers' outputs to what the client sees of one completion: ordered tokens, text, the cut, the counts.

Owns what is cut and what is counted: a stop string ends tokens, logprobs, text and usage at the token that completes
it. Pure; `attempt.py` feeds it, `completion.py` gives out what `take_chunk` returns.
"""

from collections.abc import Collection
from typing import Protocol

from engine.types import SamplingParams, SequenceOutput
from gateway.relay.response import Ending, TokenChunk, Usage
from gateway.relay.sequencer import OrderedToken, OutputSequencer
from kvrelay.errors import EngineError
from kvrelay.values import FinishReason


class TextDelta(Protocol):
    """What became certain with a token."""

    @property
    def text(self) -> str:
        """New text, possibly empty."""
        ...

    @property
    def matched_stop(self) -> str | None:
        """The stop string that is now complete; the text is cut already."""
        ...


class TextDecoder(Protocol):
    """Turns one completion's tokens into text, holding back what is not certain yet."""

    def push(self, token_id: int) -> TextDelta:
        """Add a token. Not called again once a stop string matched."""
        ...

    def flush(self) -> str:
        """Return what was held back; no token follows."""
        ...

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text; None: none did."""
        ...


class CompletionOutput:
    """What one completion has produced so far.

    Invariants: `token_ids` are exactly the tokens given out in chunks; after `ending` is set nothing is added.
    """

    def __init__(
        self,
        sampling_params: SamplingParams,
        *,
        prompt_tokens: int,
        text: TextDecoder,
        special_token_ids: Collection[int],
    ) -> None:
        self._text = text
        self._special_token_ids = special_token_ids
        self._sequencer = OutputSequencer(sampling_params.max_tokens, has_logprobs=sampling_params.logprobs is not None)
        self._max_tokens = sampling_params.max_tokens
        self.token_ids: list[int] = []
        """Tokens given out."""
        self.ending: Ending | None = None
        """How it ended; None: it goes on."""
        self.usage = Usage(prompt_tokens=prompt_tokens)

    def has_ended(self) -> bool:
        """Whether nothing more will be given out."""
        return self.ending is not None

    def has_token(self, index: int) -> bool:
        """Whether the token at `index` has come, given out or not."""
        return self._sequencer.has_token(index)

    def add(self, output: SequenceOutput) -> None:
        """Take one output of the current attempt, in whatever order it comes.

        Raises:
            EngineError: the worker broke the contract.
        """
        if self.ending is None:
            self.usage.draft_tokens += output.num_draft_tokens
            self.usage.accepted_tokens += output.num_accepted_tokens
            self._sequencer.push(output)

    def note_cached(self, num_tokens: int) -> None:
        """Count prompt tokens that a tier's prefix cache held; the larger of the tiers' counts."""
        if not self.token_ids:
            cached = min(num_tokens, self.usage.prompt_tokens)
            self.usage.cached_tokens = max(self.usage.cached_tokens, cached)

    def take_chunk(self) -> TokenChunk | None:
        """Return what can be given out now and set `ending` if that was all; None: nothing yet.

        Raises:
            EngineError: the workers ended the completion without a single token.
        """
        if self.ending is not None:
            return None
        first_index = len(self.token_ids)
        tokens = self._sequencer.take()
        end = self._sequencer.end
        kept: list[OrderedToken] = []
        text: list[str] = []
        for token in tokens:
            kept.append(token)
            self.token_ids.append(token.token_id)
            is_end = end is not None and len(self.token_ids) == end.num_tokens
            if is_end and end is not None and end.matched_stop_token_id == token.token_id in self._special_token_ids:
                break
            delta = self._text.push(token.token_id)
            text.append(delta.text)
            if delta.matched_stop is not None:
                self.ending = Ending(FinishReason.STOP, matched_stop_str=delta.matched_stop)
                break
        if self.ending is None and end is not None:
            if not self.token_ids:
                raise EngineError("a worker ended the request without a token")
            self._finish(Ending(end.finish_reason, end.matched_stop_token_id), text)
        elif self.ending is None and len(self.token_ids) >= self._max_tokens:
            self._finish(Ending(FinishReason.LENGTH), text)
        self.usage.completion_tokens = len(self.token_ids)
        return self._chunk(first_index, kept, "".join(text))

    def abort(self) -> TokenChunk | None:
        """End it as aborted; returns the text that was still held back, if any."""
        if self.ending is not None:
            return None
        text: list[str] = []
        self._finish(Ending(FinishReason.ABORT), text)
        return self._chunk(len(self.token_ids), [], "".join(text))

    def restart(self) -> None:
        """Forget tokens that came too early to be given out: a new attempt goes on after `token_ids`."""
        self._sequencer.forget_waiting()

    def _finish(self, ending: Ending, text: list[str]) -> None:
        self.ending = ending
        text.append(self._text.flush())
        # The replacement of an incomplete last character may complete a stop string.
        if self._text.matched_stop is not None:
            self.ending = Ending(FinishReason.STOP, matched_stop_str=self._text.matched_stop)

    def _chunk(self, first_index: int, tokens: list[OrderedToken], text: str) -> TokenChunk | None:
        if not tokens and not text:
            return None
        return TokenChunk(
            token_index=first_index,
            token_ids=tuple(token.token_id for token in tokens),
            text=text,
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs is not None),
        )
