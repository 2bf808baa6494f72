"""The two distributions: every package with its type marker, one version, and a command that starts."""

import tomllib
from importlib.metadata import distribution

import kvrelay
from tests.meta.repository import PACKAGES, ROOT, run_tool

_SERVER, _CLIENT = (
    tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8")) for folder in (".", "client")
)


def test_every_package_is_typed_and_documented() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)
    assert all((ROOT / package / "__init__.py").is_file() for package in PACKAGES)


def test_version_is_the_same_everywhere() -> None:
    declared = {project["project"]["version"] for project in (_SERVER, _CLIENT)}
    assert declared == {kvrelay.__version__, distribution("kvrelay").version, distribution("kvrelay-server").version}


def test_installed_command_starts_and_lists_its_sub_commands() -> None:
    shown = run_tool("kvrelay", "--help")
    assert shown.returncode == 0, shown.stdout
    for name in ("demo", "serve", "gateway", "prefill", "decode", "generate", "chat", "status", "check"):
        assert name in shown.stdout


def test_scripts_pass_shellcheck() -> None:
    lint = run_tool("shellcheck", "scripts/setup.sh", ".ci/run")
    assert lint.returncode == 0, lint.stdout
