"""A module is a page, a folder a shelf: what has grown beyond that has a second one inside."""

from collections import Counter

from tests.meta.repository import own_python, package_python, relative

_MAX_LINES = 400
_MAX_MODULES = 16


def test_no_module_is_longer_than_the_limit() -> None:
    sizes = {str(relative(path)): len(path.read_text(encoding="utf-8").splitlines()) for path in own_python()}
    assert sizes, "no Python files found"
    too_long = {name: lines for name, lines in sizes.items() if lines > _MAX_LINES}
    assert not too_long, f"longer than {_MAX_LINES} lines: {too_long}"


def test_no_folder_has_more_modules_than_the_limit() -> None:
    sizes = Counter(str(relative(path).parent) for path in package_python() if path.name != "__init__.py")
    assert sizes["gateway/relay"] > 1
    too_full = {name: count for name, count in sizes.items() if count > _MAX_MODULES}
    assert not too_full, f"more than {_MAX_MODULES} modules beside each other: {too_full}"
