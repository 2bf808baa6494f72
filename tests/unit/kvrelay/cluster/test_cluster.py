"""A local cluster of fake roles: start, readiness, death, restart, drain, and nothing left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, ClusterEvent, LocalCluster
from kvrelay.cluster.process import ManagedProcess, child_command, make_run_dir
from kvrelay.errors import ClusterError, InvalidRequest

pytestmark = pytest.mark.usefixtures("no_leaks")
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def private_run_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def fake_command(role: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tests.unit.kvrelay.cluster.fake_role", role, *arguments]


def make_cluster(events: list[str] | None = None, **config: object) -> LocalCluster:
    def on_event(event: ClusterEvent) -> None:
        if events is not None:
            events.append(event.text)

    settings = ClusterConfig(**{"drain_timeout_s": 1.0, "ready_timeout_s": 30.0, **config})  # type: ignore[arg-type]  # keywords of the test
    return LocalCluster(settings, on_event, command_for=fake_command)


async def wait_until(condition: "object", timeout_s: float = 15.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_cluster_is_ready_inside_and_gone_outside(tmp_path: Path) -> None:
    events: list[str] = []
    async with make_cluster(events) as cluster:
        async with AsyncClient(cluster.target) as client:
            assert (await client.complete("Hi")).text == "Hello there"
        assert [process.name for process in cluster.processes] == ["gateway", "prefill-0", "decode-0"]
        assert all(process.is_running for process in cluster.processes)
        run_dir = cluster.run_dir
        assert run_dir.stat().st_mode & 0o777 == 0o700
        assert all(process.log_path.exists() for process in cluster.processes)
    assert [process.exit_code for process in cluster.processes] == [0, 0, 0]
    assert not run_dir.exists()
    assert events[0] == "starting the gateway"


async def test_second_cluster_on_a_port_starts_nothing_and_names_it() -> None:
    async with make_cluster() as first:
        second = make_cluster(port=first.port)
        with pytest.raises(InvalidRequest, match=f"port: 127.0.0.1:{first.port} is already in use"):
            await second.__aenter__()
        assert second.processes == ()


async def test_answers_of_another_cluster_s_gateway_are_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once: the loser's gateway ends while the winner's answers on the port that both wanted."""
    async with make_cluster() as winner:
        monkeypatch.setattr("kvrelay.cluster.local.check_address", lambda _host, _port: None)
        monkeypatch.setenv("FAKE_ROLE", "crash gateway")
        loser = make_cluster(port=winner.port)
        with pytest.raises(ClusterError, match="gateway ended with exit code 1"):
            await loser.__aenter__()


async def test_roles_get_their_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PREFILL", "2")
    cluster = make_cluster(num_prefill=2, model="m.gguf", worker_args=["--x", "1"], decode_args=["--y", "2"])
    async with cluster:
        commands = {process.name: " ".join(process.command) for process in cluster.processes}
    assert f"--port {cluster.port} --instance-id " in commands["gateway"]
    assert "--model m.gguf" in commands["gateway"]
    assert "--x" not in commands["gateway"]
    for name in ("prefill-0", "prefill-1", "decode-0"):
        assert f"--gateway {cluster.target} --worker-id {name} --run-dir" in commands[name]
        assert "--x 1" in commands[name]
    assert commands["decode-0"].endswith("--x 1 --y 2")
    assert "--y" not in commands["prefill-0"]


async def test_role_that_fails_during_the_start_ends_it_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ROLE", "crash decode")
    cluster = make_cluster(restarts=True)
    with pytest.raises(ClusterError, match=r"decode-0 ended with exit code 1\n  role.failed: no luck"):
        await cluster.__aenter__()
    assert not any(process.is_running for process in cluster.processes)
    assert cluster.run_dir.exists(), "the logs are wanted after a failure"


async def test_dead_worker_is_told_and_started_again() -> None:
    events: list[str] = []
    async with make_cluster(events, restarts=True) as cluster:
        worker = cluster.process("decode-0")
        first_pid = worker.pid
        cluster.kill("decode-0")
        await wait_until(lambda: worker.num_starts == 2 and worker.is_running)
        assert worker.pid != first_pid
    assert "decode-0 was ended by SIGKILL; starting it again in 0.5 s" in events
    assert any(text.startswith("decode-0 started again") for text in events)


async def test_dead_worker_without_restarts_is_a_failure() -> None:
    async with make_cluster() as cluster:
        cluster.kill("prefill-0")
        error = await asyncio.wait_for(cluster.wait_failed(), 10)
        assert str(error) == "prefill-0 was ended by SIGKILL"
        assert cluster.process("prefill-0").num_starts == 1
    assert not cluster.is_clean


async def test_stop_during_a_pause_before_a_restart_starts_nothing() -> None:
    async with make_cluster(restarts=True) as cluster:
        cluster.kill("decode-0")
        await asyncio.wait_for(cluster.process("decode-0").wait(), 10)
        await asyncio.sleep(0.1)
    assert cluster.process("decode-0").num_starts == 1


async def test_role_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ROLE", "stubborn prefill")
    monkeypatch.setattr("kvrelay.cluster.local._KILL_MARGIN_S", 0.2)
    async with make_cluster(drain_timeout_s=0.2) as cluster:
        pass
    assert cluster.process("prefill-0").exit_code == -signal.SIGKILL
    assert cluster.process("decode-0").exit_code == 0


async def test_cancelled_start_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make_cluster(num_decode=2)
    task = asyncio.create_task(cluster.__aenter__())
    await wait_until(lambda: len(cluster.processes) == 4)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(process.is_running for process in cluster.processes)


async def test_start_that_takes_too_long_is_a_failure() -> None:
    cluster = make_cluster(num_decode=3, ready_timeout_s=1.5)
    with pytest.raises(ClusterError, match=r"the cluster was not ready within 1.5 s: \w+"):
        await cluster.__aenter__()


async def test_cut_ends_everything_at_once() -> None:
    async with make_cluster(drain_timeout_s=30.0) as cluster:
        cluster.cut()
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert {process.exit_code for process in cluster.processes} == {-signal.SIGKILL}


async def test_command_that_does_not_exist_is_a_cluster_error(tmp_path: Path) -> None:
    process = ManagedProcess("x", ["/no/such/program"], tmp_path)
    with pytest.raises(ClusterError, match="x cannot be started"):
        process.start()


def test_child_never_outlives_its_parent(tmp_path: Path) -> None:
    """The parent is killed without a chance to clean up; the kernel ends the child."""
    marker = tmp_path / "child.pid"
    parent_source = (
        "import subprocess, sys, time\n"
        "from kvrelay.cluster.process import child_command\n"
        "command = child_command('gateway', [])\n"
        "child = subprocess.Popen(command)\n"
        f"open({str(marker)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    # Stands in for the gateway package: a role that does nothing, for ever.
    fake = tmp_path / "fake" / "gateway"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(f"import time\nopen({str(tmp_path / 'runs')!r}, 'w')\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'fake'}{os.pathsep}{ROOT}"}
    parent = subprocess.Popen([sys.executable, "-c", parent_source], env=environment, cwd=tmp_path)
    try:
        _wait_for((tmp_path / "runs").exists)
        child_pid = int(marker.read_text())
    finally:
        parent.kill()
        parent.wait()
    _wait_for(lambda: not _is_alive(child_pid))


def _wait_for(condition: "object", timeout_s: float = 15.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_child_whose_parent_is_gone_does_not_start() -> None:
    outcome = subprocess.run(
        [sys.executable, "-m", "kvrelay.cluster.child", "1", "gateway", "--help"],
        cwd=ROOT,
        check=False,
        capture_output=True,
    )
    assert outcome.returncode == 1
    assert outcome.stdout == b""


def test_child_becomes_its_role() -> None:
    outcome = subprocess.run(
        child_command("gateway", ["--port", "x"]), cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert outcome.returncode == 2
    assert "--port: 'x' is not valid" in outcome.stderr


def test_run_dir_is_private_and_can_be_chosen(tmp_path: Path) -> None:
    made = make_run_dir(None)
    assert made.parent == tmp_path
    assert made.stat().st_mode & 0o777 == 0o700
    chosen = make_run_dir(tmp_path / "a" / "b")
    assert chosen.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterError, match="cannot make the run directory"):
        make_run_dir(tmp_path / "file" / "x")
