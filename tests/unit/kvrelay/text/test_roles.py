"""Which tokens end a turn and which are control tokens: by id, spelling and template, the same for every role."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import structlog

from engine.model.files.open import load_config
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from tests.unit.kvrelay.text.gguf_files import CONTROL, NORMAL, USER_DEFINED

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LETTERS = ["h", "i", "s"]


def write_model(path: Path, tokens: dict[str, int], template: str = "", **ids: int) -> Path:
    """A GGUF file that the config reader takes, with a byte-level vocabulary of three letters and `tokens`."""
    pieces = [*LETTERS, *tokens]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("embedding_length", 8), ("feed_forward_length", 8), ("block_count", 1), ("context_length", 64)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.attention.head_count", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([NORMAL] * len(LETTERS) + list(tokens.values()))
    for name, token_id in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    if template:
        writer.add_chat_template(template)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(path: Path) -> tuple[Tokenizer, dict[str, int], set[str]]:
    """The tokenizer, its token ids by text, and the texts of the ends of a turn, which workers must know too."""
    tokenizer = load_tokenizer(path)
    texts = {tokenizer.token_bytes(index, False).decode(): index for index in range(tokenizer.vocab_size)}
    assert load_config(str(path)).eos_token_ids == tokenizer.eos_token_ids
    return tokenizer, texts, {text for text, index in texts.items() if index in tokenizer.eos_token_ids}


@pytest.mark.parametrize(
    "spelling",
    ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|end_of_text|>", "<|fim_pad|>", "</s>"],
)
def test_ends_are_known_by_their_spelling_beside_the_id_that_the_file_names(spelling: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", {"<|endoftext|>": CONTROL, spelling: CONTROL}, eos=3)
    assert read(path)[2] == {"<|endoftext|>", spelling}


@pytest.mark.parametrize("key", ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"])
def test_ends_are_known_by_every_id_that_a_file_names(key: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "a.gguf", {"<first>": CONTROL, "<second>": CONTROL}, "", **{key: 4})
    assert read(path)[2] == {"<second>"}


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}<turn/>\n{% endfor %}", {"<turn/>"}),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n<turn/>{% endfor %}", {"<turn/>"}),
        ("{% for m in messages %}<turn/>{{ m.role }}: {{ m.content }}\n{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}his{% endfor %}", set()),
        ("{% for m in messages %}{{ m.content }}<word>{% endfor %}", set()),
        ("{{ raise_exception('other roles, please') }}<turn/>", set()),
        ("{{ messages[0].content }}<turn/>", set()),
    ],
)
def test_what_the_template_writes_behind_an_answer_ends_a_turn(template: str, ends: set[str], tmp_path: Path) -> None:
    tokens = {"<turn/>": USER_DEFINED, "<word>": NORMAL}
    tokenizer, texts, found = read(write_model(tmp_path / "a.gguf", tokens, template))
    assert found == ends
    assert tokenizer.special_token_ids == {texts[text] for text in ends}


def test_an_unmarked_token_that_may_be_markup_stays_text(tmp_path: Path) -> None:
    tokenizer, texts, ends = read(write_model(tmp_path / "a.gguf", {"</s>": NORMAL, "<eos>": NORMAL}))
    assert ends == set()
    assert tokenizer.decode([texts["</s>"]]) == "</s>"
    _, _, ends = read(write_model(tmp_path / "b.gguf", {"</s>": NORMAL}, eos=3))
    assert ends == {"</s>"}


def test_the_end_of_a_channel_is_no_end_where_answers_have_another(tmp_path: Path) -> None:
    tokens = {"<|end|>": CONTROL, "<|return|>": CONTROL}
    assert read(write_model(tmp_path / "a.gguf", tokens))[2] == {"<|return|>"}
    assert read(write_model(tmp_path / "b.gguf", tokens, eos=3))[2] == {"<|end|>", "<|return|>"}


@pytest.mark.parametrize("kind", [USER_DEFINED, NORMAL])
def test_control_tokens_that_a_converter_marked_as_text_are_no_text(kind: int, tmp_path: Path) -> None:
    tokens = {"<|im_start|>": kind, "<|im_end|>": kind, "<think>": USER_DEFINED, "<|other|>": USER_DEFINED}
    path = write_model(tmp_path / "a.gguf", tokens, CHATML + "<think>", eos=4)
    with structlog.testing.capture_logs() as lines:
        tokenizer, texts, ends = read(path)
    assert ends == {"<|im_end|>"}
    token_ids = tokenizer.encode("<|im_start|>his<think><|other|><|im_end|>")
    assert token_ids[0] == texts["<|im_start|>"]
    assert token_ids[-1] == texts["<|im_end|>"]
    assert tokenizer.decode(token_ids) == "his<think><|other|>"
    logged = [line["tokens"] for line in lines if line["event"] == "tokenizer.control_tokens_marked_as_text"]
    assert logged == [["'<|im_start|>'", "'<|im_end|>'"]] * 2


def test_files_that_mark_control_tokens_rightly_are_not_corrected(tmp_path: Path, smollm2_gguf: Path) -> None:
    path = write_model(tmp_path / "a.gguf", {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL}, CHATML, eos=4)
    with structlog.testing.capture_logs() as lines:
        read(path)
        assert load_config(str(smollm2_gguf)).eos_token_ids == load_tokenizer(smollm2_gguf).eos_token_ids
    assert not lines


def write_folder(folder: Path, tokens: dict[str, bool], **files: object) -> Path:
    """A folder that the config reader takes: three letters and added tokens, which are special or not."""
    added = [
        {
            "id": 3 + index,
            "content": text,
            "special": special,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for index, (text, special) in enumerate(tokens.items())
    ]
    model = {"type": "BPE", "vocab": {piece: index for index, piece in enumerate(LETTERS)}, "merges": []}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 3 + len(tokens),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
    }
    contents: dict[str, object] = {
        "tokenizer": {"version": "1.0", "added_tokens": added, "model": model, "decoder": byte_level},
        **files,
        "config": config | {"eos_token_id": files.get("eos")},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_folders_know_ends_by_spelling_and_template_too(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<turn/>{% endfor %}"
    tokens = {"<|endoftext|>": True, "<|im_end|>": False, "<turn/>": False, "<|tool|>": False}
    folder = write_folder(tmp_path, tokens, eos=3, tokenizer_config={"chat_template": template + "<|tool|>"})
    tokenizer, texts, ends = read(folder)
    assert ends == {"<|endoftext|>", "<|im_end|>", "<turn/>"}
    assert tokenizer.decode([0, texts["<|im_end|>"], texts["<|tool|>"], texts["<turn/>"]]) == "h<|tool|>"


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
@pytest.mark.parametrize("token", ["<stop>", {"content": "<stop>"}])
def test_workers_know_the_end_that_only_a_tokenizers_file_names(file: str, token: object, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"<stop>": True}, **{file: {"eos_token": token}})
    assert read(folder)[2] == {"<stop>"}
