"""Keeps the C heap from giving memory back to the kernel between two messages.

gRPC allocates every message anew, on each side more than once. By default glibc returns blocks of that size to the
kernel when they are freed, so each message pays for fresh, zeroed pages: a third of the time of a transfer. The setting
is the whole process's; what it keeps is bounded by what was in use at once.
"""

import ctypes
from functools import lru_cache
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
TRIM_BYTES: Final = 256 << 20
"""Free memory at the end of the heap beyond which it is given back."""
MMAP_BYTES: Final = 32 << 20
"""Blocks from this size on get a mapping of their own; the most that glibc takes."""


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Have this process's heap keep what is freed, once; returns whether the C library lets itself be told."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # not glibc
    return bool(mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES) and mallopt(_M_MMAP_THRESHOLD, MMAP_BYTES))
