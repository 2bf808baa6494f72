"""Tokenizers from GGUF files: pre-tokenizers, SentencePiece merges, special tokens, and what is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequest
from kvrelay.text.gguf_tokenizer import PRE_TOKENIZERS
from kvrelay.text.pieces import byte_level_characters
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer

from .gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Value, write_gguf

SPM_WORDS = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁ab", "▁abc", "aa", "▁▁", "é", "bcb", "cb"]


def spm_metadata(**changes: Value) -> dict[str, Value]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, "<|tool|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *([BYTE] * 256), *([NORMAL] * len(SPM_WORDS)), USER_DEFINED]
    scores = [0.0] * 259 + [-float(index % 7) - index / 100 for index in range(len(SPM_WORDS))] + [0.0]
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def bpe_metadata(pre: str, words: tuple[str, ...] = (), **changes: Value) -> dict[str, Value]:
    """A byte-level vocabulary whose merges build exactly `words`, each from its first two characters on."""
    pieces, merges = byte_level_characters(), []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    pieces += ["<|begin|>", "<|end|>"]
    types = [NORMAL] * (len(pieces) - 2) + [CONTROL, CONTROL]
    metadata: dict[str, Value] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(pieces) - 2,
        "tokenizer.ggml.eos_token_id": len(pieces) - 1,
    }
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def load(tmp_path: Path, metadata: dict[str, Value]) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path / "model.gguf", metadata))


def naive_sentence_piece(text: str) -> list[int]:
    """Merge the adjacent pair with the best score, leftmost first, until none is left; the definition itself."""
    metadata = spm_metadata()
    pieces, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    assert isinstance(pieces, list)
    assert isinstance(scores, list)
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        best: tuple[float, int] | None = None
        for index in range(len(symbols) - 1):
            union = symbols[index] + symbols[index + 1]
            if union in SPM_WORDS:
                score = scores[pieces.index(union)]
                if best is None or score > best[0]:
                    best = (score, index)
        if best is None:
            break
        index = best[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
    token_ids: list[int] = []
    for symbol in symbols:
        if symbol in SPM_WORDS:
            token_ids.append(pieces.index(symbol))
        else:
            token_ids += [3 + byte for byte in symbol.encode()]
    return token_ids


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(tmp_path_factory.mktemp("spm"), spm_metadata())


@given(text=st.text(alphabet="abc é🙂\n", max_size=24))
def test_sentence_piece_equals_its_definition(spm: Tokenizer, text: str) -> None:
    assert spm.encode(text, add_special_tokens=False) == naive_sentence_piece(text)


@given(text=st.text(max_size=40))
def test_sentence_piece_round_trip(spm: Tokenizer, text: str) -> None:
    # `▁` is SentencePiece's spelling of a space, so the two cannot be told apart.
    expected = text.replace("▁", " ")
    if not any(special in text for special in ("<s>", "</s>", "<unk>", "<|tool|>")):
        assert spm.decode(spm.encode(text)) == expected


def test_bos_goes_first_where_the_model_has_one(spm: Tokenizer, tmp_path: Path) -> None:
    assert spm.encode("ab")[0] == 1
    assert 1 not in spm.encode("ab", add_special_tokens=False)
    without = load(tmp_path, spm_metadata(add_bos_token=False))
    assert 1 not in without.encode("ab")


def test_special_tokens_in_text_are_parsed_and_left_out_again(spm: Tokenizer) -> None:
    token_ids = spm.encode("<s>ab</s>", add_special_tokens=False)
    assert token_ids[0] == 1
    assert token_ids[-1] == 2
    assert spm.decode(token_ids) == "ab"
    assert spm.decode(token_ids, skip_special_tokens=False) == "<s> ab</s>"


def test_user_defined_tokens_are_text_that_stays(spm: Tokenizer) -> None:
    token_ids = spm.encode("ab<|tool|>", add_special_tokens=False)
    assert len(token_ids) == 2
    assert spm.decode(token_ids) == "ab<|tool|>"


def test_continuation_keeps_the_leading_space(spm: Tokenizer) -> None:
    token_ids = spm.encode("ab", add_special_tokens=False)
    assert spm.decode(token_ids) == "ab"
    assert spm.decode(token_ids, is_continuation=True) == " ab"


def test_no_space_prefix_when_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, spm_metadata(add_space_prefix=False))
    assert tokenizer.decode(tokenizer.encode("ab", add_special_tokens=False), is_continuation=True) == "ab"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_digits_are_single_tokens_for_smollm_and_groups_of_three_for_llama(tmp_path: Path) -> None:
    words = ("1234",)
    smollm = load(tmp_path, bpe_metadata("smollm", words))
    assert len(smollm.encode("1234")) == 4
    llama = load(tmp_path, bpe_metadata("llama-bpe", words))
    assert len(llama.encode("1234", add_special_tokens=False)) == 2
    gpt2 = load(tmp_path, bpe_metadata("gpt-2", words))
    assert len(gpt2.encode("1234")) == 1
    qwen2 = load(tmp_path, bpe_metadata("qwen2", words))
    assert len(qwen2.encode("1234")) == 4


def test_qwen2_composes_characters_first(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, bpe_metadata("qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == "é"


def test_llama_bpe_puts_bos_first_unless_told_otherwise(tmp_path: Path) -> None:
    metadata = bpe_metadata("llama-bpe")
    bos = metadata["tokenizer.ggml.bos_token_id"]
    assert load(tmp_path, metadata).encode("a")[0] == bos
    assert load(tmp_path, bpe_metadata("llama-bpe", add_bos_token=False)).encode("a")[0] != bos
    assert load(tmp_path, bpe_metadata("gpt-2")).encode("a")[0] != bos


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@given(text=st.text(max_size=60))
def test_every_pre_tokenizer_loses_nothing(pre: str, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    tokenizer = _cached(pre, tmp_path_factory)
    if PRE_TOKENIZERS[pre].is_nfc:
        return
    if "<|" not in text:
        assert tokenizer.decode(tokenizer.encode(text)) == text


_CACHE: dict[str, Tokenizer] = {}


def _cached(pre: str, factory: pytest.TempPathFactory) -> Tokenizer:
    if pre not in _CACHE:
        _CACHE[pre] = load(factory.mktemp("bpe"), bpe_metadata(pre, ("Ġhello", "Ġworld", "12")))
    return _CACHE[pre]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "t5"}, "kind 't5'"),
        ({"pre": "deepseek-llm"}, "pre-tokenizer 'deepseek-llm'"),
        ({"token_type": [1, 1]}, "token types"),
        ({"merges": ["x nothing"]}, "vocabulary lacks"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"tokens": []}, "holds no tokenizer"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(changes: dict[str, Value], why: str, tmp_path: Path) -> None:
    metadata = bpe_metadata("gpt-2")
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    with pytest.raises(InvalidRequest, match=why) as caught:
        load(tmp_path, metadata)
    assert caught.value.field == "model"


def test_id_beyond_the_vocabulary_means_none(tmp_path: Path) -> None:
    for beyond in (1_000_000, 2**31 - 1):
        metadata = bpe_metadata("gpt-2", eos_token_id=beyond)
        (end,) = load(tmp_path, metadata).encode("<|end|>")  # known by its spelling
        assert load(tmp_path, metadata).eos_token_ids == {end}
