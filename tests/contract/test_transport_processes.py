"""Transports between two processes: frames pass, a killed peer is noticed, a stopped one holds the sender back."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_transfer.frame import verify
from kv_transfer.transports.port import ConnectionClosed
from tests.transports import BETWEEN_PROCESSES, TRANSPORTS, connect, kv_frame, send_all, within

pytestmark = pytest.mark.usefixtures("no_leaks")

_PEER = """
import asyncio, sys
from tests.transports import TRANSPORTS, echo, welcoming

async def main():
    listener = await TRANSPORTS[sys.argv[1]]().listen(welcoming(echo))
    print(listener.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def peer_process(name: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process that listens and echoes."""
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _PEER,
        name,
        stdout=asyncio.subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            address = (await process.stdout.readline()).decode().strip()
        yield process, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
async def test_frames_pass_between_processes_and_a_killed_peer_is_noticed(name: str) -> None:
    async with peer_process(name) as (process, address):
        connection = await connect(TRANSPORTS[name](), address)
        for size in (10, 3 << 20):
            await connection.send(kv_frame(bytes(size)))
            frame = await connection.recv()
            verify(frame)
            assert len(frame.payload) == size
            frame.release()
        reader = asyncio.ensure_future(connection.recv())
        await asyncio.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        with pytest.raises(ConnectionClosed):
            await within(5, reader)
        with pytest.raises(ConnectionClosed):
            await within(5, send_all(connection, 1000, 1 << 20))
        await connection.close()


@pytest.mark.parametrize("name", BETWEEN_PROCESSES)
async def test_a_stopped_peer_stops_the_sender_and_can_go_on(name: str) -> None:
    async with peer_process(name) as (process, address):
        connection = await connect(TRANSPORTS[name](), address)
        await connection.send(kv_frame(b"x"))
        (await connection.recv()).release()
        process.send_signal(signal.SIGSTOP)
        num_frames = 96
        sender = asyncio.ensure_future(send_all(connection, num_frames, 1 << 20))
        await asyncio.sleep(0.5)
        assert not sender.done()
        process.send_signal(signal.SIGCONT)
        for number in range(num_frames):
            frame = await within(10, connection.recv())
            verify(frame)
            assert frame.header.first_block == number
            frame.release()
        await sender
        await connection.close()
