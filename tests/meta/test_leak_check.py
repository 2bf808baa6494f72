"""The leak check notices what it is for: each kind of leak is planted once and must be reported."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

from tests.leaks import Snapshot, settle_no_leaks, wait_for_no_leaks

_PATIENCE_S = 0.2


def test_nothing_is_reported_when_nothing_is_left() -> None:
    before = Snapshot.take()
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
    assert wait_for_no_leaks(before) == []


def test_thread_left_running_is_reported_until_it_ends() -> None:
    before = Snapshot.take()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-running", daemon=True)
    thread.start()
    assert wait_for_no_leaks(before, _PATIENCE_S) == ["thread left-running"]
    release.set()
    assert wait_for_no_leaks(before) == []


def test_descriptor_left_open_is_reported_with_its_target() -> None:
    before = Snapshot.take()
    descriptor = os.memfd_create("left-open")
    try:
        (leak,) = wait_for_no_leaks(before, _PATIENCE_S)
        assert "memfd:left-open" in leak
    finally:
        os.close(descriptor)
    assert wait_for_no_leaks(before) == []


def test_child_process_left_running_is_reported() -> None:
    before = Snapshot.take()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        leaks = wait_for_no_leaks(before, _PATIENCE_S)
        assert f"child process {child.pid}" in leaks
    assert wait_for_no_leaks(before) == []


async def test_task_left_pending_is_reported_by_name() -> None:
    before = Snapshot.take()
    task = asyncio.create_task(asyncio.sleep(60), name="left-pending")
    (leak,) = await settle_no_leaks(before, _PATIENCE_S)
    assert leak.startswith("task left-pending")
    task.cancel()
    assert await settle_no_leaks(before) == []


async def test_fixture_accepts_a_test_that_cleans_up(no_leaks: None) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    server.close()
    await server.wait_closed()
