"""How a worker shares cores with others: nice value and time slice, as the operating system's scheduler takes them.

Prefill and decode on the same cores would otherwise wait for each other's whole slices, several milliseconds, which is
as long as a decode step. Must run before threads are started: they inherit both.
"""

import ctypes
import os
import platform
import struct
import sys

import structlog

_log = structlog.get_logger(__name__)

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""System call numbers; neither Python nor glibc before 2.41 has a function for it."""
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
"""struct sched_attr, second version: size, policy, flags, nice, priority, runtime, deadline, period, two clamps."""
_MICROSECOND_NS = 1000


def share_cores(nice: int, slice_us: int) -> None:
    """Take a place among the processes of these cores.

    Args:
        nice: Added to this process's nice value; higher yields to others.
        slice_us: Longest time in microseconds that a thread keeps a core others wait for; 0 = the system's default.
            A wish: Linux before 6.12 and other systems do not know it.
    """
    if nice:
        os.nice(nice)
    number = _SCHED_SETATTR.get(platform.machine())
    if not slice_us or not sys.platform.startswith("linux") or number is None:
        return
    policy = os.sched_getscheduler(0)
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)
    wish = _ATTRIBUTES.pack(_ATTRIBUTES.size, policy, 0, own_nice, 0, slice_us * _MICROSECOND_NS, 0, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if policy == os.SCHED_OTHER and libc.syscall(number, 0, wish, 0) != 0:
        _log.info("priority.no_slice", reason=os.strerror(ctypes.get_errno()))
