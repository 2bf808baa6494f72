"""`kvrelay check`: would `kvrelay serve` with these flags work, and what would it start? Changes nothing.

Owns the settings, port, transports and the plan that is printed; the model is `check_model.py`'s.
"""

import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text
from structlog.testing import capture_logs

from kvrelay.cli.console import FAILURE, out, readable_errors
from kvrelay.cli.server.finding import Finding, Verdict
from kvrelay.cli.server.serve import config_path

if TYPE_CHECKING:
    from kvrelay.cli.server.serve_settings import ServeSettings
    from kvrelay.cluster.local import ClusterConfig

_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


def check(context: typer.Context) -> None:
    """Check settings, model, port and transports of a local cluster, and print the plan. Changes nothing."""
    from kvrelay.cli.server.serve_settings import ServeSettings, check_keys
    from kvrelay.serving.settings import parse_settings

    # All other flags are those of serve.
    switches = {"--json": "print one JSON object instead"}
    settings = parse_settings(ServeSettings, context.args, "kvrelay check", switches)
    with readable_errors():
        config = config_path(context.args)
        if config is not None:
            check_keys(config)
        cluster = settings.to_cluster(config)
        # Standard output is the report's; what reading the files logs is a part of it.
        with capture_logs() as lines:
            findings = list(_findings(settings, cluster))
        findings += _notes(lines)
        plan = _plan(settings, cluster)
    is_good = all(finding.verdict != "error" for finding in findings)
    if "--json" in context.args:
        shown = {"ok": is_good, "findings": [asdict(finding) for finding in findings], "plan": plan}
        print(json.dumps(shown))
    else:
        _show(findings, plan)
    if not is_good:
        raise typer.Exit(FAILURE)


def _notes(lines: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What was logged, each line once."""
    notes = []
    for line in lines:
        fields = [f"{name}={value}" for name, value in line.items() if name not in ("event", "log_level")]
        verdict: Verdict = "warning" if line["log_level"] in ("warning", "error") else "ok"
        notes.append(Finding("log", verdict, f"{line['event']} {' '.join(fields)}"))
    return list(dict.fromkeys(notes))


def _plan(settings: "ServeSettings", cluster: "ClusterConfig") -> list[dict[str, str]]:
    port = str(settings.port) if settings.port else "any free one"
    plan = [{"process": "gateway", "address": f"{settings.host}:{port}", "flags": " ".join(cluster.gateway_args)}]
    for role, count, own in (
        ("prefill", cluster.num_prefill, cluster.prefill_args),
        ("decode", cluster.num_decode, cluster.decode_args),
    ):
        for index in range(count):
            flags = " ".join([*cluster.worker_args, *own])
            plan.append({"process": f"{role}-{index}", "address": "127.0.0.1:any free one", "flags": flags})
    return plan


def _findings(settings: "ServeSettings", cluster: "ClusterConfig") -> Iterator[Finding]:
    # Loads torch, as workers do.
    from kvrelay.cli.server.check_model import check_model

    yield from check_model(cluster)
    yield _check_port(settings.host, settings.port)
    yield _check_transports(settings)
    yield _check_run_dir(settings.run_dir)


def _check_port(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return Finding("port", "error", f"cannot listen on {host}:{port}: {error.strerror or error}")
    return Finding("port", "ok", f"{host}:{port} is free" if port else f"any free one on {host}")


def _check_transports(settings: "ServeSettings") -> Finding:
    from decode_service.settings import DecodeSettings
    from worker.transports import make_transports

    available = make_transports(DecodeSettings.model_validate({})).schemes
    if settings.prefill == 0:
        return Finding("transport", "ok", "none needed: decode workers prefill themselves")
    if settings.transport == "auto":
        return Finding("transport", "ok", f"auto takes the best of {', '.join(available)}")
    if settings.transport in available:
        return Finding("transport", "ok", settings.transport)
    return Finding("transport", "error", f"{settings.transport} is not available here; there is {', '.join(available)}")


def _check_run_dir(run_dir: Path | None) -> Finding:
    if run_dir is None:
        return Finding("run directory", "ok", "a new private one")
    existing = next(each for each in (run_dir, *run_dir.absolute().parents) if each.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding("run directory", "error", f"{run_dir} cannot be written to")
    return Finding("run directory", "ok", str(run_dir))


def _show(findings: list[Finding], plan: list[dict[str, str]]) -> None:
    for finding in findings:
        line = Text.assemble((f"{finding.verdict:8}", _STYLES[finding.verdict]), (f"{finding.subject}: ", "bold"))
        out.print(line.append(finding.text), soft_wrap=True)
    table = Table(title="serve would start", title_justify="left")
    for name in ("process", "address", "flags"):
        table.add_column(name, overflow="fold")
    for row in plan:
        table.add_row(row["process"], row["address"], row["flags"])
    out.print(table)
