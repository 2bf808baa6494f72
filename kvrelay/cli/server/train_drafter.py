"""`kvrelay train-drafter`: train an EAGLE-style draft head for a model, on text that the model itself writes.

Owns the flags and the bars; the work is in `engine/training`, which is imported only when the command runs.
"""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Self

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvrelay.cli.console import USAGE, err, fail, out, print_json, readable_errors

if TYPE_CHECKING:
    from engine.training.pipeline import TrainedHead

_PARTS: Final = {"text": "the model writes text", "features": "its hidden states", "training": "training the head"}
_SECONDS_BETWEEN_LINES: Final = 30.0


def train_drafter(
    out_file: Annotated[Path, typer.Option("--out", metavar="FILE.safetensors", help="Where the head goes.")],
    model: Annotated[
        str, typer.Option("--model", help="smollm2, a folder, a .gguf file or a Hugging Face id.")
    ] = "smollm2",
    work_dir: Annotated[
        Path | None,
        typer.Option("--work-dir", help="Text, features and checkpoints; a run started again goes on from them."),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--start-from", metavar="FILE.safetensors", help="A head of the same model to go on from."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Answer tokens that the model writes.")] = 600_000,
    text_minutes: Annotated[float, typer.Option("--text-minutes", help="Longest time for writing them.")] = 30.0,
    minutes: Annotated[float, typer.Option("--minutes", help="How long the head is trained.")] = 60.0,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Train so many steps instead; the run then follows from its seed.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the text, its order and the head's first weights.")] = 1,
    streams: Annotated[int, typer.Option("--streams", help="Conversations written at once.")] = 32,
    context: Annotated[int, typer.Option("--context", help="Longest conversation in tokens.")] = 1536,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Tokens that the head can propose.")] = 12288,
    tap_layers: Annotated[
        str | None,
        typer.Option("--tap-layers", help="Layers whose output the head sees, e.g. 7,15,29; the last one among them."),
    ] = None,
    batch_tokens: Annotated[int, typer.Option("--batch-tokens", help="Answer tokens of a training step.")] = 2048,
    learning_rate: Annotated[float, typer.Option("--learning-rate", help="Its peak.")] = 0.02,
    threads: Annotated[int, typer.Option("--threads", min=0, help="CPU threads; 0 = one per core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train a draft head by self-distillation. Takes an hour or more on a CPU; may be stopped and resumed."""
    with readable_errors():
        from engine.training.settings import GenerationSettings, TrainingSettings

        generation = GenerationSettings(
            num_tokens=tokens,
            minutes=text_minutes,
            seed=seed,
            num_streams=streams,
            max_context=context,
            num_threads=threads,
        )
        training = TrainingSettings(
            minutes=minutes,
            num_steps=steps,
            seed=seed,
            vocab_size=vocab_size,
            tap_layers=_layers(tap_layers),
            batch_tokens=batch_tokens,
            learning_rate=learning_rate,
        )
        with _Bars() as bars:
            # Before torch is loaded: threads that wait actively would take the cores from one another.
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            import torch

            from engine.training.pipeline import train_drafter as train

            if threads:
                torch.set_num_threads(threads)
            work_folder = work_dir or out_file.with_suffix(".work")
            trained = train(model, out_file, work_folder, generation, training, bars.update, start_from)
        if as_json:
            history = [asdict(entry) for entry in trained.history]
            print_json({"head": str(trained.path), "log": str(trained.log_path), "history": history})
        else:
            _show(trained)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        fail(f"--tap-layers: {text!r} is not a list of numbers such as 7,15,29", USAGE)


class _Bars:
    """One bar for each part of the run; plain lines now and then when nobody watches."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(),
            TextColumn("{task.percentage:>5.1f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=err,
            disable=not err.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line = 0.0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, part: str, share: float, line: str) -> None:
        """Show how far a part has come."""
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(_PARTS[part], total=1.0, line="")
        self._progress.update(self._tasks[part], completed=min(1.0, share), line=line)
        now = time.monotonic()
        if not err.is_terminal and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            err.print(f"{_PARTS[part]}: {share:.1%} {line}", markup=False, highlight=False)


def _show(trained: "TrainedHead") -> None:
    table = Table(title="held-out text, greedy drafts", title_justify="left")
    for column in ("step", "minutes", "loss", "first draft", "second", "third", "accepted of 3", "accepted of 6"):
        table.add_column(column, justify="right")
    for entry in trained.history:
        shares = [f"{share:.1%}" for share in entry.acceptance[:3]]
        accepted = [f"{entry.accepted_drafts[count - 1]:.2f}" for count in (3, 6)]
        table.add_row(str(entry.step), f"{entry.minutes:.1f}", f"{entry.loss:.3f}", *shares, *accepted)
    out.print(table)
    out.print(f"{trained.path}, and its log {trained.log_path}", highlight=False)
