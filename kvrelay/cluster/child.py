"""`python -m kvrelay.cluster.child PARENT_PID ROLE [ARGS]`: runs a role as a child that never outlives its parent.

Owns that one promise. The kernel is asked, in the child's own start, to kill it when its parent dies; that needs no
code between fork and exec, which would not be safe beside gRPC's threads. Started by `kvrelay/cluster/process.py`.
"""

import ctypes
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from typing import Final

from kvrelay.serving.start_up import stops_at_once

_PR_SET_PDEATHSIG: Final = 1
ROLE_MODULES: Final = {"gateway": "gateway", "prefill": "prefill_service", "decode": "decode_service"}


def main(argv: Sequence[str]) -> None:
    """Tie this process to its parent, then become the role's `__main__`."""
    parent_pid, role, *arguments = argv
    # Not SIGTERM: nobody is left to wait for a drain.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        sys.exit(f"kvrelay: prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != int(parent_pid):
        # The parent died before the request above.
        sys.exit(1)
    module = ROLE_MODULES[role]
    sys.argv = [module, *arguments]
    with stops_at_once(f"kvrelay {role}"):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
