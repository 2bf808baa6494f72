"""A module is a page: at most 400 lines. A longer one has a second module inside."""

from tests.meta.repository import own_python, relative

_MAX_LINES = 400


def test_no_module_is_longer_than_the_limit() -> None:
    sizes = {str(relative(path)): len(path.read_text(encoding="utf-8").splitlines()) for path in own_python()}
    assert sizes, "no Python files found"
    too_long = {name: lines for name, lines in sizes.items() if lines > _MAX_LINES}
    assert not too_long, f"longer than {_MAX_LINES} lines: {too_long}"
