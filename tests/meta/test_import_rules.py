"""Who may import whom: the contracts in pyproject.toml are kept, and the stubs stay at the edge."""

import ast
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.meta.repository import ROOT, imported_modules, package_python, parse, relative, run_tool

#: Files that may import the generated stubs: conversion, RPC handlers and what registers them with a server, callers of
#: RPCs, and the transport that uses one. All others see values only.
_STUB_IMPORTERS = (
    "gateway/front/convert.py",
    "gateway/front/http/requests.py",
    "*/servicer.py",
    "*/*_servicer.py",
    "gateway/app.py",
    "gateway/workers/stream.py",
    "worker/main.py",
    "worker/registration.py",
    "worker/kv_events.py",
    "kv_transfer/transports/grpc/*",
    "kvrelay/*",
)


def _imports_stubs(tree: ast.AST) -> list[int]:
    return [line for line, name in imported_modules(tree) if name == "kvrelay.v1" or name.startswith("kvrelay.v1.")]


def may_import_stubs(path: Path) -> bool:
    """Whether the file at `path`, relative to the root, belongs to the edge."""
    return any(fnmatch(str(path), pattern) for pattern in _STUB_IMPORTERS)


def test_import_contracts_are_kept() -> None:
    lint = run_tool("lint-imports", "--no-logo", "--no-cache")
    assert lint.returncode == 0, lint.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("engine/scheduler/plan.py", "import torch", "Decisions never load torch"),
        ("engine/scheduler/plan.py", "import engine.loop", "Inside engine"),
        ("engine/sequence.py", "import grpc", "engine knows neither gRPC"),
        ("gateway/routing/router.py", "import torch", "The gateway's process never loads torch"),
        ("gateway/routing/router.py", "import kv_transfer.frame", "The gateway's process never loads torch"),
        ("gateway/routing/router.py", "import decode_service", "The three services never import each other"),
        ("kv_transfer/frame.py", "import engine.cache.block_pool", "kv_transfer uses only types"),
        ("gateway/workers/pool.py", "import gateway.relay.recovery", "Inside gateway"),
        ("kv_transfer/transports/flow.py", "import kv_transfer.handoff.lease", "Inside kv_transfer"),
        ("engine/model/files/source.py", "import engine.model.llama", "Inside engine.model"),
        ("kvrelay/wire/status.py", "import engine.scheduler", "kvrelay.wire turns values"),
        ("kvrelay/wire/status.py", "import engine.types", "What a client installs loads nothing"),
        ("kvrelay/text/roles.py", "import engine.types", "kvrelay.text and kvrelay.formats"),
        ("kvrelay/serving/health.py", "import kvrelay.text.roles", "kvrelay.serving knows neither"),
        ("gateway/workers/mailbox.py", "import gateway.workers.session", "No two modules or folders"),
        ("gateway/relay/attempt.py", "import gateway.workers.session", "The gateway's state machines"),
        ("gateway/relay/recovery.py", "import asyncio", "The gateway's state machines"),
        ("gateway/relay/output.py", "import time", "The gateway's state machines"),
    ],
)
def test_planted_import_breaks_its_contract(module: str, line: str, contract: str, tmp_path: Path) -> None:
    for path in (*package_python(), ROOT / "pyproject.toml"):
        copy = tmp_path / relative(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    with (tmp_path / module).open("a", encoding="utf-8") as planted:
        planted.write(f"\n{line}\n")
    lint = run_tool("lint-imports", "--no-logo", "--no-cache", cwd=tmp_path)
    assert lint.returncode == 1
    broken = [report for report in lint.stdout.splitlines() if report.endswith("BROKEN")]
    assert any(report.startswith(contract) for report in broken), lint.stdout


def test_stubs_are_imported_only_at_the_edge() -> None:
    findings = [
        f"{relative(path)}:{line}"
        for path in package_python()
        if not may_import_stubs(relative(path))
        for line in _imports_stubs(parse(path))
    ]
    assert not findings, f"kvrelay.v1 is imported outside the edge: {findings}"


@pytest.mark.parametrize(
    "source",
    ["import kvrelay.v1.sampling_pb2", "from kvrelay.v1 import sampling_pb2", "from kvrelay import v1"],
)
def test_each_way_to_import_a_stub_is_noticed(source: str) -> None:
    assert _imports_stubs(ast.parse(source))


def test_edge_is_what_its_patterns_say() -> None:
    assert may_import_stubs(Path("gateway/front/convert.py"))
    assert may_import_stubs(Path("kv_transfer/transports/grpc/transport.py"))
    assert not may_import_stubs(Path("gateway/routing/router.py"))
    assert not may_import_stubs(Path("engine/loop.py"))


def test_engine_package_itself_imports_nothing() -> None:
    (init,) = [path for path in package_python() if str(relative(path)) == "engine/__init__.py"]
    assert ast.get_docstring(parse(init))
    assert not list(imported_modules(parse(init))), "importing engine.types must not load anything else"
