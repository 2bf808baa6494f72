"""The vocabulary in a GGUF file's metadata: spellings, kinds, and which tokens end a turn. Reads no file itself.

Owns the keys under `tokenizer.` that are about single tokens, and typed access to all of them. How text is cut into
tokens is `kvrelay/text/gguf_tokenizer.py`'s matter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, NoReturn

import structlog

from kvrelay.errors import InvalidRequest, shown
from kvrelay.formats.gguf_header import GgufValue
from kvrelay.text.chat_template import ChatTemplate
from kvrelay.text.roles import find_roles, may_have_role

_log = structlog.get_logger(__name__)

TOKENIZER_PREFIX: Final = "tokenizer."
_ENDS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NAMED: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_NO_TOKEN: Final = (1 << 32) - 1
"""How some converters write that there is no such token."""
_MAX_LOGGED: Final = 8


class TokenKind(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token; others than these are treated like NORMAL."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokens by id, with their roles."""

    pieces: tuple[str, ...]
    """Spellings; empty if the file holds no tokenizer."""
    kinds: tuple[int, ...]
    """Of each piece, `TokenKind` where that knows it. Control tokens are marked as such even if the file does not."""
    bos_token_id: int | None
    end_token_ids: frozenset[int]
    """Tokens that end a turn or the text."""
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and the like, as chat templates know them."""
    chat_template: str | None
    """Jinja source. None: the model has no chat format."""


def read_gguf_vocabulary(metadata: Mapping[str, GgufValue], path: Path) -> GgufVocabulary:
    """Return what a file's metadata says of its tokens.

    Args:
        metadata: All keys that begin with `TOKENIZER_PREFIX`; others may be there too.
        path: For messages.

    Raises:
        InvalidRequest: A value is of the wrong type, or names a token that cannot be; names the field `model`.
    """
    fields = TokenizerFields(metadata, path)
    pieces = fields.strings("tokenizer.ggml.tokens")
    kinds = fields.numbers("tokenizer.ggml.token_type") or [TokenKind.NORMAL] * len(pieces)
    if not pieces:
        kinds = []
    if len(kinds) != len(pieces):
        raise InvalidRequest("model", f"{path} has {len(pieces)} tokens but {len(kinds)} token types")
    ids = {name: fields.token_id(name, len(pieces)) for name in (*_ENDS, *_NAMED.values())}
    special_tokens = {
        name: pieces[token_id]
        for name, key in _NAMED.items()
        if (token_id := ids[key]) is not None and token_id < len(pieces)
    }
    source = fields.text("tokenizer.chat_template") or None
    marked = {token_id for token_id, kind in enumerate(kinds) if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED)}
    named = {token_id for token_id in ids.values() if token_id is not None and token_id != ids["unknown"]}
    spelled: dict[str, int] = {}
    for token_id, piece in enumerate(pieces):
        if token_id in marked or token_id in named or may_have_role(piece):
            spelled.setdefault(piece, token_id)
    roles = find_roles(
        spelled,
        marked=marked,
        control=[token_id for token_id in marked if kinds[token_id] == TokenKind.CONTROL],
        named=named,
        named_ends=[token_id for name in _ENDS if (token_id := ids[name]) is not None],
        template=ChatTemplate(source, special_tokens) if source else None,
    )
    return GgufVocabulary(
        pieces=tuple(pieces),
        kinds=_corrected(pieces, kinds, roles.control_token_ids, path),
        bos_token_id=ids["bos"],
        end_token_ids=roles.end_token_ids,
        special_tokens=special_tokens,
        chat_template=source,
    )


def _corrected(pieces: list[str], kinds: list[int], control: frozenset[int], path: Path) -> tuple[int, ...]:
    wrong = sorted(token_id for token_id in control if kinds[token_id] != TokenKind.CONTROL)
    if not wrong:
        return tuple(kinds)
    for token_id in wrong:
        kinds[token_id] = TokenKind.CONTROL
    names = [shown(pieces[token_id]) for token_id in wrong[:_MAX_LOGGED]]
    _log.warning("tokenizer.control_tokens_marked_as_text", file=str(path), num_tokens=len(wrong), tokens=names)
    return tuple(kinds)


class TokenizerFields:
    """Typed access to the tokenizer's keys; a value of another type is refused by its key."""

    def __init__(self, values: Mapping[str, GgufValue], path: Path) -> None:
        self.values = values
        self.path = path

    def _wrong(self, key: str, wanted: str, value: GgufValue) -> InvalidRequest:
        return InvalidRequest("model", f"{self.path}: {key} must be {wanted}, not {shown(value)}")

    def text(self, key: str) -> str:
        """A text; empty if it is not there."""
        value = self.values.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def token_id(self, name: str, num_tokens: int) -> int | None:
        """The token under `tokenizer.ggml.<name>_token_id`; None = there is none.

        An id behind the last token is none either, as llama.cpp has it, unless the file holds no tokens at all.
        """
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.values.get(key)
        if value is None or value == _NO_TOKEN:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "a token id", value)
        if value < 0:
            raise self._wrong(key, "at least 0", value)
        return value if not num_tokens or value < num_tokens else None

    def strings(self, key: str) -> list[str]:
        """A list of texts; empty if it is not there."""
        return [value if isinstance(value, str) else self._refuse(key, "texts", value) for value in self._list(key)]

    def numbers(self, key: str) -> list[int]:
        """A list of integers; empty if it is not there."""
        return [value if isinstance(value, int) else self._refuse(key, "integers", value) for value in self._list(key)]

    def floats(self, key: str) -> list[float]:
        """A list of numbers; empty if it is not there."""
        return [
            float(value) if isinstance(value, int | float) else self._refuse(key, "numbers", value)
            for value in self._list(key)
        ]

    def _list(self, key: str) -> list[GgufValue]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list", value)
        return value

    def _refuse(self, key: str, wanted: str, value: GgufValue) -> NoReturn:
        raise self._wrong(key, f"a list of {wanted}", value)
