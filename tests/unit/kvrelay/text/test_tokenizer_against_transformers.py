"""The SmolLM2 tokenizer built from GGUF gives the ids that transformers' own conversion gives."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvrelay.text.tokenizer import Tokenizer

SAMPLES = (
    "",
    " ",
    "  two  spaces  ",
    "\n\n\n",
    "\t\tindented\r\n  more\r\n",
    "Hello, world! It's 2024-11-29, isn't it? WE'LL SEE.",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # 1_000\n",
    "for (int i = 0; i < 10; ++i) { a[i] += 3.14e-10f; }",
    '{"key": [1, 22, 333, 4444, 55555], "é": "\\u00e9"}',
    "Die Größe der Straße ist fünfundzwanzig Meter.",
    "日本語のテキストと漢字、そしてカタカナ。",
    "Привет, как дела? Всё хорошо!",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumb, e\u0301 combining",
    "zero\u200bwidth\u00a0nbsp\u2003em\u3000ideographic",
    "x" * 300,
    "ab " * 100,
    "1234567890" * 5,
    "½ ² ① Ⅷ ४२",
    "https://example.org/a/b?c=d&e=%20f#g",
    "!!!???...;;;:::---___***",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|>text<repo_name>x<file_sep>",
    "\x00\x01\x7f",
    "don't  can't\twon't y'all'll",
)


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Any:
    # Imported here: it costs seconds that only these tests should pay.
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    # The conversion leaves out what `tokenizer.ggml.pre = smollm` says: that each digit stands alone.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def random_texts(count: int) -> list[str]:
    generator = random.Random(20)
    words = [word for sample in SAMPLES for word in sample.split()] + ["  ", "\n", "\t", "\r\n", "   ", "7", "42", "'s"]
    texts = []
    for _ in range(count):
        parts = [
            generator.choice(words)
            if generator.random() < 0.8
            else "".join(
                chr(generator.choice((generator.randrange(32, 0xD7FF), generator.randrange(0xE000, 0x1F9FF))))
                for _ in range(3)
            )
            for _ in range(generator.randrange(1, 12))
        ]
        texts.append(generator.choice(("", " ")).join(parts))
    return texts


@pytest.mark.parametrize("text", SAMPLES)
def test_chosen_texts_have_the_same_ids(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text)


def test_hundreds_of_random_texts_have_the_same_ids_and_come_back(smollm2: Tokenizer, reference: Any) -> None:
    for text in random_texts(600):
        token_ids = smollm2.encode(text)
        assert token_ids == reference.encode(text)
        assert smollm2.decode(token_ids, skip_special_tokens=False) == text


def test_chat_has_the_same_ids(smollm2: Tokenizer, reference: Any) -> None:
    chats = (
        [("user", "What is the capital of France?")],
        [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Count to 10.")],
        [("user", "ünï 🙂\n\n  code:\n\tx = 1")],
    )
    for chat in chats:
        messages = [{"role": role, "content": content} for role, content in chat]
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert smollm2.encode_chat(chat) == expected


def test_decoding_arbitrary_ids_gives_the_same_text(smollm2: Tokenizer, reference: Any) -> None:
    generator = random.Random(21)
    for _ in range(300):
        token_ids = [generator.randrange(17, smollm2.vocab_size) for _ in range(generator.randrange(1, 8))]
        assert smollm2.decode(token_ids) == reference.decode(token_ids, clean_up_tokenization_spaces=False)
