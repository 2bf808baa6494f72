"""The sender's hold on the receiving process: starts it, talks to it, ends it."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.transfer.receiver import INCARNATION, WORKER_ID, handle_from_json
from benchmarks.transfer.shapes import layout_to_json
from engine.cache.layout import KvLayout
from engine.worker_types import KvHandle, TransferPeer
from kvrelay.errors import EngineError

ANSWER_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class OpenedReceiver:
    """A cache in the other process, ready to be filled."""

    process: asyncio.subprocess.Process
    layout: KvLayout
    addresses: Mapping[str, str]
    """Transfer address by scheme."""
    socket_port: int

    def peer(self) -> TransferPeer:
        """Return what an exporter is told of it."""
        return TransferPeer(WORKER_ID, INCARNATION, tuple(self.addresses.values()), self.layout)

    async def reserve(self, num_tokens: int) -> KvHandle:
        """Reserve blocks for one hand-off of `num_tokens`."""
        return handle_from_json(await _ask(self.process, {"op": "reserve", "num_tokens": num_tokens}))


@asynccontextmanager
async def receiver_process() -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the receiving process around the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.transfer.receiver",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@asynccontextmanager
async def opened_receiver(
    process: asyncio.subprocess.Process, layout: KvLayout, num_tokens: int
) -> AsyncIterator[OpenedReceiver]:
    """Have the process hold a cache of a layout, with room for twice `num_tokens`, around the block."""
    command = {"op": "open", "layout": layout_to_json(layout), "num_blocks": 2 * layout.num_blocks(num_tokens)}
    answer = await _ask(process, command)
    addresses = answer["addresses"]
    if not isinstance(addresses, dict):
        raise EngineError("the receiving process did not say where it listens")
    try:
        yield OpenedReceiver(process, layout, addresses, int(str(answer["socket_port"])))
    finally:
        await _ask(process, {"op": "close"})


async def _ask(process: asyncio.subprocess.Process, command: Mapping[str, object]) -> dict[str, object]:
    if process.stdin is None or process.stdout is None:
        raise EngineError("the receiving process has no pipes")
    try:
        process.stdin.write(json.dumps(command).encode() + b"\n")
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            line = await process.stdout.readline()
    except (TimeoutError, ConnectionError) as error:
        raise EngineError("the receiving process does not answer") from error
    answer = json.loads(line) if line else {"error": "it has ended"}
    if "error" in answer:
        raise EngineError(f"the receiving process: {answer['error']}")
    return dict(answer)
