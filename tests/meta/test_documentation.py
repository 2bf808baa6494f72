"""The pages keep up with the code: every function, command, flag, make target and file they name exists."""

import ast
import re
from pathlib import Path

import pytest

from tests.meta.commands import unknown_part
from tests.meta.repository import ROOT, own_files, package_python, parse, relative

_ARCHITECTURE = ROOT / "docs" / "architecture.md"
_PAGES = tuple(path for path in own_files() if path.suffix == ".md")
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_CODE_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE_SPAN = re.compile(r"`((?:[\w.]+/)*\w+\.py)(?:::[\w.()]+)?`")
_LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)")
_MAKE_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")


def defined_in(tree: ast.Module, name: str) -> bool:
    """Whether a module defines `name`: a function, a class, a constant, or a dotted member of a class."""
    body: list[ast.stmt] = tree.body
    for part in name.removesuffix("()").split("."):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == part:
                body = node.body
                break
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == part for target in targets):
                body = []
                break
        else:
            return False
    return True


def _named_functions(page: Path) -> list[str]:
    return [span for span in _CODE_SPAN.findall(page.read_text(encoding="utf-8")) if "::" in span]


def _commands(page: Path) -> list[str]:
    """Command lines that start with `kvrelay`, from code blocks and code spans, without prompt, pipes and comments."""
    text = page.read_text(encoding="utf-8")
    spans = _CODE_SPAN.findall(_CODE_BLOCK.sub("", text))
    lines = [line for block in _CODE_BLOCK.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    candidates = (re.split(r"\s[#|>&·]|\s\.\.", line.strip().removeprefix("$ "))[0] for line in (*spans, *lines))
    return [c.removeprefix(".venv/bin/") for c in candidates if re.match(r"(\.venv/bin/)?kvrelay [a-z]", c)]


def test_architecture_page_walks_through_functions_that_exist() -> None:
    names = set(_named_functions(_ARCHITECTURE))
    assert len(names) >= 12, "the walk names each step as `path/to/module.py::Class.method`"
    missing = []
    for name in sorted(names):
        file, _, member = name.partition("::")
        if not (ROOT / file).is_file() or not defined_in(parse(ROOT / file), member):
            missing.append(name)
    assert not missing, f"docs/architecture.md names what does not exist: {missing}"


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(relative(page)))
def test_functions_named_in_other_pages_exist(page: Path) -> None:
    missing = []
    for name in _named_functions(page):
        file, _, member = name.partition("::")
        if file.endswith(".py") and not ((ROOT / file).is_file() and defined_in(parse(ROOT / file), member)):
            missing.append(name)
    assert not missing


def files_named_in_vain(path: Path) -> list[str]:
    """Python files that a source or page names, from the root or from its own folder, and that are not there."""
    named = set(_FILE_SPAN.findall(path.read_text(encoding="utf-8")))
    return sorted(name for name in named if not (ROOT / name).is_file() and not (path.parent / name).is_file())


def test_files_named_in_sources_and_pages_exist() -> None:
    paths = [path for path in (*package_python(), *_PAGES) if path.name != "CHANGELOG.md"]
    missing = {str(relative(path)): names for path in paths if (names := files_named_in_vain(path))}
    assert not missing, f"name files from the root or from their own folder: {missing}"


def test_files_named_in_vain_are_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text("See `page.py`, `engine/engine.py::Engine.step`, `gone.py` and `engine/gone.py`.", encoding="utf-8")
    assert files_named_in_vain(page) == ["engine/gone.py", "gone.py"]


def test_missing_names_are_noticed() -> None:
    tree = ast.parse("LIMIT = 1\nclass Relay:\n    size: int\n    async def run(self): ...\ndef place(): ...\n")
    assert all(defined_in(tree, name) for name in ("LIMIT", "Relay", "Relay.run", "Relay.size", "place()"))
    assert not any(defined_in(tree, name) for name in ("Relay.stop", "run", "place.run", "LIMIT.x"))


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(relative(page)))
def test_commands_in_pages_are_real(page: Path) -> None:
    wrong = {line: part for line in _commands(page) if (part := unknown_part(line)) is not None}
    assert not wrong, f"{relative(page)} names commands or flags that do not exist: {wrong}"


def test_readme_shows_the_command_line() -> None:
    assert len(_commands(ROOT / "README.md")) >= 5


def test_unknown_commands_and_flags_are_noticed() -> None:
    assert unknown_part("kvrelay frobnicate") == "frobnicate"
    assert unknown_part("kvrelay serve --frobnicate 3") == "--frobnicate"
    assert unknown_part("kvrelay serve --help") is None


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(relative(page)))
def test_make_targets_and_links_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = "\n".join((*_CODE_SPAN.findall(text), *_CODE_BLOCK.findall(text)))
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(_MAKE_TARGET.findall(code)) <= targets
    dead = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not dead, f"links to nothing: {dead}"
