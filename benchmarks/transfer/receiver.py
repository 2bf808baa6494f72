"""The receiving process: `python -m benchmarks.transfer.receiver`. A decode worker's import side without the worker.

Reads one JSON command a line from standard input and answers with one line on standard output; ends when its input
does. `receiver_process.py` is the other end. Commands: `open` (a cache of a layout, listeners, and a bare TCP socket
that receives into the same memory), `reserve` (blocks for one hand-off), `close`.
"""

import asyncio
import json
import socket
import struct
import sys
import threading
from contextlib import AsyncExitStack

import torch

from benchmarks.transfer.shapes import layout_from_json
from engine.clock import SystemClock
from engine.model.kv_cache import KvCache
from engine.types import BlockId, Epoch, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.transports.registry import TransportRegistry
from kv_transfer.transports.ucx.transport import is_available
from kvrelay.errors import EngineError
from kvrelay.serving.telemetry import configure_logging
from worker.settings import WorkerSettings
from worker.transports import make_transports

WORKER_ID = WorkerId("bench-receiver")
INCARNATION = Incarnation(1)
LEASE_TTL_S = 600.0
SOCKET_BUFFER_BYTES = 4 << 20
SIZE = struct.Struct("<Q")
"""Length in front of the bytes on the bare socket."""
ACKNOWLEDGED = b"\x01"


class Receiver:
    """One cache and everything that fills it."""

    def __init__(self, layout_values: dict[str, object], num_blocks: int) -> None:
        self._cache = KvCache(layout_from_json(layout_values), num_blocks, torch.device("cpu"))
        self._cache.bytes.zero_()  # the first touch of memory is no part of a transfer
        self._block_ids = [BlockId(block) for block in range(num_blocks)]
        leases = LeaseTable(SystemClock())
        self._importer = Importer(
            self._cache, leases, _on_commit, _on_failed, worker_id=WORKER_ID, incarnation=INCARNATION
        )
        self._stack = AsyncExitStack()

    async def open(self) -> dict[str, object]:
        """Listen on every transport and on a bare socket; return where."""
        registry = every_transport()
        addresses = {}
        for scheme in registry.schemes:
            listener = await registry.get(scheme).listen(self._importer.serve)
            self._stack.push_async_callback(listener.close)
            addresses[scheme] = listener.address
        server = socket.create_server(("127.0.0.1", 0))
        self._stack.callback(server.close)
        memory = self._cache.bytes.numpy().reshape(-1).data
        threading.Thread(target=_serve_socket, args=(server, memory), daemon=True).start()
        return {"addresses": addresses, "socket_port": server.getsockname()[1]}

    def reserve(self, num_tokens: int) -> dict[str, object]:
        """Reserve the cache's first blocks for one hand-off."""
        num_blocks = self._cache.layout.num_blocks(num_tokens)
        handle = self._importer.reserve(self._block_ids[:num_blocks], 0, num_tokens, "bench", LEASE_TTL_S)
        return handle_to_json(handle)

    async def close(self) -> None:
        """Stop listening."""
        await self._stack.aclose()


def every_transport() -> TransportRegistry:
    """Return all transports between processes; ucx, which workers use only when told to, if it is installed."""
    return make_transports(WorkerSettings.model_validate({"transport": "ucx"} if is_available() else {}))


def handle_to_json(handle: KvHandle) -> dict[str, object]:
    """Return a handle as JSON values."""
    return {
        "lease_id": handle.lease_id,
        "epoch": handle.epoch,
        "ticket": handle.ticket.hex(),
        "start_token": handle.start_token,
        "num_tokens": handle.num_tokens,
        "layout_fingerprint": handle.layout_fingerprint,
    }


def handle_from_json(values: dict[str, object]) -> KvHandle:
    """Return the handle; the inverse of `handle_to_json`."""
    return KvHandle(
        lease_id=LeaseId(int(str(values["lease_id"]))),
        epoch=Epoch(int(str(values["epoch"]))),
        ticket=bytes.fromhex(str(values["ticket"])),
        worker_id=WORKER_ID,
        incarnation=INCARNATION,
        start_token=int(str(values["start_token"])),
        num_tokens=int(str(values["num_tokens"])),
        layout_fingerprint=str(values["layout_fingerprint"]),
    )


def _on_commit(lease_id: LeaseId, epoch: Epoch, record: bytes, stats: TransferStats) -> None:
    """Nothing to schedule: the blocks may be reserved again at once."""


def _on_failed(lease_id: LeaseId, epoch: Epoch, error: EngineError) -> None:
    """The sender learns the reason and fails the benchmark."""


def _serve_socket(server: socket.socket, memory: memoryview) -> None:
    """Receive into `memory` for one client after the other: what a bare blocking socket can do."""
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return  # closed
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := connection.recv(SIZE.size, socket.MSG_WAITALL):
                (num_bytes,) = SIZE.unpack(head)
                received = 0
                while received < num_bytes:
                    received += connection.recv_into(memory[received:num_bytes])
                connection.sendall(ACKNOWLEDGED)


async def _run() -> None:
    loop = asyncio.get_running_loop()
    receiver: Receiver | None = None
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command = json.loads(line)
        answer: dict[str, object] = {}
        match command["op"]:
            case "open":
                receiver = Receiver(command["layout"], command["num_blocks"])
                answer = await receiver.open()
            case "reserve" if receiver is not None:
                answer = receiver.reserve(command["num_tokens"])
            case "close" if receiver is not None:
                await receiver.close()
                receiver = None
            case unknown:
                answer = {"error": f"cannot do {unknown!r} now"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    if receiver is not None:
        await receiver.close()


def main() -> None:
    """Serve until standard input ends."""
    configure_logging("receiver", level="error")
    asyncio.run(_run())


if __name__ == "__main__":
    main()
