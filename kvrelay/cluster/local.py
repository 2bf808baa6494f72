"""A local cluster: one gateway, prefill and decode workers as child processes of this one.

Owns starting, watching, restarting and draining them. Used by `kvrelay serve`, `kvrelay demo`, the tests and the
benchmarks. Never serves anything itself; `process.py` is one child, `child.py` its start.
"""

import asyncio
import contextlib
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from kvrelay.client import INFERENCE_SERVICE, AsyncClient
from kvrelay.cluster.process import ManagedProcess, child_command, make_run_dir
from kvrelay.errors import ClusterError, EngineError
from kvrelay.results import ServerInfo
from kvrelay.serving.server import check_address

_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_POLL_INTERVAL_S = 0.1
_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 30.0
_STABLE_AFTER_S = 60.0
"""A process that ran this long starts its back-off anew."""
_KILL_MARGIN_S = 10.0
"""Beyond its drain, a process that does not end is killed after this long."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What a local cluster consists of."""

    model: str = "smollm2"
    """As `--model` takes it."""
    num_prefill: int = 1
    num_decode: int = 1
    host: str = "127.0.0.1"
    """Address the gateway listens on; workers are reached on the loopback interface only."""
    port: int = 0
    """The gateway's port; 0 = any free one."""
    http_port: int | None = None
    """Port of the gateway's HTTP API; 0 = any free one, None = no such API, unless `gateway_args` say so."""
    gateway_args: Sequence[str] = ()
    """More flags for the gateway, after those above."""
    worker_args: Sequence[str] = ()
    """More flags for all workers."""
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    log_level: str = "info"
    run_dir: Path | None = None
    """Where sockets and logs go. None: a new private directory, removed after a clean end."""
    restarts: bool = False
    """Whether a process that dies is started again, with growing pauses."""
    ready_timeout_s: float = 300.0
    """Longest wait for the whole cluster to be ready."""
    drain_timeout_s: float = 15.0
    """Longest time that running requests get at the end."""


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened to a child."""

    process: str
    """Its name, e.g. `decode-0`."""
    text: str
    """One line for people."""


@dataclass(slots=True)
class _Backoff:
    delay_s: float = _FIRST_BACKOFF_S
    started: float = field(default_factory=time.monotonic)

    def next_delay(self) -> float:
        if time.monotonic() - self.started > _STABLE_AFTER_S:
            self.delay_s = _FIRST_BACKOFF_S
        delay, self.delay_s = self.delay_s, min(2 * self.delay_s, _LONGEST_BACKOFF_S)
        return delay


class LocalCluster:
    """Starts a cluster on entry, waits until it is ready, and drains it on exit.

    Example::

        async with LocalCluster(ClusterConfig(num_decode=2)) as cluster:
            async with AsyncClient(cluster.target) as client:
                print((await client.complete("Hello", max_tokens=8)).text)

    Args:
        config: What it consists of.
        on_event: Told, in the event loop, when a child dies, is restarted, or the start goes on.
        command_for: Makes the command line of a role with its flags; for tests without a model.
    """

    def __init__(
        self,
        config: ClusterConfig | None = None,
        on_event: Callable[[ClusterEvent], None] = lambda _event: None,
        command_for: Callable[[str, Sequence[str]], Sequence[str]] = child_command,
    ) -> None:
        self._command_for = command_for
        self.config = config or ClusterConfig()
        self._on_event = on_event
        self._run_dir: Path | None = None
        self._port = self.config.port
        self._http_port = self.config.http_port
        self._instance_id = secrets.token_hex(8)
        self._processes: dict[str, ManagedProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._was_ready = False
        self._failure: asyncio.Future[ClusterError] | None = None

    @property
    def port(self) -> int:
        """The gateway's port."""
        return self._port

    @property
    def http_port(self) -> int | None:
        """The port of its HTTP API; None: it has none, or one that its own settings name."""
        return self._http_port

    @property
    def target(self) -> str:
        """The gateway's address as a client on this machine writes it."""
        host = _LOOPBACK_OF.get(self.config.host, self.config.host)
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"

    @property
    def http_target(self) -> str:
        """The HTTP API's address as a client on this machine writes it."""
        host = _LOOPBACK_OF.get(self.config.host, self.config.host)
        return f"[{host}]:{self._http_port}" if ":" in host else f"{host}:{self._http_port}"

    @property
    def run_dir(self) -> Path:
        """Where sockets and logs are.

        Raises:
            ClusterError: The cluster has not been started.
        """
        if self._run_dir is None:
            raise ClusterError("the cluster has not been started")
        return self._run_dir

    @property
    def processes(self) -> tuple[ManagedProcess, ...]:
        """The children: the gateway first, then prefill, then decode."""
        return tuple(self._processes.values())

    def process(self, name: str) -> ManagedProcess:
        """Return one child by its name: `gateway`, `prefill-0`, `decode-0`, ..."""
        return self._processes[name]

    async def start(self) -> None:
        """Start every process. Returns at once; `wait_ready` waits.

        Raises:
            InvalidRequest: The gateway's address cannot be used; names `port` or `host`.
            ClusterError: A process cannot be started.
        """
        if self.config.port:
            # Before a model is loaded for nothing. The gateway finds out by itself who takes the port after this.
            check_address(self.config.host, self.config.port)
        if self.config.http_port:
            check_address(self.config.host, self.config.http_port, field="http_port")
        self._failure = asyncio.get_running_loop().create_future()
        self._run_dir = make_run_dir(self.config.run_dir)
        self._port = self.config.port or _free_port(self.config.host)
        if self._http_port == 0:
            self._http_port = _free_port(self.config.host)
        for name, role, arguments in self._plan():
            self._processes[name] = ManagedProcess(name, self._command_for(role, arguments), self._run_dir)
        for process in self.processes:
            process.start()
            watcher = asyncio.create_task(self._watch(process), name=f"watch {process.name}")
            self._watchers.append(watcher)

    def _plan(self) -> list[tuple[str, str, list[str]]]:
        config = self.config
        shared = ["--model", config.model, "--log-level", config.log_level]
        shared += ["--drain-timeout-s", str(config.drain_timeout_s)]
        gateway = ["--host", config.host, "--port", str(self._port), "--instance-id", self._instance_id]
        if self._http_port is not None:
            gateway += ["--http-port", str(self._http_port)]
        gateway += [*shared, *config.gateway_args]
        plan = [("gateway", "gateway", gateway)]
        for role, count, own in (
            ("prefill", config.num_prefill, config.prefill_args),
            ("decode", config.num_decode, config.decode_args),
        ):
            for index in range(count):
                name = f"{role}-{index}"
                worker = ["--host", "127.0.0.1", "--port", "0", "--gateway", self.target, "--worker-id", name]
                worker += ["--run-dir", str(self.run_dir), *shared, *config.worker_args, *own]
                plan.append((name, role, worker))
        return plan

    async def wait_ready(self) -> ServerInfo:
        """Wait until the gateway takes requests and every worker is connected; return its view of the cluster.

        Raises:
            ClusterError: A process ended, or it took longer than `ready_timeout_s`.
        """
        shown = ""
        deadline = time.monotonic() + self.config.ready_timeout_s
        async with AsyncClient(self.target) as client:
            while True:
                self._raise_failure()
                info = await self._probe(client)
                text = self._progress(info)
                if text != shown:
                    shown = text
                    self._on_event(ClusterEvent("cluster", text))
                if info is not None and self._is_complete(info) and await client.is_serving(INFERENCE_SERVICE):
                    self._was_ready = True
                    return info
                if time.monotonic() > deadline:
                    raise ClusterError(f"the cluster was not ready within {self.config.ready_timeout_s:g} s: {text}")
                await asyncio.sleep(_POLL_INTERVAL_S)

    async def _probe(self, client: AsyncClient) -> ServerInfo | None:
        """Ask the gateway for its cluster; None while it does not answer, or another one does on its port."""
        with contextlib.suppress(EngineError):
            info = await client.server_info(timeout_s=2.0)
            if info.instance_id == self._instance_id:
                return info
        return None

    def _num_connected(self, info: ServerInfo) -> int:
        """Count this cluster's own workers that the gateway has a session to."""
        return sum(worker.is_connected and worker.worker_id in self._processes for worker in info.workers)

    def _is_complete(self, info: ServerInfo) -> bool:
        return self._num_connected(info) == self.config.num_prefill + self.config.num_decode

    def _progress(self, info: ServerInfo | None) -> str:
        if info is None:
            return "starting the gateway"
        num_workers = self.config.num_prefill + self.config.num_decode
        return f"loading the model ({self._num_connected(info)} of {num_workers} workers ready)"

    def _raise_failure(self) -> None:
        if self._failure is not None and self._failure.done():
            raise self._failure.result()

    async def wait_failed(self) -> ClusterError:
        """Wait until a process has died that is not restarted; for ever if all go well."""
        if self._failure is None:
            raise ClusterError("the cluster has not been started")
        return await asyncio.shield(self._failure)

    async def _watch(self, process: ManagedProcess) -> None:
        backoff = _Backoff()
        while True:
            exit_code = await process.wait()
            if self._is_stopping:
                return
            why = f"{process.name} {process.describe_exit(exit_code)}"
            # What fails during the start, or ends with 2 for a wrong setting, would only fail again.
            if not self.config.restarts or not self._was_ready or exit_code == 2:
                if self._failure is not None and not self._failure.done():
                    self._failure.set_result(ClusterError(f"{why}\n{process.last_words()}".rstrip()))
                return
            delay_s = backoff.next_delay()
            self._on_event(ClusterEvent(process.name, f"{why}; starting it again in {delay_s:g} s"))
            await asyncio.sleep(delay_s)
            backoff.started = time.monotonic()
            process.start()
            self._on_event(ClusterEvent(process.name, f"{process.name} started again (pid {process.pid})"))

    async def stop(self) -> None:
        """Drain the gateway, then the workers, and wait for their ends. May be called again."""
        self._is_stopping = True
        patience_s = self.config.drain_timeout_s + _KILL_MARGIN_S
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        # The gateway first: what runs can finish only while the workers live.
        for group in (self.processes[:1], self.processes[1:]):
            await asyncio.gather(*(process.stop(patience_s) for process in group))
        if self._run_dir is not None and self.config.run_dir is None and self.is_clean:
            await asyncio.to_thread(shutil.rmtree, self._run_dir, ignore_errors=True)

    def cut(self) -> None:
        """Kill every child at once."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)

    @property
    def is_clean(self) -> bool:
        """Whether every child that has ended did so because it was told to, so that nobody will want the logs."""
        # SIGTERM ends a process that is still loading at once.
        ended_well = all(process.exit_code in (0, None, -signal.SIGTERM) for process in self.processes)
        return ended_well and not (self._failure is not None and self._failure.done())

    async def __aenter__(self) -> Self:
        try:
            await self.start()
            await self.wait_ready()
        except BaseException:
            # Also when the wait is cancelled: no child may be left behind.
            await asyncio.shield(self.stop())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one child; for tests of what happens then."""
        self._processes[name].send_signal(number)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ClusterError(f"cannot listen on {host!r}: {error}") from error
