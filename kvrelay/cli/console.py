"""What all commands share: two consoles, exit codes, and errors as one clear line.

Owns how a failure looks to a person. Results go to standard output, everything else to standard error.
"""

import asyncio
import codecs
import contextlib
import io
import json
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


class _Console(Console):
    """A console that leaves it to `readable_errors` to end when nobody reads any more."""

    def on_broken_pipe(self) -> None:
        """See `Console`, which would end with a failure."""
        raise BrokenPipeError


def _console(*, stderr: bool) -> _Console:
    is_watched = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    # When nobody is watching, rich would squeeze tables into 80 columns.
    return _Console(stderr=stderr, width=None if is_watched else _UNWATCHED_WIDTH)


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
    "messages": "the messages",
    "sampling_params.stop_token_ids": "--stop-token-id",
}


def take_text_as_it_comes() -> None:
    """Let no character in standard input or for a terminal end the command with an error of its own.

    What a terminal cannot show becomes a replacement character. Input that is not in its encoding is kept as lone
    surrogates, which the client refuses by the name of the field; ASCII, which only a missing locale asks for, is read
    as UTF-8.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="surrogateescape")


def read_prompt(text: str) -> str:
    """Return a command's text, or for `-` what standard input holds."""
    return sys.stdin.read() if text == "-" else text


def print_json(value: object) -> None:
    """Print a value as one line of JSON, in characters that standard output can hold."""
    is_unicode = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")
    print(json.dumps(value, ensure_ascii=not is_unicode))


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
    from kvrelay.errors import ClusterError, EngineError, InvalidRequest, WorkerUnavailable
    from kvrelay.target import proxy_note

    try:
        yield
        # What is still buffered may meet a reader that has gone.
        sys.stdout.flush()
    except (KeyboardInterrupt, asyncio.CancelledError):
        err.print("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of our output has all it wanted, e.g. `| head`.
        _drop_output()
        raise typer.Exit from None
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


def _drop_output() -> None:
    """Send what is still buffered nowhere: Python would try to write it at the end, and fail aloud."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
        descriptor = sys.stdout.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def flag_of(field: str) -> str:
    """Return how a person gave the field that an error names."""
    name = field.partition("[")[0]
    known = _FLAG_OF_FIELD.get(name)
    if known is not None:
        return known
    name = name.removeprefix("sampling_params.")
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
