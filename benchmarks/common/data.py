"""The data files in `benchmarks/data`; their sources and licences are in its LICENSES.md."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA_DIR = Path(__file__).resolve().parents[1] / "data"
MT_BENCH_CATEGORIES = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
"""The categories of Spec-Bench that come from MT-bench."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question of Spec-Bench."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    """What the user says, turn by turn."""


@cache
def spec_bench_questions() -> tuple[Question, ...]:
    """Return the 480 questions of Spec-Bench in their order."""
    lines = (DATA_DIR / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return tuple(Question(str(row["question_id"]), row["category"], tuple(row["turns"])) for row in rows)


@dataclass(frozen=True, slots=True)
class EditingTask:
    """A text that is to be returned with a small change, its first lines already changed."""

    task_id: str
    instruction: str
    text: str
    start: str
    """The changed text up to the end of the line or sentence of the first change."""

    @property
    def prompt(self) -> str:
        """What the model continues. An editor has made the first change; the model is to write the rest."""
        text = self.text.rstrip()
        return f"Original:\n```\n{text}\n```\nChange: {self.instruction}\nEdited:\n```\n{self.start.rstrip()}"


@cache
def editing_tasks() -> tuple[EditingTask, ...]:
    """Return the editing tasks."""
    lines = (DATA_DIR / "editing_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(EditingTask(**json.loads(line)) for line in lines)


@cache
def corpus() -> tuple[str, ...]:
    """Return natural texts to cut prompts from: articles and passages that questions of Spec-Bench are about."""
    return tuple(
        question.turns[0] for question in spec_bench_questions() if question.category in ("rag", "summarization")
    )
