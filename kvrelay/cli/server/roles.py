"""`kvrelay gateway | prefill | decode`: one role in this process. Its own settings say which flags there are."""

import importlib
from typing import Protocol, cast

import typer

from kvrelay.serving.start_up import stops_at_once


class _RoleMain(Protocol):
    def main(self, argv: list[str]) -> int: ...


def gateway(context: typer.Context) -> None:
    """Run a gateway: the public API in front of the workers."""
    _run("gateway.__main__", context.args)


def prefill(context: typer.Context) -> None:
    """Run a prefill worker, which computes prompts."""
    _run("prefill_service.__main__", context.args)


def decode(context: typer.Context) -> None:
    """Run a decode worker, which generates tokens."""
    _run("decode_service.__main__", context.args)


def _run(module: str, argv: list[str]) -> None:
    name = module.partition("_service")[0].partition(".")[0]
    with stops_at_once(f"kvrelay {name}"):
        # Only the role that runs is loaded: the gateway's process must never see torch.
        role = cast("_RoleMain", importlib.import_module(module))
        exit_code = role.main(list(argv))
    raise typer.Exit(exit_code)
