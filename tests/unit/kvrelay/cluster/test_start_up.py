"""Signals before a role is ready, as process 1 of a container gets them: no default disposition helps there."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
_ROLES = {"gateway": "gateway", "prefill": "prefill_service", "decode": "decode_service"}


def _fake_role(folder: Path, package: str) -> None:
    """A role that says that it is loading and then does so for ever, on another thread."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("")
    (folder / package / "__main__.py").write_text(
        "import pathlib, sys, threading, time\n"
        "def main(argv):\n"
        "    thread = threading.Thread(target=time.sleep, args=(60,))\n"
        "    thread.start()\n"
        f"    pathlib.Path({str(folder / 'loading')!r}).touch()\n"
        "    thread.join()\n"
        "    return 3\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )


def _as_process_one(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command in a process namespace of its own, where this system lets us; else as it is."""
    unshare = shutil.which("unshare")
    inside = [unshare, "--user", "--map-root-user", "--pid", "--fork", "--kill-child"] if unshare else []
    if inside and subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        inside = []
    return subprocess.Popen([*inside, *command], cwd=folder, env=environment, stderr=subprocess.PIPE)


def _innermost(pid: int) -> int:
    """The last of a line of only children."""
    while children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        pid = int(children[0])
    return pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("role", ["gateway", "decode"])
def test_role_that_is_still_loading_ends_at_a_signal_even_as_process_one(
    tmp_path: Path, role: str, number: signal.Signals
) -> None:
    _fake_role(tmp_path, _ROLES[role])
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = _as_process_one([sys.executable, "-m", "kvrelay.cli.main", role], tmp_path, environment)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "loading").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        started = time.monotonic()
        os.kill(_innermost(process.pid), number)
        assert process.wait(10) == 0
        assert time.monotonic() - started < 2
    finally:
        process.kill()
        _, told = process.communicate()
    assert told.decode() == f"kvrelay {role}: stopped by {number.name} before it was ready\n"
