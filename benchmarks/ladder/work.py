"""The work: as many questions as there are streams, all about one document, which is what a prefix cache is for."""

from dataclasses import dataclass

from benchmarks.common.data import corpus
from kvrelay.text.tokenizer import Tokenizer

QUESTIONS = (
    "What is the text about?",
    "Summarize the text in one sentence.",
    "Quote the first sentence of the text.",
    "Which people does the text name?",
    "Which places does the text name?",
    "What happened first?",
    "What happened last?",
    "Give the text a title.",
    "Write the text again in your own words.",
    "Which numbers are in the text?",
    "Who would want to read this text?",
    "Explain the text to a child.",
    "What does the text not tell?",
    "List the most important facts.",
    "Quote the last sentence of the text.",
    "Turn the text into three bullet points.",
)


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts that begin alike, and how long each answer is."""

    prefix: tuple[int, ...]
    """What all prompts begin with."""
    prompts: tuple[tuple[int, ...], ...]
    output_tokens: int


def make_work(tokenizer: Tokenizer, num_streams: int, prefix_tokens: int, output_tokens: int) -> Work:
    """Return the prompts.

    Args:
        tokenizer: The model's.
        num_streams: How many prompts; beyond the number of questions they are asked again, numbered.
        prefix_tokens: Length of the document in tokens, about.
        output_tokens: Tokens of each answer.
    """
    document = tokenizer.decode(tokenizer.encode(corpus()[0], add_special_tokens=False)[:prefix_tokens])
    prompts = []
    for index in range(num_streams):
        question = QUESTIONS[index % len(QUESTIONS)]
        again = index // len(QUESTIONS)
        text = f"{document}\n\n{question}" + (f" (answer {again + 1})" if again else "")
        prompts.append(
            tuple(tokenizer.encode_chat([("user", text)]) if tokenizer.has_chat_template else tokenizer.encode(text))
        )
    return Work(_common_prefix(prompts), tuple(prompts), output_tokens)


def _common_prefix(prompts: list[tuple[int, ...]]) -> tuple[int, ...]:
    length = 0
    for together in zip(*prompts, strict=False):
        if len(set(together)) > 1:
            break
        length += 1
    # At least one token, so that it is a prompt of its own.
    return prompts[0][: max(length, 1)]
