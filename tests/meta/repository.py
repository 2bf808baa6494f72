"""The repository as the meta tests see it: its root, its own files, and the tools of its environment."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "kvrelay" / "v1"
PACKAGES = ("kvrelay", "gateway", "prefill_service", "decode_service", "worker", "kv_transfer", "engine", "benchmarks")


@cache
def own_files() -> tuple[Path, ...]:
    """Every file that git tracks or would track, as absolute paths. Ignored files are not ours to judge."""
    # A clone made by another user is still read; the setting holds for this command alone.
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(path for name in sorted(filter(None, listing.split("\0"))) if (path := ROOT / name).is_file())


def is_stub(path: Path) -> bool:
    """Whether protoc wrote this file."""
    return path.parent == STUBS and path.stem.endswith(("_pb2", "_pb2_grpc"))


def own_python() -> tuple[Path, ...]:
    """Our Python files, without the generated stubs."""
    return tuple(path for path in own_files() if path.suffix in {".py", ".pyi"} and not is_stub(path))


def package_python() -> tuple[Path, ...]:
    """The Python files that are shipped, without the generated stubs."""
    return tuple(path for path in own_python() if relative(path).parts[0] in PACKAGES)


def collected_files() -> tuple[Path, ...]:
    """The files that pytest collects."""
    return tuple(path for path in own_python() if relative(path).parts[0] == "tests" and path.name.startswith("test_"))


def relative(path: Path) -> Path:
    """`path` from the root of the repository."""
    return path.relative_to(ROOT)


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every absolute import, `from a import b` as both `a` and `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def run_tool(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program of the environment that runs the tests; the caller looks at the exit status and the output."""
    tool, *arguments = command
    return subprocess.run(
        [str(Path(sys.executable).with_name(tool)), *arguments],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200"},  # so that no report is broken into lines
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
