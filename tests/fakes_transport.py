"""Fakes for the KV-transfer layer: numpy caches as block source and sink, a clock, and transports that misbehave.

`ArrayCache` keeps KV as plain arrays, so a test can say what every token must hold. `LossyTransport` wraps a real
transport and applies scripted faults to the frames that pass.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.types import BlockId
from kv_transfer.frame import Frame, FrameHeader, PayloadBuffer
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionHandler, Listener, Transport

Floats = npt.NDArray[np.float32]


class FakeClock:
    """A clock that stands still until told otherwise."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def tiny_layout(
    *,
    num_layers: int = 3,
    num_kv_heads: int = 2,
    head_dim: int = 4,
    block_size: int = 16,
    dtype: KvDtype = KvDtype.FP32,
    model_fingerprint: str = "tiny",
) -> KvLayout:
    """A layout small enough for thousands of hand-offs."""
    return KvLayout(model_fingerprint, num_layers, num_kv_heads, head_dim, block_size, dtype)


def token_kv(layout: KvLayout, seed: int, layer: int, token: int) -> Floats:
    """What token `token` of sequence `seed` holds: [2, num_kv_heads, head_dim] fp32, exact in all dtypes but int8."""
    shape = (2, layout.num_kv_heads, layout.head_dim)
    values = np.arange(np.prod(shape), dtype=np.int64) * 7 + seed * 131 + layer * 37 + token * 11
    return (values % 251 - 125).astype(np.float32).reshape(shape)


class ArrayCache:
    """KV blocks in a numpy array: both a `BlockSource` and a `BlockSink`.

    Conversion is done token by token, the slow and plain way.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.bytes = np.zeros((layout.num_layers, num_blocks, layout.block_bytes), np.uint8)
        self.num_reads = 0
        self.num_writes = 0

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId], out: memoryview) -> None:
        self.num_reads += 1
        np.frombuffer(out, np.uint8)[:] = self.bytes[layer, list(block_ids)].reshape(-1)

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], payload: memoryview) -> None:
        self.num_writes += 1
        rows = np.frombuffer(payload, np.uint8).reshape(len(block_ids), self.layout.block_bytes)
        self.bytes[layer, list(block_ids)] = rows

    def write_converted(
        self,
        layer: int,
        token_start: int,
        num_tokens: int,
        block_ids: Sequence[BlockId],
        payload: memoryview,
        source: KvLayout,
    ) -> None:
        self.num_writes += 1
        source_slot, target_slot = token_start % source.block_size, token_start % self.layout.block_size
        if len(payload) != source.num_blocks(source_slot + num_tokens) * source.block_bytes:
            raise ValueError(f"{len(payload)} bytes for {num_tokens} tokens from {token_start} on")
        if len(block_ids) != self.layout.num_blocks(target_slot + num_tokens):
            raise ValueError(f"{len(block_ids)} blocks for {num_tokens} tokens from {token_start} on")
        rows = np.frombuffer(payload, np.uint8).reshape(-1, source.block_bytes)
        for index in range(num_tokens):
            row, slot = divmod(source_slot + index, source.block_size)
            self.set_token(layer, block_ids, target_slot + index, _decode(source, rows[row])[:, :, slot])

    def set_token(self, layer: int, block_ids: Sequence[BlockId], token: int, values: Floats) -> None:
        """Write one token; `token` counts from the start of `block_ids`."""
        size = self.layout.block_size
        row = self.bytes[layer, block_ids[token // size]]
        block = _decode(self.layout, row)
        block[:, :, token % size] = values
        row[:] = _encode(self.layout, block)

    def get_token(self, layer: int, block_ids: Sequence[BlockId], token: int) -> Floats:
        """Read one token: [2, num_kv_heads, head_dim]."""
        size = self.layout.block_size
        return _decode(self.layout, self.bytes[layer, block_ids[token // size]])[:, :, token % size]

    def fill(self, block_ids: Sequence[BlockId], num_tokens: int, seed: int) -> None:
        """Write every layer of tokens `[0, num_tokens)` of sequence `seed`."""
        for layer in range(self.layout.num_layers):
            for token in range(num_tokens):
                self.set_token(layer, block_ids, token, token_kv(self.layout, seed, layer, token))

    def wrong_tokens(self, block_ids: Sequence[BlockId], start: int, end: int, seed: int) -> list[tuple[int, int]]:
        """Return the (layer, token) pairs in `[start, end)` that do not hold what sequence `seed` must hold."""
        return [
            (layer, token)
            for layer in range(self.layout.num_layers)
            for token in range(start, end)
            if not np.array_equal(self.get_token(layer, block_ids, token), token_kv(self.layout, seed, layer, token))
        ]


def _decode(layout: KvLayout, row: npt.NDArray[np.uint8]) -> Floats:
    shape = (2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    raw = row[: layout.block_elements * layout.dtype.itemsize].tobytes()
    match layout.dtype:
        case KvDtype.FP32:
            return np.frombuffer(raw, np.float32).reshape(shape).copy()
        case KvDtype.FP16:
            return np.frombuffer(raw, np.float16).astype(np.float32).reshape(shape)
        case KvDtype.BF16:
            return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        case _:
            scales = np.frombuffer(row[layout.block_elements :].tobytes(), np.float32).reshape(*shape[:-1], 1)
            return np.frombuffer(raw, np.int8).reshape(shape) * scales


def _encode(layout: KvLayout, block: Floats) -> npt.NDArray[np.uint8]:
    match layout.dtype:
        case KvDtype.FP32:
            raw = block.tobytes()
        case KvDtype.FP16:
            raw = block.astype(np.float16).tobytes()
        case KvDtype.BF16:
            raw = (block.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case _:
            scales = np.abs(block).max(-1, keepdims=True) / np.float32(127)
            elements = np.rint(block / np.where(scales > 0, scales, 1)).astype(np.int8)
            raw = elements.tobytes() + scales.astype(np.float32).tobytes()
    return np.frombuffer(raw, np.uint8)


class Fault(StrEnum):
    """What happens to a frame on its way."""

    DROP = "drop"
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """It changes places with the next frame."""
    DELAY = "delay"
    BIT_FLIP = "bit_flip"
    """One bit of the payload, or of the header where there is none, changes."""
    TRUNCATE = "truncate"
    """The last byte of the payload is lost; header and payload no longer agree."""
    STALL = "stall"
    """Nothing gets through from here on, and nobody is told."""
    CUT = "cut"
    """The connection is lost."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Faults by the index of the frame among all frames sent over the connection in one direction."""

    faults: dict[int, Fault]
    delay_s: float = 0.02


NO_FAULTS = FaultPlan({})
LOSSY_PAYLOAD_BYTES = 2048
"""Two blocks of `tiny_layout`: a hand-off of a few tokens takes several frames, so that faults find one to hit."""


def damage(frame: Frame, fault: Fault, bit: int = 0) -> Frame:
    """Return a copy of a frame with a flipped bit or a lost byte."""
    header, payload = frame.header, bytearray(frame.payload)
    if fault is Fault.TRUNCATE and payload:
        del payload[-1]
        header = replace(header, payload_bytes=len(payload))
    elif payload:
        payload[bit // 8 % len(payload)] ^= 1 << bit % 8
    else:
        header = _flip_header(header)
    return Frame(header, memoryview(payload))


def _flip_header(header: FrameHeader) -> FrameHeader:
    return replace(header, digest=header.digest ^ 1)


class WrappedConnection:
    """What connections that tamper with another one's frames leave as it is; payloads get memory of their own."""

    def __init__(self, inner: Connection, payload_bytes: int) -> None:
        self._inner = inner
        self._payload_bytes = payload_bytes
        self._is_stalled = False

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    @property
    def preferred_payload_bytes(self) -> int:
        return self._payload_bytes

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    def reserve_now(self, num_bytes: int) -> PayloadBuffer:
        return PayloadBuffer(memoryview(bytearray(num_bytes)))

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        return self.reserve_now(num_bytes)

    def trust_peer(self) -> None:
        self._inner.trust_peer()

    async def recv(self) -> Frame:
        return await self._inner.recv()

    async def close(self) -> None:
        await self._inner.close()

    def abort(self) -> None:
        self._inner.abort()


class LossyConnection(WrappedConnection):
    """A connection whose outgoing frames meet the faults of a plan."""

    def __init__(self, inner: Connection, plan: FaultPlan) -> None:
        super().__init__(inner, LOSSY_PAYLOAD_BYTES)
        self._plan = plan
        self._held: Frame | None = None
        self.num_sent = 0

    async def send(self, frame: Frame) -> None:
        index, self.num_sent = self.num_sent, self.num_sent + 1
        copy = Frame(frame.header, memoryview(bytes(frame.payload)))
        fault = self._plan.faults.get(index)
        if fault is Fault.STALL:
            self._is_stalled = True
        if self._is_stalled or fault is Fault.DROP:
            return
        if fault is Fault.CUT:
            self._inner.abort()
        if fault is Fault.REORDER and self._held is None:
            self._held = copy
            return
        if fault is Fault.DELAY:
            await asyncio.sleep(self._plan.delay_s)
        if fault in (Fault.BIT_FLIP, Fault.TRUNCATE):
            copy = damage(copy, fault, bit=index * 13)
        await self._inner.send(copy)
        if fault is Fault.DUPLICATE:
            await self._inner.send(Frame(copy.header, copy.payload))
        if self._held is not None:
            held, self._held = self._held, None
            await self._inner.send(held)


class LossyTransport:
    """A transport whose connections lose, damage or delay frames by plan, in each direction."""

    def __init__(self, inner: Transport, to_listener: FaultPlan = NO_FAULTS, to_client: FaultPlan = NO_FAULTS) -> None:
        self._inner = inner
        self.to_listener = to_listener
        self.to_client = to_client
        self.connections: list[LossyConnection] = []

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    def can_reach(self, address: str) -> bool:
        return self._inner.can_reach(address)

    async def listen(self, handler: ConnectionHandler) -> Listener:
        async def lossy(connection: Connection) -> None:
            await handler(LossyConnection(connection, self.to_client))

        return await self._inner.listen(lossy)

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        connection = LossyConnection(await self._inner.connect(address, timeout_s), self.to_listener)
        self.connections.append(connection)
        return connection
