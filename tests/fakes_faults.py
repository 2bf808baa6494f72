"""A transport that meets one scripted fault at one moment of a hand-off, whatever byte path is below it.

The fault strikes frames on the prefill side's end of a connection, on their way out or in. Used at service level by
tests/faults/; tests/fakes_transport.py has the transport whose faults are counted in frames.
"""

import asyncio
from dataclasses import dataclass

import numpy as np

from kv_transfer.frame import Frame, FrameKind
from kv_transfer.transports.port import DEFAULT_CONNECT_TIMEOUT_S, Connection, ConnectionHandler, Listener, Transport
from tests.fakes_transport import Fault, WrappedConnection, damage

DELAY_S = 0.05
SIGN_BIT = 31
"""Flipped in the first value of an fp32 payload."""


@dataclass(frozen=True, slots=True)
class Strike:
    """Which frame is hit, and how."""

    kind: FrameKind
    fault: Fault
    number: int = 0
    """Among the frames of this kind."""
    is_burst: bool = False
    """Whether a flipped bit is one in every value of the payload."""


class FaultScript:
    """At most one strike that is still to come."""

    def __init__(self) -> None:
        self._strike: Strike | None = None
        self._num_seen = 0
        self.has_struck = False

    def arm(self, strike: Strike | None) -> None:
        """Replace what is to come."""
        self._strike, self._num_seen, self.has_struck = strike, 0, False

    def strike_on(self, frame: Frame) -> Strike | None:
        """Return what happens to this frame, and count it."""
        strike = self._strike
        if strike is None or frame.header.kind is not strike.kind:
            return None
        self._num_seen += 1
        if self._num_seen - 1 != strike.number:
            return None
        self._strike, self.has_struck = None, True
        return strike


class FaultyConnection(WrappedConnection):
    """The prefill side's end; what passes in either direction is looked up in the script."""

    def __init__(self, inner: Connection, script: FaultScript, payload_bytes: int) -> None:
        super().__init__(inner, payload_bytes)
        self._script = script
        self._held_out: Frame | None = None
        self._incoming: list[Frame] = []
        self._held_in: Frame | None = None

    async def send(self, frame: Frame) -> None:
        strike = self._script.strike_on(frame)
        copy = Frame(frame.header, memoryview(bytes(frame.payload)))
        if strike is not None and strike.fault is Fault.REORDER:
            self._held_out = copy
            return
        for passing in await self._through(copy, strike):
            await self._inner.send(passing)
        if self._held_out is not None and not self._is_stalled:
            held, self._held_out = self._held_out, None
            await self._inner.send(held)

    async def recv(self) -> Frame:
        while not self._incoming:
            frame = await self._inner.recv()
            copy = Frame(frame.header, memoryview(bytes(frame.payload)))
            frame.release()
            strike = self._script.strike_on(copy)
            if strike is not None and strike.fault is Fault.REORDER:
                self._held_in = copy
                continue
            self._incoming += await self._through(copy, strike)
            if self._held_in is not None and self._incoming:
                self._incoming.append(self._held_in)
                self._held_in = None
        return self._incoming.pop(0)

    async def _through(self, frame: Frame, strike: Strike | None) -> list[Frame]:
        """Return what is left of a frame."""
        fault = None if strike is None else strike.fault
        match fault:
            case Fault.STALL:
                self._is_stalled = True
            case Fault.CUT:
                self._inner.abort()
            case Fault.DELAY:
                await asyncio.sleep(DELAY_S)
            case Fault.BIT_FLIP if strike is not None and strike.is_burst:
                frame = Frame(frame.header, _negated(frame.payload))
            case Fault.BIT_FLIP | Fault.TRUNCATE:
                frame = damage(frame, fault, SIGN_BIT)
            case _:
                pass
        if self._is_stalled or fault is Fault.DROP:
            return []
        return [frame, Frame(frame.header, frame.payload)] if fault is Fault.DUPLICATE else [frame]


def _negated(payload: memoryview) -> memoryview:
    values = np.frombuffer(payload, np.uint8).copy()
    values[3::4] ^= 0x80
    return values.data


class FaultyTransport:
    """A transport whose outgoing connections follow a script."""

    def __init__(self, inner: Transport, script: FaultScript, payload_bytes: int) -> None:
        """Wrap a transport.

        Args:
            inner: The byte path.
            script: Shared by all connections.
            payload_bytes: Size of a frame: small, so that a short prompt takes many.
        """
        self._inner = inner
        self._script = script
        self._payload_bytes = payload_bytes

    @property
    def scheme(self) -> str:
        return self._inner.scheme

    def can_reach(self, address: str) -> bool:
        return self._inner.can_reach(address)

    async def listen(self, handler: ConnectionHandler) -> Listener:
        return await self._inner.listen(handler)

    async def connect(self, address: str, timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S) -> Connection:
        return FaultyConnection(await self._inner.connect(address, timeout_s), self._script, self._payload_bytes)
