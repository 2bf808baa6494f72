"""Builds a tokenizer from the metadata of a GGUF file.

Owns the knowledge of GGUF's tokenizer keys and of the pre-tokenizers named by `tokenizer.ggml.pre`. A vocabulary or
pre-tokenizer that is not known is refused by name: a nearly right tokenizer gives silently worse answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from engine.errors import InvalidRequest
from engine.gguf_header import GgufValue, read_gguf_metadata
from engine.text.pieces import SPACE_MARK, PieceAlphabet, TokenizerParts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PREFIX: Final = "tokenizer."

# Each alternative is one kind of piece: contractions, words, numbers, punctuation, white space.
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizerRule:
    """How text is cut before merges are applied."""

    patterns: tuple[str, ...]
    """Applied one after the other; every match is a piece of its own."""
    is_nfc: bool = False
    """Whether text is brought into Unicode's composed form first."""
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole is taken without merging."""
    adds_bos: bool = False
    """What holds when the file does not say whether BOS goes first."""


_DEFAULT_RULE: Final = PreTokenizerRule(
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
)
_GPT2_RULE: Final = PreTokenizerRule((_GPT2,))
_DIGITS_RULE: Final = PreTokenizerRule((r"\p{N}", _GPT2))
_LLAMA3_RULE: Final = PreTokenizerRule((_LLAMA3,), ignores_merges=True, adds_bos=True)
_QWEN2_RULE: Final = PreTokenizerRule((_QWEN2,), is_nfc=True)
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizerRule]] = {
    "default": _DEFAULT_RULE,
    "gpt-2": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "qwen2": _QWEN2_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "tekken": PreTokenizerRule((_TEKKEN,), ignores_merges=True, adds_bos=True),
}
"""By the name in `tokenizer.ggml.pre`."""


def load_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Return the tokenizer that a GGUF file carries.

    Raises:
        InvalidRequest: The file is broken, has no tokenizer, or one of a kind that is not supported.
    """
    metadata = _Metadata(read_gguf_metadata(path, lambda key: key.startswith(_PREFIX)), path)
    kind = metadata.text("tokenizer.ggml.model")
    pieces = metadata.strings("tokenizer.ggml.tokens")
    if not pieces:
        raise InvalidRequest("model", f"{path} holds no tokenizer")
    types = metadata.numbers("tokenizer.ggml.token_type") or [_NORMAL] * len(pieces)
    if len(types) != len(pieces):
        raise InvalidRequest("model", f"{path} has {len(pieces)} tokens but {len(types)} token types")
    vocab: dict[str, int] = {}
    for token_id, piece in enumerate(pieces):
        vocab.setdefault(piece, token_id)
    if kind == "gpt2":
        rule = _rule(metadata.text("tokenizer.ggml.pre") or "default", path)
        backend, adds_bos, strips_leading_space = _byte_level_backend(vocab, metadata, rule), rule.adds_bos, False
    elif kind == "llama":
        strips_leading_space = metadata.flag("tokenizer.ggml.add_space_prefix", default=True)
        backend, adds_bos = _sentence_piece_backend(vocab, types, metadata, strips_leading_space), True
    else:
        raise InvalidRequest("model", f"{path} has a tokenizer of kind {kind!r}; supported are 'gpt2' and 'llama'")
    added = {index: kind for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    _add_tokens(backend, pieces, added)
    return _parts(
        metadata,
        backend,
        pieces,
        added,
        is_byte_level=kind == "gpt2",
        adds_bos=adds_bos,
        strips_leading_space=strips_leading_space,
    )


def _rule(name: str, path: Path) -> PreTokenizerRule:
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise InvalidRequest("model", f"{path} needs the pre-tokenizer {name!r}; supported are {known}")
    return rule


def _byte_level_backend(vocab: dict[str, int], metadata: "_Metadata", rule: PreTokenizerRule) -> Tokenizer:
    merges = []
    for merge in metadata.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InvalidRequest("model", f"{metadata.path} merges {merge!r}, which its vocabulary lacks")
        merges.append((left, right))
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignores_merges))
    if rule.is_nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rule.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return backend


def _sentence_piece_backend(
    vocab: dict[str, int], types: Sequence[int], metadata: "_Metadata", adds_space: bool
) -> Tokenizer:
    scores = metadata.floats("tokenizer.ggml.scores")
    if len(scores) != len(types):
        raise InvalidRequest("model", f"{metadata.path} has {len(types)} tokens but {len(scores)} scores")
    merges = _merges_by_score(vocab, types, scores)
    unknown = next((piece for piece, token_id in vocab.items() if types[token_id] == _UNKNOWN), None)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if adds_space:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_by_score(vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece would make, best first: any two pieces whose union is a piece."""
    normal = {piece: token_id for piece, token_id in vocab.items() if types[token_id] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in normal.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[token_id], normal[left], normal[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]


def _add_tokens(backend: Tokenizer, pieces: Sequence[str], added: Mapping[int, int]) -> None:
    def as_token(token_id: int) -> AddedToken:
        return AddedToken(pieces[token_id], normalized=False, special=added[token_id] == _CONTROL)

    present = [token_id for token_id in added if pieces[token_id]]
    backend.add_special_tokens([as_token(token_id) for token_id in present if added[token_id] == _CONTROL])
    backend.add_tokens([as_token(token_id) for token_id in present if added[token_id] == _USER_DEFINED])


def _parts(
    metadata: "_Metadata",
    backend: Tokenizer,
    pieces: Sequence[str],
    added: Mapping[int, int],
    *,
    is_byte_level: bool,
    adds_bos: bool,
    strips_leading_space: bool,
) -> TokenizerParts:
    bos = metadata.token_id("bos", len(pieces))
    ends = [metadata.token_id(name, len(pieces)) for name in ("eos", "eot", "eom")]
    named = {
        "bos_token": bos,
        "eos_token": ends[0],
        "unk_token": metadata.token_id("unknown", len(pieces)),
        "pad_token": metadata.token_id("padding", len(pieces)),
    }
    puts_bos_first = bos is not None and metadata.flag("tokenizer.ggml.add_bos_token", default=adds_bos)
    return TokenizerParts(
        backend=backend,
        alphabet=PieceAlphabet.BYTE_LEVEL if is_byte_level else PieceAlphabet.SENTENCE_PIECE,
        pieces=dict(enumerate(pieces)),
        raw_token_ids=frozenset(added),
        special_token_ids=frozenset(token_id for token_id, kind in added.items() if kind == _CONTROL),
        prefix_token_ids=(bos,) if bos is not None and puts_bos_first else (),
        bos_token_id=bos,
        eos_token_ids=frozenset(token_id for token_id in ends if token_id is not None),
        strips_leading_space=strips_leading_space,
        chat_template=metadata.text("tokenizer.chat_template") or None,
        special_tokens={name: pieces[token_id] for name, token_id in named.items() if token_id is not None},
    )


class _Metadata:
    """Typed access to the tokenizer's keys; a value of another type is refused by its key."""

    def __init__(self, values: Mapping[str, GgufValue], path: Path) -> None:
        self._values = values
        self.path = path

    def _wrong(self, key: str) -> InvalidRequest:
        return InvalidRequest("model", f"{self.path} has a value of the wrong type under {key}")

    def text(self, key: str) -> str:
        value = self._values.get(key, "")
        if not isinstance(value, str):
            raise self._wrong(key)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key)
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, int):
            raise self._wrong(key)
        # Some converters write 2^32 - 1 for "none".
        return value if 0 <= value < vocab_size else None

    def strings(self, key: str) -> list[str]:
        return [value if isinstance(value, str) else self._refuse(key) for value in self._list(key)]

    def numbers(self, key: str) -> list[int]:
        return [value if isinstance(value, int) else self._refuse(key) for value in self._list(key)]

    def floats(self, key: str) -> list[float]:
        return [float(value) if isinstance(value, int | float) else self._refuse(key) for value in self._list(key)]

    def _list(self, key: str) -> list[GgufValue]:
        value = self._values.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key)
        return value

    def _refuse(self, key: str) -> NoReturn:
        raise self._wrong(key)
