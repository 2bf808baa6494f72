"""Peers that are processes of ours on a pipe: start, ask, pause, end."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.answers import PeerAnswer, PeerResult
from benchmarks.peers.tied import tied
from kvrelay.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
LOAD_TIMEOUT_S = 300.0
JOB_TIMEOUT_S = 600.0
END_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 24


class ProcessGroup:
    """A system's processes, which are stopped and continued together."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def pause(self) -> None:
        """See `Peer.pause`."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """See `Peer.resume`."""
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def end(self) -> None:
        """End all of them, politely first."""
        self.resume()
        if self.process.stdin is not None:
            self.process.stdin.close()
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError:
            self._send(signal.SIGKILL)
            await self.process.wait()


class PipePeer(ProcessGroup):
    """A system behind `benchmarks/peers/loop.py`. See `Peer`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.name = name

    async def wait_ready(self) -> None:
        """Wait until it has loaded its model.

        Raises:
            EngineError: It ended, or it took longer than five minutes.
        """
        await self._read(LOAD_TIMEOUT_S)

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, together: bool) -> PeerResult:
        """See `Peer.run`."""
        job = {"prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens, "together": together}
        if self.process.stdin is None:
            raise EngineError(f"{self.name} has no pipe")
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        result = await self._read(JOB_TIMEOUT_S)
        num_tokens = int(result["num_tokens"])
        answers = tuple(PeerAnswer(float(first), float(last), num_tokens) for first, last in result["answers"])
        return PeerResult(answers, float(result["seconds"]))

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        if self.process.stdout is None:
            raise EngineError(f"{self.name} has no pipe")
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.process.stdout.readline()
        except TimeoutError as error:
            raise EngineError(f"{self.name} did not answer within {timeout_s:g} s") from error
        if not line:
            raise EngineError(f"{self.name} ended; its last words are above")
        return dict(json.loads(line))


@asynccontextmanager
async def pipe_peer(
    name: str, python: str, module: str, model: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[PipePeer]:
    """Run a peer's module around the block.

    Args:
        name: What tables call it.
        python: The interpreter of its environment.
        module: The peer's module.
        model: A file or folder.
        environment: More variables for it.
    """
    # Its environment knows nothing of this repository but where the module lies.
    variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | dict(environment or {})
    process = await asyncio.create_subprocess_exec(
        *tied([python, "-m", module, model]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=variables,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
    )
    peer = PipePeer(name, process)
    try:
        await peer.wait_ready()
        yield peer
    finally:
        await peer.end()
