"""Peers that have not said who they are: nothing is set up for what they claim, nothing of them stays when they go."""

import asyncio
import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc.aio
import pytest

from engine.clock import SystemClock
from engine.types import Incarnation, WorkerId
from kv_transfer.frame import (
    MAX_CONTROL_BYTES,
    MAX_GREETING_BYTES,
    MAX_PAYLOAD_BYTES,
    Frame,
    FrameHeader,
    FrameKind,
    encode_header,
    seal,
)
from kv_transfer.handoff.importer import Importer
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.handoff.messages import Hello
from kv_transfer.transports.grpc.transport import METHOD, GrpcTransport
from kv_transfer.transports.grpc.wire import Part, encode_part
from kv_transfer.transports.port import Connection, ConnectionClosed, Transport
from kvrelay.errors import EngineError
from tests.fakes_handoff import until
from tests.fakes_transport import ArrayCache, tiny_layout
from tests.transports import TRANSPORTS, kv_frame, within

pytestmark = pytest.mark.usefixtures("no_leaks")

NUM_STRANGERS = 12
MIB = 1 << 20
NETWORKED = sorted(set(TRANSPORTS) - {"inproc"})
"""In process the sender's memory is all there is."""


class Decode:
    """An importer behind a listener, and its connections as long as they live."""

    def __init__(self) -> None:
        self.cache = ArrayCache(tiny_layout(), 64)
        self.importer = Importer(
            self.cache,
            LeaseTable(SystemClock()),
            lambda lease_id, epoch, record, stats: None,
            lambda lease_id, epoch, error: None,
            worker_id=WorkerId("d0"),
            incarnation=Incarnation(7),
        )
        self.connections: list[weakref.ref[Connection]] = []
        self.num_ended = 0
        self.errors: list[str] = []

    async def serve(self, connection: Connection) -> None:
        self.connections.append(weakref.ref(connection))
        try:
            await self.importer.serve(connection)
        except EngineError as error:
            self.errors.append(str(error))
            raise
        finally:
            self.num_ended += 1

    @property
    def num_alive(self) -> int:
        """Connections that the interpreter still keeps."""
        return sum(ref() is not None for ref in self.connections)


@asynccontextmanager
async def listening(transport: Transport) -> AsyncIterator[tuple[Decode, str]]:
    decode = Decode()
    listener = await transport.listen(decode.serve)
    try:
        yield decode, listener.address
    finally:
        await listener.close()


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is found by the garbage collector: what ends must end by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _claim(kind: FrameKind, num_bytes: int) -> FrameHeader:
    sealed = seal(kind, num_layers=1, num_blocks=1) if kind is FrameKind.KV else seal(kind)
    return replace(sealed.header, payload_bytes=num_bytes)


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [(FrameKind.KV, MAX_PAYLOAD_BYTES), (FrameKind.HELLO, MAX_CONTROL_BYTES)]
)
async def test_a_small_message_that_claims_a_large_frame_takes_no_memory(kind: FrameKind, num_bytes: int) -> None:
    message = encode_part(Part(encode_header(_claim(kind, num_bytes)), memoryview(b"x"), more=True))
    assert len(message) < 100
    async with (
        listening(GrpcTransport()) as (decode, address),
        grpc.aio.insecure_channel(address.removeprefix("grpc://")) as channel,
    ):
        tracemalloc.start()
        try:
            for _ in range(NUM_STRANGERS):
                call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
                    METHOD, request_serializer=None, response_deserializer=None
                )()
                await call.write(message)
            await until(lambda: len(decode.connections) == NUM_STRANGERS, 5.0)
            await asyncio.sleep(0.2)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 4 * MIB


async def test_a_stream_that_ends_inside_a_frame_is_noticed_at_once() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def serve(connection: Connection) -> None:
        connection.trust_peer()
        try:
            await connection.recv()
        except ConnectionClosed as error:
            ended.set_result(str(error))

    listener = await GrpcTransport().listen(serve)
    async with grpc.aio.insecure_channel(listener.address.removeprefix("grpc://")) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(
            METHOD, request_serializer=None, response_deserializer=None
        )()
        await call.write(encode_part(Part(encode_header(kv_frame(bytes(2 * MIB)).header), memoryview(b"x"), more=True)))
        await call.done_writing()
        assert "inside a payload" in await within(2, ended)
    await listener.close()


@pytest.mark.parametrize("name", NETWORKED)
@pytest.mark.parametrize("kind", [FrameKind.KV, FrameKind.COMMIT])
async def test_a_large_frame_before_hello_ends_the_connection(name: str, kind: FrameKind) -> None:
    payload = bytes(MAX_GREETING_BYTES + 1)
    async with listening(TRANSPORTS[name]()) as (decode, address):
        connection = await TRANSPORTS[name]().connect(address, 5.0)
        await connection.send(kv_frame(payload) if kind is FrameKind.KV else seal(kind, payload=payload))
        with pytest.raises(ConnectionClosed):
            await within(3, _read_all(connection))
        await until(lambda: decode.num_ended == 1)
        assert "before a valid HELLO" in decode.errors[0]  # it was not taken in at all
        await connection.close()


@pytest.mark.parametrize(
    ("name", "end"),
    [(name, end) for name in sorted(TRANSPORTS) for end in ("silent", "garbage", "early", "unread", "known")]
    + [(name, "broken") for name in NETWORKED],
)
async def test_a_connection_goes_when_it_ends_without_the_garbage_collector(
    name: str, end: str, no_collector: None
) -> None:
    transport = TRANSPORTS[name]()
    async with listening(transport) as (decode, address):
        await _visit(transport, address, decode, end)
        await until(lambda: decode.num_ended == 1, 7.0)
        await until(lambda: decode.num_alive == 0)


async def _visit(transport: Transport, address: str, decode: Decode, end: str) -> None:
    connection = await transport.connect(address, 5.0)
    hello = Hello(WorkerId("p0"), Incarnation(1), decode.cache.layout).encode()
    match end:
        case "garbage":
            await connection.send(seal(FrameKind.HELLO, payload=b"garbage"))
        case "early":
            await connection.send(kv_frame(bytes(100_000)))
        case "unread":  # more than is read
            for _ in range(20):
                await connection.send(seal(FrameKind.OPEN))
        case "known" | "broken":
            await connection.send(seal(FrameKind.HELLO, incarnation=Incarnation(7), payload=hello))
            (await within(3, connection.recv())).release()
            frame = kv_frame(bytes(100_000))
            for _ in range(4):
                await connection.send(frame)
            if end == "broken":
                await connection.send(Frame(replace(frame.header, num_layers=0), frame.payload))
    if end in ("garbage", "early", "unread", "broken"):
        with contextlib.suppress(EngineError):
            await within(3, _read_all(connection))
    await until(lambda: len(decode.connections) == 1)
    decode.connections.append(weakref.ref(connection))  # the visitor's own end goes as well
    connection.abort()
    await connection.close()


async def _read_all(connection: Connection) -> None:
    while True:
        (await connection.recv()).release()
