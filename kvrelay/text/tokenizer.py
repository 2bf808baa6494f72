"""The tokenizer that the gateway uses, whatever file it came from.

Owns encoding, decoding and chat rendering with one meaning for both sources. Decoding is the concatenation of the
tokens' bytes read as UTF-8, so that `kvrelay/text/stream.py` can do it token by token with the same result.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from kvrelay.errors import InvalidRequest
from kvrelay.text.chat_template import ChatMessage, ChatTemplate
from kvrelay.text.gguf_tokenizer import load_gguf_tokenizer
from kvrelay.text.hf_tokenizer import load_hf_tokenizer
from kvrelay.text.pieces import TokenizerParts, token_bytes

_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def load_tokenizer(path: Path) -> "Tokenizer":
    """Return the tokenizer of a model.

    Args:
        path: A .gguf file, or a folder with tokenizer.json.

    Raises:
        InvalidRequest: There is none, or it is of a kind that is not supported; names the field `model`.
    """
    if path.is_dir():
        return Tokenizer(load_hf_tokenizer(path))
    if path.is_file():
        return Tokenizer(load_gguf_tokenizer(path))
    raise InvalidRequest("model", f"there is no file or folder {path}")


class Tokenizer:
    """Text to token ids and back. Immutable; its methods may be called from any thread."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._bytes = token_bytes(parts)
        self._prefix_token_ids = parts.prefix_token_ids
        self._strips_leading_space = parts.strips_leading_space
        self._chat = ChatTemplate(parts.chat_template, parts.special_tokens) if parts.chat_template else None
        self.vocab_size = len(self._bytes)
        """Number of token ids; a model's own vocabulary may be padded beyond it."""
        self.bos_token_id = parts.bos_token_id
        """Beginning-of-sequence token. None: the model has none."""
        self.eos_token_ids = parts.eos_token_ids
        """Tokens that end a turn or the text."""
        self.special_token_ids = parts.special_token_ids
        """Control tokens; `skip_special_tokens` leaves them out of text."""
        self.max_token_bytes = max((len(piece) for piece in self._bytes), default=0)
        """Length of the longest token: a text of n bytes has at least n / max_token_bytes tokens."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a chat is written."""
        return self._chat is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the text's token ids. Special tokens that the text spells out are taken as such.

        Args:
            text: Any text; lone surrogates, which UTF-8 cannot carry, become U+FFFD.
            add_special_tokens: Whether the model's beginning-of-sequence token goes first, where it has one.
        """
        text = _SURROGATE.sub("\ufffd", text)
        # `encode` of the backend keeps the GIL and would stall every other thread during a long prompt; this does not.
        token_ids: list[int] = self._backend.encode_batch([text], add_special_tokens=False)[0].ids
        return [*self._prefix_token_ids, *token_ids] if add_special_tokens else token_ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True, is_continuation: bool = False) -> str:
        """Return the tokens' text. Bytes that are not UTF-8 become U+FFFD; ids without a token are left out.

        Args:
            token_ids: The tokens.
            skip_special_tokens: Whether control tokens are left out.
            is_continuation: Whether the tokens go on from others. If not, the space that some tokenizers put before a
                text is taken away again.
        """
        data = b"".join(self.token_bytes(token_id, skip_special_tokens) for token_id in token_ids)
        if self._strips_leading_space and not is_continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """Return one token's bytes, which may be part of a character."""
        if not 0 <= token_id < self.vocab_size or (skip_special_tokens and token_id in self.special_token_ids):
            return b""
        return self._bytes[token_id]

    def render_chat(self, messages: Sequence[ChatMessage | tuple[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model's prompt text.

        Raises:
            InvalidRequest: The model has no chat template, or the template refuses the messages.
        """
        if self._chat is None:
            raise InvalidRequest("chat", "the model has no chat template; send text instead")
        turns = [message if isinstance(message, ChatMessage) else ChatMessage(*message) for message in messages]
        return self._chat.render(turns, add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[ChatMessage | tuple[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation's token ids. The template writes its own special tokens, so none are added."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_special_tokens=False)
