"""Progress of a benchmark: a bar for a person, plain lines for a log file, nothing for a test."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text


class BenchProgress(Protocol):
    """Told by a benchmark how far it is."""

    def begin(self, num_steps: int) -> None:
        """Say how many steps there are; called once, before the first."""
        ...

    def say(self, text: str) -> None:
        """Say what is going on."""
        ...

    def advance(self) -> None:
        """Count one step as done."""
        ...


class SilentProgress:
    """Shows nothing."""

    def begin(self, num_steps: int) -> None:
        """See `BenchProgress.begin`."""

    def say(self, text: str) -> None:
        """See `BenchProgress.say`."""

    def advance(self) -> None:
        """See `BenchProgress.advance`."""


class ConsoleProgress:
    """Shows a bar on a console; on one that is no terminal, a line for each thing said.

    Args:
        name: The benchmark's name.
        console: Where; standard error, so that `--json -` stays clean.
    """

    def __init__(self, name: str, console: Console) -> None:
        self._name = name
        self._console = console
        self._last = ""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = (
            Progress(*columns, console=console, transient=True, refresh_per_second=2) if console.is_terminal else None
        )
        self._task = None if self._bar is None else self._bar.add_task(name, total=None)

    def begin(self, num_steps: int) -> None:
        """See `BenchProgress.begin`."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=num_steps)

    def say(self, text: str) -> None:
        """See `BenchProgress.say`."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{self._name}: {text}".replace("[", r"\["))
        elif text != self._last:
            self._console.print(Text(f"{self._name}: {text}"), soft_wrap=True)
        self._last = text

    def advance(self) -> None:
        """See `BenchProgress.advance`."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
