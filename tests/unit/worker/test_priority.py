"""A worker's place among the processes of its cores, asked of the kernel itself, in a process of its own."""

import os
import subprocess
import sys

import pytest

_SHOW = """
import ctypes, os, platform, struct, sys, threading
from worker.priority import share_cores
share_cores(int(sys.argv[1]), int(sys.argv[2]))
def show():
    attributes = ctypes.create_string_buffer(56)
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 56, 0) == 0
    fields = struct.unpack("=IIQiIQQQII", attributes.raw)
    print(fields[3], fields[5])
thread = threading.Thread(target=show)
thread.start()
thread.join()
"""


def shown(nice: int, slice_us: int) -> tuple[int, int]:
    """Nice value and slice in nanoseconds of a thread that a process starts after `share_cores`."""
    run = subprocess.run(
        [sys.executable, "-c", _SHOW, str(nice), str(slice_us)], check=True, capture_output=True, text=True
    )
    own_nice, slice_ns = run.stdout.split()
    return int(own_nice), int(slice_ns)


def has_slices() -> bool:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return sys.platform == "linux" and (major, minor) >= (6, 12)


@pytest.mark.parametrize("nice", [0, 3])
def test_threads_inherit_nice_and_slice(nice: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    own_nice, slice_ns = shown(nice, 250)
    assert own_nice == min(before + nice, 19)
    if has_slices():
        assert slice_ns == 250_000


def test_zero_leaves_the_slice_alone() -> None:
    assert shown(0, 0)[1] != shown(0, 250)[1] or not has_slices()
