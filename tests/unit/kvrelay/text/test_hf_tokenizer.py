"""Tokenizers from Hugging Face folders: their files, their special tokens, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvrelay.errors import InvalidRequest
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def byte_level_backend(with_bos: bool = True) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate([*alphabet, "he", "hel", "hell", "hello"])}
    merges = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    backend.add_tokens(["<tool>"])
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            special_tokens=[("<s>", backend.token_to_id("<s>")), ("</s>", backend.token_to_id("</s>"))],
        )
    return backend


def write_folder(folder: Path, backend: Backend, **files: Any) -> Path:
    (folder / "tokenizer.json").write_text(backend.to_str())
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **files.pop("config", {})}))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    files = {"generation_config__json": {"eos_token_id": [257, 258]}}
    return load_tokenizer(write_folder(tmp_path, byte_level_backend(), **files))


def test_ids_and_limits_are_read(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 264
    assert tokenizer.bos_token_id == 260
    assert tokenizer.eos_token_ids == {257, 258, 261}
    assert tokenizer.special_token_ids == {260, 261, 262}
    assert tokenizer.max_token_bytes == len("<|eot|>")
    assert tokenizer.has_chat_template


def test_bos_goes_first_and_nothing_goes_last(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello") == [260, 259]
    assert tokenizer.encode("") == [260]
    assert tokenizer.encode("hello", add_special_tokens=False) == [259]


def test_config_decides_over_the_post_processor(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend(), config={"add_bos_token": False}))
    assert tokenizer.encode("hello") == [259]


def test_no_bos_without_a_post_processor(tmp_path: Path) -> None:
    assert load_tokenizer(write_folder(tmp_path, byte_level_backend(with_bos=False))).encode("hello") == [259]


def test_chat_has_one_bos_only(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode_chat([("user", "hello")])
    assert token_ids.count(260) == 1
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>[user]hello"


def test_special_tokens_are_skipped_and_added_ones_stay(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("hello<|eot|><tool> ünï🙂")
    assert tokenizer.decode(token_ids) == "hello<tool> ünï🙂"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>hello<|eot|><tool> ünï🙂"


def test_ids_without_a_token_are_left_out(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([259, 100_000, -1]) == "hello"


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    files = {"chat_template__jinja": "from the file"}
    assert load_tokenizer(write_folder(tmp_path, byte_level_backend(), **files)).render_chat([("user", "x")]) == (
        "from the file"
    )


def test_default_of_several_templates_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = write_folder(tmp_path, byte_level_backend(), config={"chat_template": several})
    assert load_tokenizer(folder).render_chat([("user", "x")]) == "yes"


def test_model_without_a_template_refuses_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, byte_level_backend(), config={"chat_template": None}))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.render_chat([("user", "x")])
    assert caught.value.field == "chat"


def test_sentence_piece_folder_round_trip(tmp_path: Path) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b"]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=[("▁", "a")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    tokenizer = load_tokenizer(write_folder(tmp_path, backend))
    for text in ("a b", " a", "", "é🙂", "ab a"):
        token_ids = tokenizer.encode(text)
        assert tokenizer.decode(token_ids) == text == backend.decode(token_ids)
    assert tokenizer.decode(tokenizer.encode("a"), is_continuation=True) == " a"


def test_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    backend = Backend(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(InvalidRequest, match="decoder WordPiece"):
        load_tokenizer(write_folder(tmp_path, backend))


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("tokenizer.json", "{", "not a sound tokenizer"),
        ("tokenizer_config.json", "[1]", "must hold an object"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("generation_config.json", "nonsense", "cannot read"),
    ],
)
def test_broken_files_are_refused_with_the_reason(file: str, content: str, why: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend())
    (folder / file).write_text(content)
    with pytest.raises(InvalidRequest, match=why):
        load_tokenizer(folder)


def test_missing_model_and_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot read"):
        load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="no file or folder"):
        load_tokenizer(tmp_path / "none")


def test_broken_template_is_refused_at_load(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level_backend(), config={"chat_template": "{% if %}"})
    with pytest.raises(InvalidRequest, match="chat template cannot be compiled") as caught:
        load_tokenizer(folder)
    assert caught.value.field == "model"
