"""The console script's first step: the command line, or what to install where its libraries are missing."""

import sys


def run() -> None:
    """Run the command that the process's arguments name."""
    try:
        from kvrelay.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit('error: the command line needs more than the client: pip install "kvrelay[cli]"')
    app()
