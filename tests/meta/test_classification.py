"""Every test has a place and a class: known folders, known markers, none that can be skipped."""

import ast
import tomllib
from collections.abc import Iterator

from tests.meta.repository import PACKAGES, ROOT, collected_files, parse, relative

_KINDS = {"unit", "property", "oracle", "contract", "integration", "faults", "e2e", "meta"}
_BUILT_IN_MARKERS = {"parametrize", "usefixtures", "timeout", "filterwarnings", "asyncio"}
# A test that skips itself passes where it should fail: what it needs is installed by `make setup`, and what needs a
# GPU is deselected by marker, not skipped.
_SKIPPING = {"skip", "skipif", "importorskip", "xfail"}


def _project_markers() -> set[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {line.split(":")[0] for line in settings["tool"]["pytest"]["ini_options"]["markers"]}


def _pytest_attributes(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, name, is_marker) of every `pytest.name` and `pytest.mark.name`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == "pytest":
            yield node.lineno, node.attr, False
        elif isinstance(owner, ast.Attribute) and owner.attr == "mark":
            yield node.lineno, node.attr, True


def test_every_test_file_lies_in_a_known_folder() -> None:
    assert collected_files()
    lost = [str(relative(path)) for path in collected_files() if relative(path).parts[1] not in _KINDS]
    assert not lost, f"tests belong in one of {sorted(_KINDS)}: {lost}"


def test_unit_tests_mirror_the_packages() -> None:
    unit = [relative(path).parts for path in collected_files() if relative(path).parts[1] == "unit"]
    lost = ["/".join(parts) for parts in unit if parts[2] not in PACKAGES]
    assert not lost, f"unit tests lie in tests/unit/<package>/: {lost}"


def test_test_folders_are_no_packages() -> None:
    inits = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("__init__.py")]
    assert not inits, "names of test files may repeat because the folders are no packages"


def test_every_marker_is_known() -> None:
    known = _project_markers() | _BUILT_IN_MARKERS
    unknown = [
        f"{relative(path)}:{line}: {name}"
        for path in collected_files()
        for line, name, is_marker in _pytest_attributes(parse(path))
        if is_marker and name not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_no_test_skips_itself() -> None:
    skipping = [
        f"{relative(path)}:{line}: {name}"
        for path in collected_files()
        for line, name, _ in _pytest_attributes(parse(path))
        if name in _SKIPPING
    ]
    assert not skipping, "\n".join(skipping)


def test_skipping_and_markers_are_noticed() -> None:
    tree = ast.parse("@pytest.mark.nonsense\ndef test_x():\n    pytest.skip('no')")
    assert {(name, is_marker) for _, name, is_marker in _pytest_attributes(tree)} == {
        ("mark", False),
        ("nonsense", True),
        ("skip", False),
    }
