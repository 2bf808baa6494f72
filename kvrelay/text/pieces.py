"""What a token's bytes are, for the two piece alphabets in use.

Owns the byte table that makes decoding a plain concatenation, which is what lets a stream be decoded token by token.
Used by `kvrelay/text/tokenizer.py`; the loaders beside it fill it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import tokenizers

SPACE_MARK: Final = "▁"
"""Stands for a space in SentencePiece vocabularies."""


class PieceAlphabet(StrEnum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte-level"
    """Every byte is one printable character (GPT-2)."""
    SENTENCE_PIECE = "sentence-piece"
    """Plain text with `▁` for a space; other bytes are pieces like `<0xE2>`."""


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader found out about a tokenizer."""

    backend: tokenizers.Tokenizer
    alphabet: PieceAlphabet
    pieces: Mapping[int, str]
    """Token id to its spelling in the vocabulary."""
    raw_token_ids: frozenset[int]
    """Tokens that are spelled as plain text whatever the alphabet: special and added ones."""
    special_token_ids: frozenset[int]
    """Control tokens, left out of text on request."""
    prefix_token_ids: tuple[int, ...]
    """What goes before a text that is tokenized with special tokens; usually nothing or the BOS token."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    """Tokens that end a turn or the text."""
    strips_leading_space: bool
    """Whether encoding puts a space before the text, which decoding takes away again."""
    chat_template: str | None
    """Jinja source. None: the model has no chat format."""
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` and the like, as chat templates know them."""


def _byte_level_alphabet() -> dict[int, int]:
    """Return GPT-2's table from character code to byte: printable Latin-1 stands for itself, the rest from 256 up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {code: code for code in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTE_OF_CODE: Final = _byte_level_alphabet()
_CHARACTER_OF_BYTE: Final = {byte: chr(code) for code, byte in _BYTE_OF_CODE.items()}
_BYTE_PIECES: Final = {f"<0x{byte:02X}>": bytes((byte,)) for byte in range(256)}


def byte_level_characters() -> list[str]:
    """Return the 256 characters of the byte-level alphabet, in the order of their bytes."""
    return [_CHARACTER_OF_BYTE[byte] for byte in range(256)]


def token_bytes(parts: TokenizerParts) -> list[bytes]:
    """Return every token's bytes, indexed by token id; ids without a token have none."""
    table = [b""] * (max(parts.pieces, default=-1) + 1)
    for token_id, piece in parts.pieces.items():
        if token_id in parts.raw_token_ids:
            table[token_id] = piece.encode("utf-8")
        elif parts.alphabet is PieceAlphabet.BYTE_LEVEL:
            table[token_id] = _from_byte_level(piece)
        else:
            table[token_id] = _BYTE_PIECES.get(piece) or piece.replace(SPACE_MARK, " ").encode("utf-8")
    return table


def _from_byte_level(piece: str) -> bytes:
    try:
        # All 256 targets are Latin-1, so a character outside the alphabet is what fails here.
        return piece.translate(_BYTE_OF_CODE).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode("utf-8")
