"""All transports by name, and what the contract tests do with a connection. A new transport adds one line."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from engine.types import Epoch, Incarnation, LeaseId
from kv_transfer.frame import Frame, FrameKind, seal
from kv_transfer.transports.grpc.transport import GrpcTransport
from kv_transfer.transports.inproc import InprocTransport
from kv_transfer.transports.port import Connection, ConnectionHandler, Transport
from kv_transfer.transports.shm.transport import ShmTransport
from kv_transfer.transports.ucx.transport import UcxTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "inproc": InprocTransport,
    "shm": ShmTransport,
    "grpc": GrpcTransport,
    "ucx": UcxTransport,
}
BETWEEN_PROCESSES = sorted(set(TRANSPORTS) - {"inproc"})


def kv_frame(payload: bytes | memoryview, number: int = 0) -> Frame:
    return seal(
        FrameKind.KV, LeaseId(7), Epoch(1), Incarnation(3), payload, num_layers=1, first_block=number, num_blocks=1
    )


async def echo(connection: Connection) -> None:
    """Send every frame back."""
    while True:
        frame = await connection.recv()
        try:
            await connection.send(Frame(frame.header, frame.payload))
        finally:
            frame.release()


def welcoming(handler: ConnectionHandler) -> ConnectionHandler:
    """A handler that lets the peer say who it is first, as hand-offs do."""

    async def serve(connection: Connection) -> None:
        (await connection.recv()).release()
        connection.trust_peer()
        await connection.send(seal(FrameKind.HELLO))
        await handler(connection)

    return serve


async def connect(transport: Transport, address: str) -> Connection:
    """Connect to a listener whose handler is welcoming."""
    connection = await transport.connect(address, 5.0)
    await connection.send(seal(FrameKind.HELLO))
    (await connection.recv()).release()
    return connection


@asynccontextmanager
async def connected(transport: Transport, handler: ConnectionHandler) -> AsyncIterator[Connection]:
    listener = await transport.listen(welcoming(handler))
    try:
        connection = await connect(transport, listener.address)
        try:
            yield connection
        finally:
            await connection.close()
    finally:
        await listener.close()


@dataclass
class Accepted:
    """A handler that hands its connection to the test and keeps it open until the test is done."""

    connection: asyncio.Future[Connection]
    done: asyncio.Event

    @classmethod
    def new(cls) -> "Accepted":
        return cls(asyncio.get_running_loop().create_future(), asyncio.Event())

    async def __call__(self, connection: Connection) -> None:
        self.connection.set_result(connection)
        await self.done.wait()


_T = TypeVar("_T")


async def within(seconds: float, awaitable: Awaitable[_T]) -> _T:
    async with asyncio.timeout(seconds):
        return await awaitable


async def send_all(connection: Connection, num_frames: int, size: int) -> None:
    for number in range(num_frames):
        await connection.send(kv_frame(bytes(size), number))
