"""The model's tokenizer as the gateway uses it: prompts to tokens, tokens to text, long ones on a thread.

Owns which work leaves the event loop. What the tokens mean is in `kvrelay/text`.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import TypeVar

from engine.types import SamplingParams
from gateway.relay.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from kvrelay.errors import InvalidRequest
from kvrelay.text.stream import TextStream
from kvrelay.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")

INLINE_BYTES = 4_096
"""Texts up to this size are tokenized on the event loop: about a millisecond, less than a thread hop under load."""
INLINE_TOKENS = 4_096
"""Token lists up to this length are decoded on the event loop."""
_NUM_THREADS = 2
"""Few: long prompts wait for one another rather than take the cores from the loop."""


class TokenizerService:
    """Tokenizes for one event loop. Close it at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self.vocab_size = tokenizer.vocab_size
        """Number of token ids that have a text."""
        self.special_token_ids = tokenizer.special_token_ids
        """Control tokens."""
        self.max_token_bytes = max(1, tokenizer.max_token_bytes)
        """Length of the longest token."""
        self.has_chat_template = tokenizer.has_chat_template
        """Whether chat prompts work."""

    async def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Return a prompt's tokens.

        Raises:
            InvalidRequest: the chat template refuses the messages, or there is none.
        """
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                return tuple(await self._run(len(text), lambda: self._tokenizer.encode(text)))
            case ChatPrompt(messages, add_generation_prompt):
                turns = [(message.role, message.content) for message in messages]
                size = sum(len(message.role) + len(message.content) for message in messages)
                return tuple(await self._run(size, lambda: self._tokenizer.encode_chat(turns, add_generation_prompt)))

    def common_prefix(self) -> tuple[int, ...]:
        """Return the tokens that every chat begins with, whatever its user says: the template's own."""
        if not self.has_chat_template:
            return ()
        try:
            first, second = (self._tokenizer.encode_chat([("user", text)]) for text in ("a", "Why?"))
        except InvalidRequest:
            return ()  # a template that wants more than one user's turn
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
        return tuple(token_id for token_id, _ in pairs)

    async def encode_bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that write these words, at the start of a text and after a space."""

        def encode() -> tuple[tuple[int, ...], ...]:
            spellings = [spelling for word in words for spelling in (word, f" {word}")]
            encoded = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spellings)
            return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

        return await self._run(2 * sum(len(word) for word in words), encode) if words else ()

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return tokens' text."""
        size = len(token_ids) * INLINE_BYTES // INLINE_TOKENS
        return await self._run(size, lambda: self._tokenizer.decode(token_ids, skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Return one token's text, control tokens included; a part of a character is a replacement sign."""
        return self._tokenizer.decode((token_id,), False)

    def text_stream(self, params: SamplingParams) -> TextStream:
        """Return what turns one completion's tokens into text."""
        return TextStream(
            self._tokenizer, params.stop, params.include_stop_str, params.skip_special_tokens, params.min_tokens
        )

    def close(self) -> None:
        """End the threads; work that has begun is finished first."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _run(self, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
