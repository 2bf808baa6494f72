"""What a test left behind: threads, file descriptors, child processes and asyncio tasks.

Owns the snapshot and its comparison; the fixture `no_leaks` in conftest.py applies it around a test. Never ends or
closes anything itself, it only reports. Linux only, since it reads /proc.
"""

import asyncio
import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_PROC_SELF = Path("/proc/self")

#: Threads that outlive a test by design: gRPC's one poller per process, the event loop's default executor (which
#: ends with the loop, after the fixtures), and tqdm's progress monitor.
_LASTING_THREADS = ("_poll_wrapper", "asyncio_", "tqdm")

#: Descriptors that C libraries open once and keep for the process (gRPC's event engine polls on them).
_LASTING_DESCRIPTORS = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/null", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The live resources of this process at one moment."""

    threads: frozenset[threading.Thread]
    """Python threads, without those that last by design."""
    descriptors: frozenset[str]
    """Open descriptors as `number -> target`."""
    children: frozenset[int]
    """Process ids of direct children."""
    tasks: frozenset["asyncio.Task[object]"]
    """Unfinished tasks of the running loop, without the current one; empty outside a loop."""

    @classmethod
    def take(cls) -> "Snapshot":
        """Collect garbage, then read what is live now."""
        gc.collect()
        return cls(_threads(), _descriptors(), _children(), _tasks())

    def new_in(self, later: "Snapshot") -> list[str]:
        """Describe everything `later` has and this snapshot lacks, one line each; empty when nothing leaked."""
        return [
            *(f"thread {thread.name}" for thread in later.threads - self.threads),
            *(f"descriptor {descriptor}" for descriptor in later.descriptors - self.descriptors),
            *(f"child process {pid}" for pid in later.children - self.children),
            *(f"task {task.get_name()}: {task.get_coro()}" for task in later.tasks - self.tasks),
        ]


def wait_for_no_leaks(before: Snapshot, patience_s: float = 3.0) -> list[str]:
    """Wait until nothing new is left since `before`, or return what still is after `patience_s` seconds.

    Sockets and threads close a moment after the call that closes them returns, hence the patience. For use outside
    an event loop; `settle_no_leaks` is its twin inside one.
    """
    give_up_at = time.monotonic() + patience_s
    while (leaks := before.new_in(Snapshot.take())) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return leaks


async def settle_no_leaks(before: Snapshot, patience_s: float = 3.0) -> list[str]:
    """Like `wait_for_no_leaks`, but lets the running loop go on while it waits."""
    give_up_at = time.monotonic() + patience_s
    # /proc offers nothing to wait on, so this looks again and again.
    while (leaks := before.new_in(Snapshot.take())) and time.monotonic() < give_up_at:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return leaks


def _threads() -> frozenset[threading.Thread]:
    live = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return frozenset(thread for thread in live if not any(name in thread.name for name in _LASTING_THREADS))


def _descriptors() -> frozenset[str]:
    found = set()
    for number in os.listdir(_PROC_SELF / "fd"):
        try:
            target = os.readlink(_PROC_SELF / "fd" / number)
        except FileNotFoundError:  # the descriptor of this very listing, or one that closed meanwhile
            continue
        if not target.startswith(_LASTING_DESCRIPTORS):
            found.add(f"{number} -> {target}")
    return frozenset(found)


def _children() -> frozenset[int]:
    pids: set[int] = set()
    for thread in (_PROC_SELF / "task").iterdir():
        try:
            pids.update(map(int, (thread / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
            continue
    return frozenset(pids)


def _tasks() -> frozenset["asyncio.Task[object]"]:
    try:
        current = asyncio.current_task()
        return frozenset(task for task in asyncio.all_tasks() if task is not current)
    except RuntimeError:  # no loop runs in this thread
        return frozenset()
