"""`kvrelay`: the app that the console script runs.

Owns the list of commands. Modules of commands import what they need when they run, so that `--help` stays quick.
"""

import os

# Before gRPC is loaded anywhere: its own messages about lost connections would mix with ours.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from typing import Any

import typer
from typer.core import TyperGroup

from kvrelay.cli import bench, chat, check, demo, generate, models, roles, serve, status, train_drafter
from kvrelay.cli.console import take_text_as_it_comes


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

_LOCAL = "On this machine"
_ROLES = "One role"
_CLIENT = "Talk to a gateway"
_OFFLINE = "Offline"

app.command("demo", rich_help_panel=_LOCAL)(demo.demo)
app.command("serve", rich_help_panel=_LOCAL, context_settings=roles.PASS_THROUGH, add_help_option=False)(serve.serve)
app.command("check", rich_help_panel=_LOCAL, context_settings=roles.PASS_THROUGH, add_help_option=False)(check.check)
for _role in (roles.gateway, roles.prefill, roles.decode):
    app.command(rich_help_panel=_ROLES, context_settings=roles.PASS_THROUGH, add_help_option=False)(_role)
app.command("generate", rich_help_panel=_CLIENT)(generate.generate)
app.command("chat", rich_help_panel=_CLIENT)(chat.chat)
app.command("tokenize", rich_help_panel=_CLIENT)(models.tokenize)
app.command("models", rich_help_panel=_CLIENT)(models.models)
app.command("status", rich_help_panel=_CLIENT)(status.status)
app.command("health", rich_help_panel=_CLIENT)(status.health)
app.command("train-drafter", rich_help_panel=_OFFLINE)(train_drafter.train_drafter)
app.command("version")(status.version)
app.add_typer(bench.app, name="bench")


if __name__ == "__main__":
    app()
