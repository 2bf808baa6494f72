"""Incremental detokenization with stop strings.

Owns what may be shown when: never half a character, never text that could still turn out to be a stop string. Knows
nothing of requests; one `TextStream` serves one completion.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token added to the text."""

    text: str
    """New text that is safe to show; may be empty."""
    matched_stop: str | None = None
    """The stop string that ended the text. None: it goes on."""


class TextStream:
    """Turns token ids into text, one at a time, in constant time per character.

    The deltas together are `tokenizer.decode(all ids, is_continuation=True)`, cut at the first stop string. First means
    the one that is complete first, reading character by character; of several that end together, the longest. So the
    result does not depend on where the tokens' borders are.

    Args:
        tokenizer: The model's.
        stop: Strings that end the text; none empty.
        include_stop_str: Whether the stop string itself stays in the text.
        skip_special_tokens: Whether control tokens are left out.
        min_tokens: A stop string counts only if a token beyond this many completes it.

    A stop string that spells exactly one control token ends the text at that token, shown or not.

    Invariants:
        `_held` is a suffix of the text that is the longest proper prefix of some stop string, and has not been shown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._matchers = [_StopMatcher(text) for text in dict.fromkeys(stop) if text]
        self._include_stop_str = include_stop_str
        self._skip_special_tokens = skip_special_tokens
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._hidden_stops = _hidden_stops(tokenizer, stop) if stop and skip_special_tokens else {}
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self._matched_stop: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text. None: it goes on."""
        return self._matched_stop

    def push(self, token_id: int) -> TextDelta:
        """Take the next token and return what it adds. After a stop string, nothing is added any more."""
        self._num_tokens += 1
        hidden = self._hidden_stops.get(token_id)
        if hidden is not None and self._stops_count and self._matched_stop is None:
            text = self.flush()
            if self._matched_stop is None:
                self._matched_stop = hidden
                text += hidden if self._include_stop_str else ""
            return TextDelta(text, self._matched_stop)
        data = self._tokenizer.token_bytes(token_id, self._skip_special_tokens)
        return TextDelta(self._add(self._decoder.decode(data)), self._matched_stop)

    def flush(self) -> str:
        """Return what was held back, at the end of the tokens. An incomplete character becomes U+FFFD."""
        text = self._add(self._decoder.decode(b"", final=True))
        if self._matched_stop is None:
            text, self._held = text + self._held, ""
            for matcher in self._matchers:
                matcher.reset()
        return text

    @property
    def _stops_count(self) -> bool:
        return self._num_tokens > self._min_tokens

    def _add(self, text: str) -> str:
        if self._matched_stop is not None or not text:
            return ""
        if not self._matchers:
            return text
        pending = self._held + text
        first_new = len(self._held)
        for index in range(first_new, len(pending)):
            character = pending[index]
            ended = [matcher.text for matcher in self._matchers if matcher.advance(character)]
            if ended and self._stops_count:
                self._matched_stop = max(ended, key=len)
                self._held = ""
                end = index + 1
                return pending[: end if self._include_stop_str else end - len(self._matched_stop)]
        # What is complete but does not count is ordinary text.
        num_held = max(matcher.num_held for matcher in self._matchers)
        shown = len(pending) - num_held
        self._held = pending[shown:]
        return pending[:shown]


def _hidden_stops(tokenizer: Tokenizer, stop: Sequence[str]) -> dict[int, str]:
    """Return the stop strings that spell a control token, by that token."""
    spellings = {tokenizer.token_bytes(token_id, False): token_id for token_id in tokenizer.special_token_ids}
    by_bytes = {text: text.encode("utf-8", errors="replace") for text in stop}
    return {spellings[spelled]: text for text, spelled in by_bytes.items() if spelled in spellings}


class _StopMatcher:
    """Knuth-Morris-Pratt automaton: how much of the stop string the text so far ends with."""

    __slots__ = ("_failure", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        # _failure[n] is the length of the longest proper prefix of text[:n] that is also its suffix.
        self._failure = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = self._failure[length]
            length += text[length] == character
            self._failure.append(length)

    def advance(self, character: str) -> bool:
        """Take the next character; return whether the stop string is complete."""
        if self.num_matched == len(self.text):
            self.num_matched = self._failure[self.num_matched]
        while self.num_matched and self.text[self.num_matched] != character:
            self.num_matched = self._failure[self.num_matched]
        self.num_matched += self.text[self.num_matched] == character
        return self.num_matched == len(self.text)

    @property
    def num_held(self) -> int:
        """Characters that may still become the stop string."""
        return self._failure[self.num_matched] if self.num_matched == len(self.text) else self.num_matched

    def reset(self) -> None:
        """Forget what was matched."""
        self.num_matched = 0
