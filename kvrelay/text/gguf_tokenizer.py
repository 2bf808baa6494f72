"""Builds a tokenizer from the metadata of a GGUF file.

Owns the knowledge of GGUF's tokenizer keys and of the pre-tokenizers named by `tokenizer.ggml.pre`. A vocabulary or
pre-tokenizer that is not known is refused by name: a nearly right tokenizer gives silently worse answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE

from kvrelay.errors import InvalidRequest, shown
from kvrelay.formats.gguf_header import read_gguf_metadata
from kvrelay.text.gguf_vocab import TOKENIZER_PREFIX, GgufVocabulary, TokenizerFields, TokenKind, read_gguf_vocabulary
from kvrelay.text.guard import guarded
from kvrelay.text.pieces import SPACE_MARK, PieceAlphabet, TokenizerParts

_ADDED_KINDS: Final = (TokenKind.CONTROL, TokenKind.USER_DEFINED)
_MAX_SENTENCE_PIECE: Final = 512
"""Characters. Finding merges takes time with the square of it; SentencePiece itself makes pieces of at most 16."""

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
    fields = TokenizerFields(read_gguf_metadata(path, lambda key: key.startswith(TOKENIZER_PREFIX)), path)
    kind = fields.text("tokenizer.ggml.model")
    vocabulary = read_gguf_vocabulary(fields.values, path)
    if not vocabulary.pieces:
        raise InvalidRequest("model", f"{path} holds no tokenizer")
    ids: dict[str, int] = {}
    for token_id, piece in enumerate(vocabulary.pieces):
        ids.setdefault(piece, token_id)
    if kind == "gpt2":
        rule = _rule(fields.text("tokenizer.ggml.pre") or "default", path)
        strips_leading_space, adds_bos = False, rule.adds_bos
        backend = guarded(path, lambda: _byte_level_backend(ids, fields, rule))
    elif kind == "llama":
        strips_leading_space, adds_bos = fields.flag("tokenizer.ggml.add_space_prefix", default=True), True
        backend = guarded(path, lambda: _sentence_piece_backend(ids, vocabulary, fields, strips_leading_space))
    else:
        raise InvalidRequest("model", f"{path} has a tokenizer of kind {shown(kind)}; supported are 'gpt2' and 'llama'")
    added = {index: kind for index, kind in enumerate(vocabulary.kinds) if kind in _ADDED_KINDS}
    guarded(path, lambda: _add_tokens(backend, vocabulary.pieces, added))
    bos = vocabulary.bos_token_id
    puts_bos_first = fields.flag("tokenizer.ggml.add_bos_token", default=adds_bos)
    return TokenizerParts(
        backend=backend,
        alphabet=PieceAlphabet.BYTE_LEVEL if kind == "gpt2" else PieceAlphabet.SENTENCE_PIECE,
        pieces=dict(enumerate(vocabulary.pieces)),
        raw_token_ids=frozenset(added),
        special_token_ids=frozenset(token_id for token_id, kind in added.items() if kind == TokenKind.CONTROL),
        prefix_token_ids=(bos,) if bos is not None and puts_bos_first else (),
        bos_token_id=bos,
        eos_token_ids=vocabulary.end_token_ids,
        strips_leading_space=strips_leading_space,
        chat_template=vocabulary.chat_template,
        special_tokens=vocabulary.special_tokens,
    )


def _rule(name: str, path: Path) -> PreTokenizerRule:
    rule = PRE_TOKENIZERS.get(name)
    if rule is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise InvalidRequest("model", f"{path} needs the pre-tokenizer {shown(name)}; supported are {known}")
    return rule


def _byte_level_backend(vocab: dict[str, int], fields: TokenizerFields, rule: PreTokenizerRule) -> Tokenizer:
    merges = []
    for merge in fields.strings("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InvalidRequest("model", f"{fields.path} merges {shown(merge)}, which its vocabulary lacks")
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
    vocab: dict[str, int], vocabulary: GgufVocabulary, fields: TokenizerFields, adds_space: bool
) -> Tokenizer:
    kinds = vocabulary.kinds
    scores = fields.floats("tokenizer.ggml.scores")
    if len(scores) != len(kinds):
        raise InvalidRequest("model", f"{fields.path} has {len(kinds)} tokens but {len(scores)} scores")
    normal = {piece: token_id for piece, token_id in vocab.items() if kinds[token_id] == TokenKind.NORMAL}
    longest = max(normal, key=len, default="")
    if len(longest) > _MAX_SENTENCE_PIECE:
        raise InvalidRequest(
            "model",
            f"{fields.path}: tokenizer.ggml.tokens has a piece of {len(longest)} characters, above "
            f"{_MAX_SENTENCE_PIECE}: {shown(longest)}",
        )
    merges = _merges_by_score(normal, scores)
    unknown = next((piece for piece, token_id in vocab.items() if kinds[token_id] == TokenKind.UNKNOWN), None)
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_MARK)]
    if adds_space:
        steps.insert(0, normalizers.Prepend(SPACE_MARK))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def _merges_by_score(normal: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece would make, best first: any two pieces whose union is a piece."""
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
        return AddedToken(pieces[token_id], normalized=False, special=added[token_id] == TokenKind.CONTROL)

    present = [token_id for token_id in added if pieces[token_id]]
    backend.add_special_tokens([as_token(token_id) for token_id in present if added[token_id] == TokenKind.CONTROL])
    backend.add_tokens([as_token(token_id) for token_id in present if added[token_id] == TokenKind.USER_DEFINED])
