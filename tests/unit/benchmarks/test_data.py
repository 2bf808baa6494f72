"""The data files: whole, named with their licences, and usable as they are meant."""

from benchmarks.common.data import DATA_DIR, MT_BENCH_CATEGORIES, corpus, editing_tasks, spec_bench_questions
from benchmarks.common.prompts import PromptSource
from benchmarks.spec.tasks import all_categories


def test_every_file_is_named_with_its_licence() -> None:
    page = (DATA_DIR / "LICENSES.md").read_text(encoding="utf-8")
    for path in DATA_DIR.iterdir():
        if path.name != "LICENSES.md":
            (line,) = [line for line in page.splitlines() if f"`{path.name}`" in line]
            assert "Apache-2.0" in line or "CC BY 4.0" in line


def test_spec_bench_is_whole() -> None:
    questions = spec_bench_questions()
    assert len(questions) == 480
    assert len({question.question_id for question in questions}) == 480
    six = {"mt_bench", "math_reasoning", "rag", "summarization", "translation", "qa"}
    assert {question.category for question in questions} == (six - {"mt_bench"}) | MT_BENCH_CATEGORIES
    assert set(all_categories()) == six | {"editing"}
    assert all(question.turns for question in questions)


def test_editing_tasks_begin_with_their_change() -> None:
    tasks = editing_tasks()
    assert len(tasks) == len({task.task_id for task in tasks}) == 20
    for task in tasks:
        assert not task.text.startswith(task.start), task.task_id
        assert len(task.text) > 2 * len(task.start) or len(task.text) - len(task.start) > 150, task.task_id
        assert task.prompt.endswith(task.start.rstrip())
        assert task.text.rstrip() in task.prompt


def test_prompts_have_their_length_and_differ_by_key() -> None:
    prompts = PromptSource(range(1000))
    assert len(prompts.cut(2500, "a")) == 2500
    assert prompts.cut(10, "a") == prompts.cut(20, "a")[:10]
    assert prompts.cut(10, "a") != prompts.cut(10, "b")
    assert prompts.cut(10, "a") != PromptSource(range(1000), seed=1).cut(10, "a")


def test_corpus_is_long_enough_for_long_prompts() -> None:
    assert sum(map(len, corpus())) > 200_000
