"""Both distributions, built and installed into environments that hold what they ask for and nothing else."""

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.meta.repository import PACKAGES, own_files, relative
from tests.unit.kvrelay.fake_gateway import FakeGateway, serving

pytestmark = pytest.mark.slow

_HEAVY = ("torch", "numpy", "structlog", "pydantic", "opentelemetry", "tokenizers")
_SERVER_PACKAGES = tuple(package for package in PACKAGES if package != "kvrelay")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two wheels by distribution, built from the files that git knows."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheels")
    for path in own_files():
        copy = tree / relative(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(out), "./client", "."], cwd=tree, check=True)
    return {path.name.split("-")[0].replace("_", "-"): path for path in out.glob("*.whl")}


def _closure(requirements: list[str], extra: str) -> set[str]:
    """Names of everything that requirements bring, with one extra of ours; our own distributions are not followed."""
    pending, found = [Requirement(line) for line in requirements], set[str]()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in found or name == "kvrelay":
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            needed = distribution(name).requires or []
        except PackageNotFoundError:  # not for this platform
            continue
        found.add(name)
        pending += map(Requirement, needed)
    return found


def _environment(folder: Path, *wheel_paths: Path, extra: str = "") -> Path:
    """Make an environment of wheels and what they ask for, taken from the one that runs the tests; returns its bin/."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    asked: list[str] = []
    for path in wheel_paths:
        with zipfile.ZipFile(path) as wheel:
            (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            lines = wheel.read(metadata).decode().splitlines()
        asked += [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    roots: dict[str, Path] = {}
    for name in _closure(asked, extra):
        found = distribution(name)
        for file in found.files or ():
            first = file.parts[0]
            if first not in ("..", "__pycache__"):
                roots[first] = Path(str(found.locate_file(first)))
    for first, path in roots.items():
        (site / first).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", *map(str, wheel_paths)], check=True)
    return folder / "bin"


def _run(binaries: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(binaries / command[0]), *command[1:]],
        cwd=binaries,  # where none of our sources are
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )


def _shipped(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as wheel:
        return {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_together_the_wheels_are_every_file_and_none_twice(wheels: dict[str, Path]) -> None:
    client, server = _shipped(wheels["kvrelay"]), _shipped(wheels["kvrelay-server"])
    assert not client & server
    ours = {str(relative(path)) for path in own_files() if relative(path).parts[0] in PACKAGES}
    assert client | server == ours
    assert {name.split("/")[0] for name in client} == {"kvrelay"}


@pytest.fixture(scope="module")
def client_only(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _environment(tmp_path_factory.mktemp("client"), wheels["kvrelay"])


@pytest.fixture
def target() -> Iterator[str]:
    with serving(FakeGateway()) as address:
        yield address


def test_client_alone_calls_a_gateway(client_only: Path, target: str) -> None:
    lines = [
        "import sys",
        "from kvrelay.client import Client",
        f"with Client({target!r}) as client:",
        "    print(client.complete('Hi', max_tokens=4).text)",
        f"print([name for name in {(*_HEAVY, *_SERVER_PACKAGES)!r} if name in sys.modules])",
        "print([name for name in sys.modules if name.split('.')[:2][-1] in ('serving', 'text', 'cluster')])",
    ]
    done = _run(client_only, "python", "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Hello there", "[]", "[]"]
    look = f"import importlib.util as util; print([util.find_spec(name) for name in {_HEAVY!r}])"
    absent = _run(client_only, "python", "-c", look)
    assert absent.stdout.strip() == str([None] * len(_HEAVY))


def test_clients_errors_are_typed(client_only: Path) -> None:
    lines = [
        "from kvrelay.client import Client",
        "from kvrelay.errors import InvalidRequest",
        "try:",
        "    Client('localhost:x')",
        "except InvalidRequest as error:",
        "    print(error.field)",
    ]
    assert _run(client_only, "python", "-c", "\n".join(lines)).stdout == "target\n"


def test_command_line_without_its_libraries_says_what_to_install(client_only: Path) -> None:
    done = _run(client_only, "kvrelay", "status")
    assert done.returncode == 1
    assert done.stderr == 'error: the command line needs more than the client: pip install "kvrelay[cli]"\n'


def test_clients_command_line_has_the_commands_that_call(wheels: dict[str, Path], tmp_path: Path, target: str) -> None:
    binaries = _environment(tmp_path / "cli", wheels["kvrelay"], extra="cli")
    done = _run(binaries, "kvrelay", "generate", "Hi", "--target", target, "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "Hello there" in done.stdout
    refused = _run(binaries, "kvrelay", "serve", "--model", "smollm2")
    assert refused.returncode == 2
    assert "pip install kvrelay-server" in refused.stderr


def test_server_brings_the_rest(wheels: dict[str, Path], tmp_path: Path) -> None:
    binaries = _environment(tmp_path / "server", wheels["kvrelay"], wheels["kvrelay-server"], extra="cli")
    assert _run(binaries, "kvrelay", "version").stdout
    shown = _run(binaries, "kvrelay", "serve", "--help")
    assert shown.returncode == 0, shown.stderr
    imports = (
        "import gateway.app, prefill_service.servicer, decode_service.servicer, worker.main, kvrelay.cluster.local"
    )
    done = _run(binaries, "python", "-c", f"{imports}; import engine; print(engine.__file__)")
    assert done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout
