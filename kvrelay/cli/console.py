"""What all commands share: two consoles, exit codes, and errors as one clear line.

Owns how a failure looks to a person. Results go to standard output, everything else to standard error.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Final, NoReturn, Self

import typer
from rich.console import Console
from rich.text import Text

_UNWATCHED_WIDTH: Final = 160


def _console(*, stderr: bool) -> Console:
    is_watched = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    # When nobody is watching, rich would squeeze tables into 80 columns.
    return Console(stderr=stderr, width=None if is_watched else _UNWATCHED_WIDTH)


out: Final = _console(stderr=False)
"""Standard output."""
err: Final = _console(stderr=True)
"""Standard error."""

FAILURE: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

# Fields of the wire contract whose flag is not simply their last part.
_FLAG_OF_FIELD: Final[Mapping[str, str]] = {
    "prompt": "the prompt",
    "text": "the prompt",
    "chat.messages": "the messages",
    "sampling_params.stop_token_ids": "--stop-token-id",
}


def fail(message: str, exit_code: int = FAILURE) -> NoReturn:
    """Print an error and end with the exit code."""
    err.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    raise typer.Exit(exit_code)


@contextmanager
def readable_errors(target: str = "") -> Iterator[None]:
    """Turn the errors that a command may meet into one line and an exit code; no traceback.

    Args:
        target: The server that the block talks to, for the message when it cannot be reached.
    """
    from engine.errors import EngineError, InvalidRequest, WorkerUnavailable
    from engine.serving.target import proxy_note
    from kvrelay.process import ClusterError

    try:
        yield
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output went away, e.g. `| head`; that is no failure of ours.
        raise typer.Exit(FAILURE) from None
    except InvalidRequest as error:
        fail(f"{flag_of(error.field)}: {error.description}", USAGE)
    except WorkerUnavailable as error:
        if target and _is_unreachable(str(error)):
            note = proxy_note(target)
            fail(
                f"nothing answers at {target}; start a cluster with `kvrelay serve`, or name another --target"
                + (f" ({note})" if note else "")
            )
        fail(str(error))
    except (EngineError, ClusterError) as error:
        fail(str(error))


def flag_of(field: str) -> str:
    """Return how a person gave the field that an error names."""
    known = _FLAG_OF_FIELD.get(field)
    if known is not None:
        return known
    name = field.removeprefix("sampling_params.").partition("[")[0]
    return "--" + name.replace("_", "-") if name.replace("_", "").isalnum() else field


def _is_unreachable(message: str) -> bool:
    return any(
        part in message.lower()
        for part in ("failed to connect", "dns resolution", "connection refused", "name resolution")
    )


class Progress:
    """One line that says what is being waited for: a spinner for a person, plain lines for a log file."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._status = err.status(text) if err.is_terminal else None

    def start(self) -> None:
        """Show it."""
        if self._status is not None:
            self._status.start()
        else:
            err.print(self._text, markup=False)

    def update(self, text: str) -> None:
        """Say something else from now on."""
        if self._status is not None:
            self._status.update(Text(text))
        elif text != self._text:
            err.print(text, markup=False)
        self._text = text

    def stop(self) -> None:
        """Take it away; may be called again."""
        if self._status is not None:
            self._status.stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
