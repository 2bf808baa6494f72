"""`python -m benchmarks.peers.tied PARENT_PID COMMAND...`: runs a command that never outlives its parent.

A peer may be stopped when its parent is killed; nobody would ever continue it. The kernel kills it instead. Standard
library only.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` as long as this process lives."""
    return [sys.executable, "-m", "benchmarks.peers.tied", str(os.getpid()), *command]


def main(argv: Sequence[str]) -> None:
    """Ask the kernel, then become the command."""
    parent_pid, *command = argv
    # The wish survives exec.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent_pid):
        sys.exit(1)  # it died before
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
