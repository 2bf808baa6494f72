"""Builds a tokenizer from a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat_template.jinja.

Owns the reading of those files. A decoder that is not known is refused by name. No code from the folder is ever run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers

from engine.errors import InvalidRequest
from engine.text.pieces import PieceAlphabet, TokenizerParts

_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_hf_tokenizer(folder: Path) -> TokenizerParts:
    """Return the tokenizer of a model folder.

    Raises:
        InvalidRequest: A file is missing or broken, or the tokenizer is of a kind that is not supported.
    """
    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest("model", f"cannot read {path}: {error.strerror}") from error
    except Exception as error:
        # The library raises plain Exception for whatever it dislikes.
        raise InvalidRequest("model", f"{path} is not a sound tokenizer: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    alphabet, strips_leading_space = _read_decoder(backend, path)
    added = backend.get_added_tokens_decoder()
    special_tokens = dict(_special_tokens(config))
    bos_token_id = _id_of(backend, special_tokens.get("bos_token"))
    return TokenizerParts(
        backend=backend,
        alphabet=alphabet,
        pieces={token_id: piece for piece, token_id in backend.get_vocab(with_added_tokens=True).items()},
        raw_token_ids=frozenset(added),
        special_token_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        prefix_token_ids=_prefix_token_ids(backend, config, bos_token_id),
        bos_token_id=bos_token_id,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        strips_leading_space=strips_leading_space,
        chat_template=_chat_template(folder, config),
        special_tokens=special_tokens,
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Return the file's object; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest("model", f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise InvalidRequest("model", f"{path} must hold an object")
    return content


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
    shown = ", ".join(kinds) or "none"
    raise InvalidRequest("model", f"{path} has the decoder {shown}; supported are ByteLevel, ByteFallback, Metaspace")


def _special_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        # Older files hold an object, newer ones the text.
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield name, text


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


def _prefix_token_ids(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], bos_token_id: int | None
) -> tuple[int, ...]:
    """Return what the tokenizer puts before a text. What it would put after it is left out: the model is to go on."""
    if bos_token_id is not None and isinstance(config.get("add_bos_token"), bool):
        return (bos_token_id,) if config["add_bos_token"] else ()
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    """Return the union of what the folder's files call the end: a chat model often has two such tokens."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if isinstance(token_id, int) and token_id >= 0:
                found.add(token_id)
    eos = _id_of(backend, special_tokens.get("eos_token"))
    if eos is not None:
        found.add(eos)
    return frozenset(found)


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest("model", f"cannot read {path}: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
