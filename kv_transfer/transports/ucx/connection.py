"""One UCX connection: control and payload messages, acknowledgements, and its end.

    control message (fixed size): operation u8, place u8, 6 zero, length u64, then what the operation says
      FRAME    frame header; `length` payload bytes, inside if they fit, else as the next payload message, which is to
               be received into device memory if `place` is 1
      ACK      the receiver released payloads of `length` bytes together
      CLOSE    nothing more comes; answered by CLOSED once all before it has arrived

Tags are random per connection and direction, exchanged at its start (`handshake.py`), so no other peer of the
worker writes here by accident. Where both sides have device memory, payloads lent by `reserve` lie there and go from
device to device, by whatever way UCX has (cuda_ipc, RDMA, copies). Runs on one event loop; UCX calls back on it.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.device import DeviceBytes, DeviceMemory
from kv_transfer.frame import (
    HEADER_BYTES,
    Frame,
    FrameError,
    FrameHeader,
    PayloadBuffer,
    check_greeting,
    decode_header,
    encode_header,
)
from kv_transfer.transports.flow import BufferPool, ByteBudget, FrameQueue, fresh
from kv_transfer.transports.port import ConnectionClosed
from kv_transfer.transports.ucx.progress import Array, Tag, TagMaskFull, UcxEngine, ucx
from kvrelay.errors import EngineError, TransferError

IN_FLIGHT_BYTES = 16 << 20
"""Bytes sent and not acknowledged."""
PREFERRED_PAYLOAD_BYTES = 2 << 20
INLINE_BYTES = 4096
CLOSE_TIMEOUT_S = 2.0
ABORT_TIMEOUT_S = 0.5
CONFIRM_LINGER_S = 0.1

_ENVELOPE = struct.Struct("<B?6xQ")
_CONTROL_BYTES = _ENVELOPE.size + HEADER_BYTES + INLINE_BYTES
_CONTROL_TAG, _PAYLOAD_TAG = 0, 1
_EMPTY = memoryview(b"")


class Operation(IntEnum):
    """What a control message is."""

    FRAME = 1
    ACK = 2
    CLOSE = 3
    CLOSED = 4


@dataclass(slots=True)
class _Arriving:
    """A frame whose payload may still be on its way."""

    header: FrameHeader
    payload: memoryview
    memory: bytearray | None
    device: DeviceBytes | None
    is_complete: bool


class UcxConnection:
    """One end of a UCX connection.

    Invariants: payload messages are received in the order of their control messages; frames are handed on in that
    order; memory given to UCX is kept until its request has ended.
    """

    scheme = "ucx"
    preferred_payload_bytes = PREFERRED_PAYLOAD_BYTES

    def __init__(
        self,
        engine: UcxEngine,
        endpoint: "ucx.UCXEndpoint",
        own_tag: int,
        peer_tag: int,
        on_gone: Callable[[], None],
        device: DeviceMemory | None = None,
        *,
        is_peer_known: bool,
    ) -> None:
        """Take over an endpoint.

        Args:
            engine: Progresses it.
            endpoint: Of this connection.
            own_tag: On messages that come.
            peer_tag: To be put on messages that go.
            on_gone: Called once the connection has ended.
            device: Lends memory for payloads, where the peer has such memory too.
            is_peer_known: Whether payloads of every size are taken before `trust_peer`.
        """
        self._engine = engine
        self._device = device
        self._is_peer_known = is_peer_known
        self._endpoint: ucx.UCXEndpoint | None = endpoint
        self._receive_tags = (Tag(own_tag | _CONTROL_TAG), Tag(own_tag | _PAYLOAD_TAG))
        self._send_tags = (Tag(peer_tag | _CONTROL_TAG), Tag(peer_tag | _PAYLOAD_TAG))
        self._on_gone: Callable[[], None] | None = on_gone
        self._loop = asyncio.get_running_loop()
        self._pool = BufferPool()
        self._budget = ByteBudget(IN_FLIGHT_BYTES)
        self._received = FrameQueue()
        self._arriving: deque[_Arriving] = deque()
        self._unreleased = 0
        self._to_acknowledge = 0
        self._num_sending = 0
        self._must_confirm_close = False
        self._is_confirmed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._end: ConnectionClosed | None = None
        self._gone = asyncio.Event()
        # Called by UCX while it is being progressed, where nothing of UCX may be called.
        endpoint.set_close_callback(lambda: self._loop.call_soon(self._on_endpoint_closed))
        self._post_control()

    @property
    def is_closed(self) -> bool:
        """Whether `send` would raise."""
        return self._end is not None

    async def reserve(self, num_bytes: int) -> PayloadBuffer:
        """See `Connection.reserve`."""
        await self._budget.acquire(num_bytes + HEADER_BYTES)
        return self._buffer(num_bytes, self._device)

    def reserve_now(self, num_bytes: int) -> PayloadBuffer | None:
        """See `Connection.reserve_now`."""
        return self._buffer(num_bytes, self._device) if self._budget.acquire_now(num_bytes + HEADER_BYTES) else None

    def _buffer(self, num_bytes: int, device: DeviceMemory | None) -> PayloadBuffer:
        if device is not None and num_bytes > INLINE_BYTES:
            lent = device.take(num_bytes)
            return PayloadBuffer(_EMPTY, self, on_release=lambda: self._give_back(lent, num_bytes), device=lent)
        memory = self._pool.take(num_bytes)
        return PayloadBuffer(
            memoryview(memory)[:num_bytes], self, on_release=lambda: self._give_back(memory, num_bytes)
        )

    def _give_back(self, memory: bytearray | DeviceBytes, num_bytes: int) -> None:
        self._recycle(memory)
        self._budget.release(num_bytes + HEADER_BYTES)

    async def send(self, frame: Frame) -> None:
        """See `Connection.send`."""
        buffer = frame.buffer
        if buffer is None or buffer.owner is not self:
            if frame.device is not None:
                raise FrameError("a payload in device memory goes over the connection that lent the memory")
            await self._budget.acquire(len(frame.payload) + HEADER_BYTES)
            buffer = self._buffer(len(frame.payload), None)
            buffer.view[:] = frame.payload
        if self._end is not None:
            buffer.release()
            raise fresh(self._end)
        # The peer's ACK gives the bytes back to the budget; the memory is free once UCX has sent it.
        buffer.detach()
        device, payload = buffer.device, buffer.view
        memory = device if device is not None else payload.obj if isinstance(payload.obj, bytearray) else None
        length = frame.header.payload_bytes
        head = _ENVELOPE.pack(Operation.FRAME, device is not None, length) + encode_header(frame.header)
        if device is None and length <= INLINE_BYTES:
            self._submit_control(head + bytes(payload))
            self._recycle(memory)
        else:
            self._submit_control(head)
            self._submit(payload if device is None else device.array, _PAYLOAD_TAG, lambda: self._recycle(memory))

    def trust_peer(self) -> None:
        """See `Connection.trust_peer`."""
        self._is_peer_known = True

    async def recv(self) -> Frame:
        """See `Connection.recv`."""
        return await self._received.get()

    async def close(self) -> None:
        """See `Connection.close`."""
        self._begin_end(ConnectionClosed("closed here"), CLOSE_TIMEOUT_S)
        await self._gone.wait()

    def abort(self) -> None:
        """See `Connection.abort`. What is under way ends in the background, for a short time."""
        self._begin_end(ConnectionClosed("aborted here"), ABORT_TIMEOUT_S)

    # --- sending --------------------------------------------------------------------------------------------------

    def _submit_control(self, message: bytes) -> None:
        self._submit(memoryview(bytearray(message.ljust(_CONTROL_BYTES, b"\0"))), _CONTROL_TAG, None)

    def _submit(self, payload: object, channel: int, on_sent: Callable[[], None] | None) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        array = Array(payload)

        def on_done(error: EngineError | None, kept: object = (array, payload)) -> None:
            self._num_sending -= 1
            if error is not None:
                self._lose(str(error))
                return
            if on_sent is not None:
                on_sent()
            self._drop_if_quiet()

        try:
            request = endpoint.tag_send(array, self._send_tags[channel])
        except ucx.UCXError as error:
            self._lose(f"UCX: {error}")
            return
        self._num_sending += 1
        self._engine.track(request, on_done)

    def _recycle(self, memory: bytearray | DeviceBytes | None) -> None:
        if isinstance(memory, bytearray):
            self._pool.give(memory)
        elif memory is not None:
            memory.release()

    # --- receiving ------------------------------------------------------------------------------------------------

    def _post_control(self) -> None:
        control = bytearray(_CONTROL_BYTES)
        self._receive(memoryview(control), _CONTROL_TAG, lambda: self._on_control(control))

    def _receive(self, memory: object, channel: int, on_received: Callable[[], None]) -> None:
        endpoint = self._endpoint
        if endpoint is None:
            return
        array = Array(memory)

        def on_done(error: EngineError | None, kept: object = (array, memory)) -> None:
            if error is None:
                on_received()
            else:
                self._lose(str(error))

        try:
            request = endpoint.tag_recv(array, self._receive_tags[channel], TagMaskFull)
        except ucx.UCXError as error:
            self._lose(f"UCX: {error}")
            return
        self._engine.track(request, on_done)

    def _on_control(self, control: bytearray) -> None:
        try:
            self._act_on(control)
        except FrameError as error:
            self._finish(error, drop=False)
            self._drop_endpoint()
            return
        self._post_control()

    def _act_on(self, control: bytearray) -> None:
        number, is_on_device, length = _ENVELOPE.unpack_from(control)
        try:
            operation = Operation(number)
        except ValueError as error:
            raise FrameError(f"unknown operation {number}") from error
        match operation:
            case Operation.FRAME:
                header = decode_header(control[_ENVELOPE.size : _ENVELOPE.size + HEADER_BYTES])
                self._on_frame(header, length, control, is_on_device=is_on_device)
            case Operation.ACK:
                if length > self._budget.used:
                    raise FrameError(f"{length} bytes were acknowledged, {self._budget.used} are under way")
                self._budget.release(length)
            case Operation.CLOSE:
                self._must_confirm_close = True
                self._hand_on()
            case Operation.CLOSED:
                self._is_confirmed = True
                self._drop_if_quiet()

    def _on_frame(self, header: FrameHeader, length: int, control: bytearray, *, is_on_device: bool) -> None:
        if header.payload_bytes != length:
            raise FrameError(f"a header names {header.payload_bytes} payload bytes, the envelope {length}")
        if not self._is_peer_known:
            check_greeting(header)
        size = length + HEADER_BYTES
        if self._unreleased and self._unreleased + size > 2 * IN_FLIGHT_BYTES:
            raise FrameError("the peer sends more than may be under way")
        if is_on_device and (self._device is None or length <= INLINE_BYTES):
            raise FrameError("a payload for device memory, which was not agreed on")
        self._unreleased += size
        if length <= INLINE_BYTES:
            start = _ENVELOPE.size + HEADER_BYTES
            self._arriving.append(_Arriving(header, memoryview(control)[start : start + length], None, None, True))
            self._hand_on()
            return
        if is_on_device and self._device is not None:
            device = self._device.take(length)
            entry = _Arriving(header, _EMPTY, None, device, False)
        else:
            memory = self._pool.take(length)
            entry = _Arriving(header, memoryview(memory)[:length], memory, None, False)
        self._arriving.append(entry)

        def on_received() -> None:
            entry.is_complete = True
            self._hand_on()

        self._receive(entry.payload if entry.device is None else entry.device.array, _PAYLOAD_TAG, on_received)

    def _hand_on(self) -> None:
        """Make the frames at the head of the line available, and confirm a close behind the last of them."""
        while self._arriving and self._arriving[0].is_complete:
            entry = self._arriving.popleft()
            self._received.put(self._frame(entry))
        if self._must_confirm_close and not self._arriving:
            self._must_confirm_close = False
            self._submit_control(_ENVELOPE.pack(Operation.CLOSED, False, 0))
            self._finish(ConnectionClosed("closed by the peer"), drop=False)
            # The peer has ended too. It is not told when this endpoint goes, so it gets time to read the confirmation.
            self._set_deadline(CONFIRM_LINGER_S)
        self._drop_if_quiet()

    def _frame(self, entry: _Arriving) -> Frame:
        size = entry.header.payload_bytes + HEADER_BYTES

        def on_release() -> None:
            self._recycle(entry.memory if entry.device is None else entry.device)
            self._unreleased -= size
            # One acknowledgement for all frames released in a turn of the loop.
            if not self._to_acknowledge:
                self._loop.call_soon(self._acknowledge)
            self._to_acknowledge += size

        return Frame(entry.header, entry.payload.toreadonly(), on_release=on_release, device=entry.device)

    def _acknowledge(self) -> None:
        size, self._to_acknowledge = self._to_acknowledge, 0
        if self._end is None:
            self._submit_control(_ENVELOPE.pack(Operation.ACK, False, size))

    # --- the end --------------------------------------------------------------------------------------------------
    #
    # UCX never gives back what belongs to a transfer that is cut off halfway. So an end is always agreed on: CLOSE,
    # then both sides go on until everything sent before it has arrived, then CLOSED and the endpoint goes. A time limit
    # stands in for a peer that does not answer.

    def _begin_end(self, error: ConnectionClosed, timeout_s: float) -> None:
        is_first = self._end is None
        self._finish(error, drop=True)
        if is_first:
            self._submit_control(_ENVELOPE.pack(Operation.CLOSE, False, 0))
            self._set_deadline(timeout_s)

    def _set_deadline(self, timeout_s: float) -> None:
        if self._endpoint is not None:
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._loop.call_later(timeout_s, self._drop_endpoint)

    def _drop_if_quiet(self) -> None:
        if self._is_confirmed and not self._num_sending and not self._arriving:
            self._drop_endpoint()

    def _on_endpoint_closed(self) -> None:
        self._lose("the peer is gone")

    def _lose(self, reason: str) -> None:
        self._finish(ConnectionClosed(reason), drop=False)
        self._drop_endpoint()

    def _finish(self, error: TransferError, *, drop: bool) -> None:
        if self._end is None:
            self._end = ConnectionClosed(str(error))
        self._received.close(error, drop=drop)
        self._budget.close(self._end)
        self._pool.close()

    def _drop_endpoint(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is None:
            return
        self._gone.set()
        if self._deadline is not None:
            self._deadline.cancel()
        endpoint.remove_close_callback()
        self._engine.close_endpoint(endpoint)
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            # In a turn of its own: the engine may be stopped by it, and we may be called from the engine.
            self._loop.call_soon(on_gone)
