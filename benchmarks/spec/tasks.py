"""The tasks as prompts: Spec-Bench's questions as chats, and the editing tasks as texts to go on with."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from benchmarks.common.data import editing_tasks, spec_bench_questions
from engine.errors import InvalidRequest
from kvrelay.client import AsyncClient

EDITING = "editing"
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class SpecTask:
    """One prompt and how far its answer may go."""

    task_id: str
    category: str
    token_ids: tuple[int, ...]
    max_tokens: int


def all_categories() -> tuple[str, ...]:
    """Return the categories: Spec-Bench's in its order, then `editing`."""
    return (*dict.fromkeys(question.category for question in spec_bench_questions()), EDITING)


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
    client: AsyncClient, categories: Sequence[str], limit: int | None, output_tokens: int, context: int
) -> list[SpecTask]:
    """Tokenize the tasks of the categories.

    Args:
        client: Of a gateway that serves the model.
        categories: As `chosen_categories` returns them.
        limit: Most tasks of each; None = all.
        output_tokens: Most tokens of an answer. An edited text ends where the original does.
        context: The model's; tasks that do not fit are left out.
    """
    tasks: list[SpecTask] = []
    for category in categories:
        num_found = 0
        async for task_id, token_ids, length in (
            _editing(client) if category == EDITING else _questions(client, category)
        ):
            max_tokens = min(length, output_tokens)
            if limit is not None and num_found >= limit:
                break
            if len(token_ids) + max_tokens < context:
                tasks.append(SpecTask(task_id, category, token_ids, max_tokens))
                num_found += 1
    return tasks


_Found = tuple[str, tuple[int, ...], int]
"""Id, prompt, and how long an answer may be besides any other limit."""


async def _questions(client: AsyncClient, category: str) -> AsyncIterator[_Found]:
    """Yield a category's questions: their first turns."""
    for question in spec_bench_questions():
        if question.category == category:
            token_ids = await client.tokenize(messages=[("user", question.turns[0])])
            yield question.question_id, tuple(token_ids), UNLIMITED


async def _editing(client: AsyncClient) -> AsyncIterator[_Found]:
    for task in editing_tasks():
        token_ids = await client.tokenize(task.prompt)
        length = len(await client.tokenize(task.text)) - len(await client.tokenize(task.start))
        yield task.task_id, tuple(token_ids), max(length, 2)
