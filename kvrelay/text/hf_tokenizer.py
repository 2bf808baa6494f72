"""Builds a tokenizer from a Hugging Face folder, from its tokenizer.json.

Owns the reading of that file; `kvrelay/text/hf_vocab.py` finds special tokens and the chat template. A decoder that is
not known is refused by name. No code from the folder is ever run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from kvrelay.errors import InvalidRequest, shown
from kvrelay.text.guard import guarded
from kvrelay.text.hf_vocab import HfVocabulary, read_hf_vocabulary
from kvrelay.text.pieces import PieceAlphabet, TokenizerParts

_MOST_UNUSED_IDS: Final = 1 << 16
"""Tables are as long as the largest id: so many ids may have no token, or as many as have one if that is more."""


def load_hf_tokenizer(folder: Path) -> TokenizerParts:
    """Return the tokenizer of a model folder.

    Raises:
        InvalidRequest: A file is missing or broken, or the tokenizer is of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", f"cannot read {path}: {error}") from error
    backend = guarded(path, lambda: _read_backend(content))
    pieces = {token_id: piece for piece, token_id in backend.get_vocab(with_added_tokens=True).items()}
    _check_ids(pieces, path)  # before anything else: the library itself walks up to the largest id
    vocabulary = read_hf_vocabulary(folder)
    alphabet, strips_leading_space = guarded(path, lambda: _read_decoder(backend, path))
    return TokenizerParts(
        backend=backend,
        alphabet=alphabet,
        pieces=pieces,
        raw_token_ids=frozenset(backend.get_added_tokens_decoder()),
        special_token_ids=vocabulary.special_token_ids,
        prefix_token_ids=guarded(path, lambda: _prefix_token_ids(backend, vocabulary)),
        bos_token_id=vocabulary.bos_token_id,
        eos_token_ids=vocabulary.end_token_ids,
        strips_leading_space=strips_leading_space,
        chat_template=vocabulary.chat_template,
        special_tokens=vocabulary.special_tokens,
    )


def _read_backend(content: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(content)
    backend.no_padding()
    backend.no_truncation()
    return backend


def _check_ids(pieces: Mapping[int, str], path: Path) -> None:
    largest = max(pieces, default=0)
    if largest >= len(pieces) + max(len(pieces), _MOST_UNUSED_IDS):
        raise InvalidRequest(
            "model", f"{path} gives the id {largest} to {shown(pieces[largest])}, but has {len(pieces)} tokens only"
        )


def _steps(spec: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the decoder's steps in order; a sequence is flattened."""
    if isinstance(spec, dict):
        if spec.get("type") == "Sequence":
            for step in spec.get("decoders", ()):
                yield from _steps(step)
        else:
            yield spec


def _read_decoder(backend: tokenizers.Tokenizer, path: Path) -> tuple[PieceAlphabet, bool]:
    """Return the alphabet and whether decoding takes away one leading space."""
    steps = list(_steps(json.loads(backend.to_str()).get("decoder"))) if backend.decoder is not None else []
    kinds = [str(step.get("type")) for step in steps]
    if "ByteLevel" in kinds:
        return PieceAlphabet.BYTE_LEVEL, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(
            (step.get("type") == "Strip" and step.get("start", 0) > 0)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
            for step in steps
        )
        return PieceAlphabet.SENTENCE_PIECE, strips
    found = ", ".join(kinds) or "none"
    raise InvalidRequest("model", f"{path} has the decoder {found}; supported are ByteLevel, ByteFallback, Metaspace")


def _prefix_token_ids(backend: tokenizers.Tokenizer, vocabulary: HfVocabulary) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text. What it would put after it is left out: the model is to go on."""
    if vocabulary.bos_token_id is not None and vocabulary.adds_bos is not None:
        return (vocabulary.bos_token_id,) if vocabulary.adds_bos else ()
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
