"""One child process of a local cluster: start, log file, exit, stop.

Owns the process and what can be said about its end. Which processes there are is decided in `kvrelay/cluster/local.py`.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import kvrelay
from kvrelay.errors import ClusterError

_MAX_TAIL_BYTES = 16_384
_MAX_TAIL_LINES = 8


def child_command(role: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line that runs a role as a child of this process.

    Args:
        role: `gateway`, `prefill` or `decode`.
        arguments: The role's flags.
    """
    return [sys.executable, "-m", "kvrelay.cluster.child", str(os.getpid()), role, *arguments]


class ManagedProcess:
    """A child process with its log in a file.

    Args:
        name: Name in the cluster, e.g. `decode-0`.
        command: What to run.
        run_dir: Where the log goes.
    """

    def __init__(self, name: str, command: Sequence[str], run_dir: Path) -> None:
        self.name = name
        self.command = tuple(command)
        self.log_path = run_dir / f"{name}.log"
        self.num_starts = 0
        """How often it has been started."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._exited: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None before the first start."""
        return None if self._popen is None else self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs or before the first start."""
        return self._exited.result() if self._exited is not None and self._exited.done() else None

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._exited is not None and not self._exited.done()

    def start(self) -> None:
        """Start it, or start it again; the log is appended to. Needs a running event loop.

        Raises:
            ClusterError: The operating system refuses.
        """
        if self.is_running:
            raise ClusterError(f"{self.name} runs already")
        loop = asyncio.get_running_loop()
        try:
            with self.log_path.open("ab") as log:
                self._popen = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=_child_environment(),
                    # A Ctrl-C in the terminal reaches only the parent, which drains the children in order.
                    start_new_session=True,
                )
            # asyncio's own watcher loses the exit code when a signal is sent at the moment of the end: sending polls,
            # polling reaps. A descriptor of the process can be waited for and signalled without such a race.
            self._pidfd = os.pidfd_open(self._popen.pid)
        except OSError as error:
            raise ClusterError(f"{self.name} cannot be started: {error}") from error
        self._exited = loop.create_future()
        loop.add_reader(self._pidfd, self._on_exit)
        self.num_starts += 1

    def _on_exit(self) -> None:
        if self._pidfd is None or self._popen is None or self._exited is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        # It has ended, so this only collects the exit code.
        self._exited.set_result(self._popen.wait())

    async def wait(self) -> int:
        """Wait for its end and return the exit code."""
        if self._exited is None:
            raise ClusterError(f"{self.name} has not been started")
        return await asyncio.shield(self._exited)

    async def stop(self, patience_s: float) -> None:
        """Ask it to drain and end; kill it if that takes longer than `patience_s`."""
        if not self.is_running:
            return
        self.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), patience_s)
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if it has ended."""
        if self._pidfd is not None:
            # It may have ended without the loop having heard of it.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def describe_exit(self, exit_code: int) -> str:
        """Return how it ended, in words."""
        if exit_code >= 0:
            return f"ended with exit code {exit_code}"
        try:
            return f"was ended by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was ended by signal {-exit_code}"

    def last_words(self) -> str:
        """Return the end of its log, for an error message: the errors it told, or else its last lines."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - _MAX_TAIL_BYTES))
                lines = log.read().decode("utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        told = [_told_error(line) for line in lines]
        errors = [line for line in told if line]
        return "\n".join(f"  {line}" for line in (errors or lines)[-_MAX_TAIL_LINES:])


def _told_error(line: str) -> str:
    """Return a structured error line in words; empty if it is none."""
    try:
        event = json.loads(line)
    except ValueError:
        # A settings message: plain text, one line for each wrong setting.
        return line if line.startswith("kvrelay ") else ""
    if not isinstance(event, dict) or event.get("level") not in ("error", "critical"):
        return ""
    error = event.get("error") or str(event.get("exception", "")).strip().rpartition("\n")[2]
    return f"{event.get('event', '')}: {error}" if error else str(event.get("event", ""))


def _child_environment() -> dict[str, str]:
    environment = dict(os.environ)
    # Spinning threads would take the cores from the other processes on the same machine.
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("GRPC_VERBOSITY", "ERROR")
    environment["PYTHONUNBUFFERED"] = "1"
    # Which file a role reads is said by its flags.
    environment.pop("KVRELAY_CONFIG", None)
    # The children must run the code that runs here, also from a source tree that is not installed.
    root = str(Path(kvrelay.__file__).resolve().parent.parent)
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def make_run_dir(wanted: Path | None) -> Path:
    """Return a directory that only this user can enter.

    Args:
        wanted: Made if it does not exist. None: a new one under XDG_RUNTIME_DIR, or else the temporary directory.

    Raises:
        ClusterError: It cannot be made.
    """
    try:
        if wanted is not None:
            wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
            return wanted.resolve()
        base = os.environ.get("XDG_RUNTIME_DIR", "")
        if not (base and os.path.isdir(base) and os.access(base, os.W_OK)):
            base = tempfile.gettempdir()
        return Path(tempfile.mkdtemp(prefix="kvrelay-", dir=base))
    except OSError as error:
        raise ClusterError(f"cannot make the run directory: {error}") from error
