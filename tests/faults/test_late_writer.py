"""A prefill process that is stopped mid-transfer and wakes up after its lease changes no byte of anybody's blocks."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.worker_types import KvHandle
from kvrelay.errors import LeaseExpired
from tests.fakes_handoff import Tiers, blocks, run_tiers, until
from tests.transports import BETWEEN_PROCESSES, TRANSPORTS, within

pytestmark = pytest.mark.usefixtures("no_leaks")

NUM_TOKENS = 40
TTL_S = 5.0
OWNER = 1
"""Seed of the sequence that owns the blocks by the time the writer wakes up."""

_WRITER = """
import asyncio, json, sys
from kvrelay.errors import EngineError
from engine.types import Epoch, Incarnation, LeaseId, WorkerId
from kv_transfer.handoff.exporter import Exporter
from engine.worker_types import KvHandle, TransferPeer
from kv_transfer.transports.registry import TransportRegistry
from tests.fakes_handoff import blocks
from tests.fakes_transport import ArrayCache, tiny_layout
from tests.transports import TRANSPORTS

async def main():
    task = json.loads(sys.argv[1])
    cache = ArrayCache(tiny_layout(), 8)
    cache.fill(blocks(0, 1, 2), task["num_tokens"], seed=666)
    exporter = Exporter(cache, WorkerId("late"), Incarnation(4), TransportRegistry([TRANSPORTS[task["transport"]]()]))
    worker_id, incarnation = WorkerId(task["worker_id"]), Incarnation(task["incarnation"])
    exporter.update_peers([TransferPeer(worker_id, incarnation, tuple(task["addresses"]), tiny_layout())])
    handle = KvHandle(
        LeaseId(task["lease_id"]), Epoch(task["epoch"]), bytes.fromhex(task["ticket"]), worker_id, incarnation,
        0, task["num_tokens"], tiny_layout().fingerprint,
    )
    async with exporter.begin(handle, is_layerwise=True) as export:
        export.layer_ready(0, task["num_tokens"], blocks(0, 1, 2))
        await asyncio.to_thread(sys.stdin.readline)
        for layer in (1, 2):
            export.layer_ready(layer, task["num_tokens"], blocks(0, 1, 2))
        try:
            await export.finish(b"late")
        except EngineError as error:
            print(error.reason, flush=True)
        else:
            print("committed", flush=True)
    await exporter.close()

asyncio.run(main())
"""


@asynccontextmanager
async def _writer(transport: str, tiers: Tiers, handle: KvHandle) -> AsyncIterator[asyncio.subprocess.Process]:
    task = {
        "transport": transport,
        "addresses": tiers.peer.addresses,
        "worker_id": handle.worker_id,
        "incarnation": handle.incarnation,
        "lease_id": handle.lease_id,
        "epoch": handle.epoch,
        "ticket": handle.ticket.hex(),
        "num_tokens": NUM_TOKENS,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _WRITER,
        json.dumps(task),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": "."},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("transport", BETWEEN_PROCESSES)
@pytest.mark.parametrize("new_owner", ["reservation", "sequence"])
async def test_a_writer_that_wakes_up_after_its_lease_changes_no_byte(transport: str, new_owner: str) -> None:
    async with run_tiers(transport=TRANSPORTS[transport]()) as tiers:
        handle = tiers.importer.reserve(blocks(5, 6, 7), 0, NUM_TOKENS, "session", TTL_S)
        async with _writer(transport, tiers, handle) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            await until(lambda: tiers.sink.num_writes == 1, timeout_s=30.0)
            process.send_signal(signal.SIGSTOP)
            process.stdin.write(b"go\n")  # it goes on as soon as it can
            await process.stdin.drain()
            tiers.clock.advance(TTL_S)
            assert tiers.importer.tick() == [handle.lease_id]
            assert isinstance(tiers.failures[-1][2], LeaseExpired)

            other = None
            if new_owner == "reservation":
                other = tiers.importer.reserve(blocks(5, 6, 7), 0, NUM_TOKENS, "session", 100 * TTL_S)
            tiers.sink.fill(blocks(5, 6, 7), NUM_TOKENS, OWNER)
            before = tiers.sink.bytes.copy()
            process.send_signal(signal.SIGCONT)
            assert (await within(20, process.stdout.readline())).strip() == b"LEASE_EXPIRED"
            assert await within(20, process.wait()) == 0
            assert (tiers.sink.bytes == before).all()
            assert tiers.commits == []

            if other is not None:  # which still takes its own writer's KV
                await tiers.hand_off(other, blocks(0, 1, 2), NUM_TOKENS, OWNER)
                assert tiers.sink.wrong_tokens(blocks(5, 6, 7), 0, NUM_TOKENS, OWNER) == []
