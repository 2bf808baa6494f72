"""What is frozen is left alone, and garbage is not frozen."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvrelay.serving.heap import freeze_start_up


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def test_only_what_came_later_is_collected() -> None:
    node = Node()
    seen = weakref.ref(node)
    freeze_start_up()
    later = Node()
    seen_later = weakref.ref(later)
    del node, later
    gc.collect()
    assert seen() is not None
    assert seen_later() is None


def test_garbage_of_start_up_is_not_kept() -> None:
    seen = weakref.ref(Node())
    assert seen() is not None
    freeze_start_up()
    assert seen() is None
