"""The tasks as prompts: Spec-Bench's questions as chats, and the editing tasks as texts to go on with."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from benchmarks.common.data import MT_BENCH_CATEGORIES, editing_tasks, spec_bench_questions
from kvrelay.errors import InvalidRequest

Chat: TypeAlias = Sequence[tuple[str, str]]
"""(role, content) of each message."""

MT_BENCH = "mt_bench"
"""Spec-Bench's six kinds of task are counted, as its authors do: MT-bench's eight categories are one of them."""
EDITING = "editing"
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class SpecTask:
    """One prompt and how far its answer may go."""

    task_id: str
    category: str
    token_ids: tuple[int, ...]
    max_tokens: int


class TextSource(Protocol):
    """Whatever tokenizes as the model under test does: a client of its gateway, or a tokenizer of this process."""

    async def tokenize(self, text: str | None = None, *, messages: Chat | None = None) -> list[int]:
        """Return the token ids of a text or a chat."""
        ...


def task_category(category: str) -> str:
    """Return under which name a question of Spec-Bench is counted."""
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category


def all_categories() -> tuple[str, ...]:
    """Return the categories: Spec-Bench's in its order, then `editing`."""
    return (*dict.fromkeys(task_category(question.category) for question in spec_bench_questions()), EDITING)


def chosen_categories(names: Sequence[str]) -> tuple[str, ...]:
    """Return the categories named, in their order; none named = all.

    Raises:
        InvalidRequest: There is no such category; names the field `category`.
    """
    known = all_categories()
    for name in names:
        if name not in known:
            raise InvalidRequest("category", f"{name!r} is none of {', '.join(known)}")
    return tuple(category for category in known if not names or category in names)


async def load_tasks(
    texts: TextSource, categories: Sequence[str], limit: int | None, output_tokens: int, context: int
) -> list[SpecTask]:
    """Tokenize the tasks of the categories.

    Args:
        texts: Tokenizes for the model.
        categories: As `chosen_categories` returns them.
        limit: Most tasks of each; None = all.
        output_tokens: Most tokens of an answer. An edited text ends where the original does.
        context: The model's; tasks that do not fit are left out.
    """
    tasks: list[SpecTask] = []
    for category in categories:
        num_found = 0
        async for task_id, token_ids, length in _editing(texts) if category == EDITING else _questions(texts, category):
            max_tokens = min(length, output_tokens)
            if limit is not None and num_found >= limit:
                break
            if len(token_ids) + max_tokens < context:
                tasks.append(SpecTask(task_id, category, token_ids, max_tokens))
                num_found += 1
    return tasks


_Found = tuple[str, tuple[int, ...], int]
"""Id, prompt, and how long an answer may be besides any other limit."""


async def _questions(texts: TextSource, category: str) -> AsyncIterator[_Found]:
    """Yield a category's questions: their first turns."""
    for question in spec_bench_questions():
        if task_category(question.category) == category:
            token_ids = await texts.tokenize(messages=[("user", question.turns[0])])
            yield question.question_id, tuple(token_ids), UNLIMITED


async def _editing(texts: TextSource) -> AsyncIterator[_Found]:
    for task in editing_tasks():
        token_ids = await texts.tokenize(task.prompt)
        length = len(await texts.tokenize(task.text)) - len(await texts.tokenize(task.start))
        yield task.task_id, tuple(token_ids), max(length, 2)
