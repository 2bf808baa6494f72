"""The C heap is told once to keep what is freed, and it is no error where it does not listen."""

import ctypes
import platform

import pytest

from kv_transfer.transports.grpc.heap import keep_freed_memory


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    keep_freed_memory.cache_clear()


def test_only_glibc_takes_the_setting() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
