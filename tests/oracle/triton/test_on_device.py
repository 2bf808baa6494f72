"""The device checks on a GPU. Each in a process of its own: this one has the kernels under the interpreter."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Folder = Callable[[str], Path]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["engine", "reports", "transfer"])
def test_checks_hold_on_the_device(name: str, tiny_folder: Folder) -> None:
    command = [sys.executable, "-m", "tests.oracle.triton.device_checks", name, "cuda", str(tiny_folder("llama_tied"))]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
