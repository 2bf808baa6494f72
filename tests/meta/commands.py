"""The command line interface as the meta tests see it: what each command's --help says of flags and variables."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

_KVRELAY = str(Path(sys.executable).with_name("kvrelay"))


@cache
def help_of(*command: str) -> str | None:
    """What `kvrelay <command> --help` prints, or None if there is no such command."""
    # Wide and plain, so that no name is cut or coloured.
    environment = os.environ | {"COLUMNS": "400", "TERM": "dumb", "NO_COLOR": "1"}
    shown = subprocess.run(
        [_KVRELAY, *command, "--help"], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    return shown.stdout if shown.returncode == 0 else None


def unknown_part(command_line: str) -> str | None:
    """The first sub-command or flag of `kvrelay ...` that the command line interface lacks, or None."""
    words = command_line.split()[1:]
    command: tuple[str, ...] = ()
    described = help_of()
    while described is not None and "COMMAND [ARGS]" in described and words and not words[0].startswith("-"):
        command = (*command, words.pop(0))
        if (described := help_of(*command)) is None:
            return command[-1]
    flags = {match[1] for word in words if (match := re.match(r"\[?(--[a-z][a-z-]*)", word))}
    return next((flag for flag in sorted(flags) if not _names(described or "", flag)), None)


def environment_of(command: str) -> set[str]:
    """The environment variables that `kvrelay <command>` says it reads."""
    return set(re.findall(r"\bKVRELAY_[A-Z0-9_]+\b", help_of(command) or ""))


def _names(text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text) is not None
