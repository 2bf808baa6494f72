"""The commands that need the server's distribution: they start processes, read models, or measure.

`kvrelay/cli/main.py` adds them where it finds them installed.
"""

import typer

from kvrelay.cli.options import PASS_THROUGH
from kvrelay.cli.server import bench, check, demo, roles, serve, train_drafter, worker

_LOCAL = "On this machine"
_ROLES = "One role"
_OFFLINE = "Offline"


def add_commands(app: typer.Typer) -> None:
    """Add the server's commands to the app."""
    app.command("demo", rich_help_panel=_LOCAL)(demo.demo)
    app.command("serve", rich_help_panel=_LOCAL, context_settings=PASS_THROUGH, add_help_option=False)(serve.serve)
    app.command("check", rich_help_panel=_LOCAL, context_settings=PASS_THROUGH, add_help_option=False)(check.check)
    for role in (roles.gateway, roles.prefill, roles.decode):
        app.command(rich_help_panel=_ROLES, context_settings=PASS_THROUGH, add_help_option=False)(role)
    app.command("train-drafter", rich_help_panel=_OFFLINE)(train_drafter.train_drafter)
    app.add_typer(worker.app, name="worker", rich_help_panel=_ROLES)
    app.add_typer(bench.app, name="bench")
