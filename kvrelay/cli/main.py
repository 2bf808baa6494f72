"""`kvrelay`: the app that the console script runs.

Owns the list of commands. Those that talk to a gateway are in the client's distribution, the others come with
the server's. Modules of commands import what they need when they run, so that `--help` stays quick.
"""

import os

# Before gRPC is loaded anywhere: its own messages about lost connections would mix with ours.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from kvrelay.cli import chat, generate, models, status
from kvrelay.cli.console import USAGE, fail, take_text_as_it_comes
from kvrelay.cli.options import PASS_THROUGH

_SERVER_COMMANDS = ("demo", "serve", "check", "gateway", "prefill", "decode", "worker", "train-drafter", "bench")


class _Commands(TyperGroup):
    """All commands, which share their standard streams' manners."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command."""
        take_text_as_it_comes()
        return super().main(*args, **kwargs)


app = typer.Typer(
    name="kvrelay",
    cls=_Commands,
    help="Serve large language models with separate prefill and decode workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.callback()(status.global_options)

_CLIENT = "Talk to a gateway"


def _say_what_to_install(context: typer.Context) -> None:
    """Part of the server, which is not installed here."""
    fail(f"`kvrelay {context.info_name}` is part of the server: pip install kvrelay-server", USAGE)


if find_spec("kvrelay.cli.server") is not None:
    from kvrelay.cli.server import add_commands

    add_commands(app)
else:
    for _name in _SERVER_COMMANDS:
        app.command(_name, hidden=True, context_settings=PASS_THROUGH, add_help_option=False)(_say_what_to_install)
app.command("generate", rich_help_panel=_CLIENT)(generate.generate)
app.command("chat", rich_help_panel=_CLIENT)(chat.chat)
app.command("tokenize", rich_help_panel=_CLIENT)(models.tokenize)
app.command("models", rich_help_panel=_CLIENT)(models.models)
app.command("status", rich_help_panel=_CLIENT)(status.status)
app.command("health", rich_help_panel=_CLIENT)(status.health)
app.command("version")(status.version)


if __name__ == "__main__":
    app()
