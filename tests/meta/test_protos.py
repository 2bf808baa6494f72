"""The committed stubs are what protoc makes of protos/ today, the protos lint, and the floors in pyproject.toml fit."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.meta.repository import ROOT, STUBS, is_stub, run_tool

_PROTOS = sorted((ROOT / "protos" / "kvrelay" / "v1").glob("*.proto"))


def _generate(proto_root: Path, target: Path) -> None:
    names = [str(path.relative_to(proto_root)) for path in sorted(proto_root.rglob("*.proto"))]
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "pyi")]
    protoc = run_tool(Path(sys.executable).name, "-m", "grpc_tools.protoc", f"-I{proto_root}", *outputs, *names)
    assert protoc.returncode == 0, protoc.stdout


def test_stubs_are_what_protoc_makes_of_the_protos(tmp_path: Path) -> None:
    _generate(ROOT / "protos", tmp_path)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "kvrelay" / "v1").iterdir()}
    committed = {path.name: path.read_bytes() for path in STUBS.iterdir() if path.is_file() and is_stub(path)}
    assert len(fresh) == 3 * len(_PROTOS) > 0
    assert sorted(committed) == sorted(fresh), "a stub without a proto, or a proto without stubs: run make protos"
    stale = [name for name, content in fresh.items() if committed[name] != content]
    assert not stale, f"run make protos: {stale}"


def test_protos_pass_buf_lint() -> None:
    lint = run_tool("buf", "lint")
    assert lint.returncode == 0, lint.stdout


def test_buf_lint_refuses_a_message_without_comment(tmp_path: Path) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    bad = tmp_path / "protos" / "kvrelay" / "v1" / "bad.proto"
    bad.parent.mkdir(parents=True)
    bad.write_text('syntax = "proto3";\n\npackage kvrelay.v1;\n\nmessage Bad {\n  int32 field = 1;\n}\n')
    lint = run_tool("buf", "lint", str(tmp_path))
    assert lint.returncode != 0
    assert "should have a non-empty comment" in lint.stdout


@pytest.mark.parametrize(
    ("distribution", "pattern", "files"),
    [
        ("protobuf", r"^# Protobuf Python Version: (\S+)$", "*_pb2.py"),
        ("grpcio", r"^GRPC_GENERATED_VERSION = '(\S+)'$", "*_pb2_grpc.py"),
    ],
)
def test_floor_in_pyproject_admits_only_runtimes_that_load_the_stubs(
    distribution: str, pattern: str, files: str
) -> None:
    texts = [path.read_text(encoding="utf-8") for path in STUBS.glob(files)]
    generated_by = {Version(version) for text in texts for version in re.findall(pattern, text, re.MULTILINE)}
    assert len(generated_by) == 1, f"stubs of several versions: {generated_by}"
    (needed,) = generated_by

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (requirement,) = [r for r in map(Requirement, project["dependencies"]) if r.name == distribution]
    assert needed in requirement.specifier
    (floor,) = [Version(s.version) for s in requirement.specifier if s.operator == ">="]
    assert floor >= needed, f"pyproject.toml admits {distribution} {floor}, the stubs need {needed}"
