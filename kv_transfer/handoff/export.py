"""One running export: carries out what the sending state machine decides, over one link.

Made by `Exporter.begin`. All blocks are read on the event loop, between two awaits, so once the export has ended no
read is in flight and prefill may free its blocks. Decisions: `sender.py`.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self, TypeVar, assert_never

from engine.cache.layout import KvLayout
from engine.clock import Clock
from engine.types import BlockId
from engine.worker_types import KvHandle, TransferStats
from kv_transfer.blocks import BlockSource
from kv_transfer.device import gather_on_device
from kv_transfer.frame import Frame, FrameKind, PayloadBuffer, seal
from kv_transfer.handoff.gather import gather
from kv_transfer.handoff.link import PeerLink
from kv_transfer.handoff.messages import Commit, Credit, Open, Rejection
from kv_transfer.handoff.pace import FrameCost
from kv_transfer.handoff.sender import (
    AbortRequested,
    Accepted,
    Acknowledged,
    CreditGranted,
    Failed,
    Finished,
    FinishRequested,
    KvSent,
    LayerReady,
    SendAbort,
    SendCommit,
    SenderEvent,
    SenderHandoff,
    SenderInstruction,
    SenderState,
    SendKv,
)
from kv_transfer.transports.flow import LoopYield
from kvrelay.errors import EngineError, PeerUnavailable, RequestCancelled, TransferError

_T = TypeVar("_T", PeerLink, PayloadBuffer)

ABORT_GRACE_S = 1.0
"""How long an abort may wait for its ABORT frame to leave."""


class Export:
    """The sending of one sequence's KV. Use it as `async with exporter.begin(handle) as export`.

    `layer_ready` is called as compute goes on, then exactly one of `finish` and `abort`; leaving the `async with` block
    before `finish` aborts. After either has returned, no block is read any more.
    """

    def __init__(
        self,
        handle: KvHandle,
        source: BlockSource,
        layout: KvLayout,
        connect: Callable[[], Awaitable[PeerLink]],
        cost: FrameCost,
        clock: Clock,
        *,
        is_layerwise: bool | None,
        accept_timeout_s: float,
        commit_timeout_s: float,
        on_failed: Callable[[EngineError], None] | None,
    ) -> None:
        self.handle = handle
        self._source = source
        self._num_layers = layout.num_layers
        self._connect = connect
        self._cost = cost
        self._clock = clock
        self._accept_timeout_s = accept_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._on_failed = on_failed
        first_block = handle.start_token // layout.block_size
        num_bytes = (layout.num_blocks(handle.num_tokens) - first_block) * layout.block_bytes * layout.num_layers
        min_frame_bytes = cost.frame_bytes(num_bytes) if is_layerwise is None else 0 if is_layerwise else None
        self._machine = SenderHandoff(layout, handle.start_token, handle.num_tokens, min_frame_bytes=min_frame_bytes)
        self._block_ids: Sequence[BlockId] = ()
        self._instructions: deque[SenderInstruction] = deque()
        self._wake = asyncio.Event()
        self._loop_yield = LoopYield()
        self._link: PeerLink | None = None
        self._waiting: asyncio.Future[PeerLink] | asyncio.Future[PayloadBuffer] | None = None
        self._verdict: EngineError | None = None
        self._accept_timer: asyncio.TimerHandle | None = None
        self._began_at = clock.now()
        self._opened_at: float | None = None
        self._ready_at: float | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver = asyncio.get_running_loop().create_task(self._drive())

    @property
    def error(self) -> EngineError | None:
        """Why the export failed; None while it runs and after a commit."""
        if not self._done.done() or self._done.cancelled():
            return None
        error = self._done.exception()
        return error if isinstance(error, EngineError) else None

    def layer_ready(self, layer: int, num_tokens: int, block_ids: Sequence[BlockId]) -> None:
        """Report that KV of tokens `[.., num_tokens)` of a layer is final. Does nothing once the export has failed.

        Called on the event loop, once per layer and prefill chunk, in any order. The caller keeps its references on the
        blocks until `finish` or `abort` has returned.

        Args:
            layer: 0-based layer index.
            num_tokens: Tokens of the sequence that are computed, counted from its start.
            block_ids: The sequence's block table on this worker, from its first block on.
        """
        if layer >= self._num_layers:
            return  # a draft head's, and decode has none
        if len(block_ids) > len(self._block_ids):
            self._block_ids = tuple(block_ids)
        if len(self._block_ids) * self._source.layout.block_size < min(num_tokens, self.handle.num_tokens):
            self._post(AbortRequested(TransferError("the block table does not cover the tokens reported as ready")))
            return
        self._post(LayerReady(layer, num_tokens))
        if self._ready_at is None and self._machine.is_all_ready:
            self._ready_at = self._clock.now()

    async def finish(self, record: bytes) -> TransferStats:
        """Send what is left, commit, and wait until decode owns the KV.

        Args:
            record: The hand-off record, opaque here.

        Raises:
            EngineError: The hand-off failed: the receiver's reason (`LeaseExpired`, `StaleEpoch`, `ChecksumMismatch`,
                `CoverageIncomplete`, ...), or `PeerUnavailable` when it did not answer in time.
        """
        self._post(FinishRequested(record))
        try:
            async with asyncio.timeout(self._commit_timeout_s):
                await asyncio.shield(self._done)
        except TimeoutError:
            self._post(AbortRequested(PeerUnavailable(f"no commit within {self._commit_timeout_s:g} s")))
            await self._ended()
            await self._done
        except asyncio.CancelledError:
            self._post(AbortRequested(RequestCancelled("the export was cancelled")))
            await self._ended()
            raise
        await self._ended()
        now = self._clock.now()
        return TransferStats(
            num_bytes=self._machine.num_bytes,
            num_frames=self._machine.num_frames,
            total_ns=round((now - (self._opened_at or self._began_at)) * 1e9),
            exposed_ns=round((now - (self._ready_at or now)) * 1e9),
            transport="" if self._link is None else self._link.connection.scheme,
        )

    async def abort(self, reason: str) -> None:
        """Give the hand-off up and tell decode. Safe after `finish`, and twice."""
        self._post(AbortRequested(RequestCancelled(reason)))
        await self._ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.abort("the export was left before it finished" if error is None else f"prefill failed: {error}")

    def fail(self, error: EngineError) -> None:
        """End the export because its link or its worker is gone."""
        self._post(Failed(error))

    def _post(self, event: SenderEvent) -> None:
        self._instructions.extend(self._machine.handle(event))
        if self._machine.state is SenderState.FAILED:
            if self._verdict is None and isinstance(event, Failed | AbortRequested):
                self._verdict = event.error
            if self._waiting is not None:
                self._waiting.cancel()  # a stalled peer must not keep a dead export waiting for room
        self._wake.set()

    async def _unless_failed(self, awaited: Awaitable[_T]) -> _T | None:
        """Wait, but no longer than the hand-off lives; None = it failed meanwhile."""
        waiting = asyncio.ensure_future(awaited)
        self._waiting = waiting
        try:
            return await waiting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._machine.state is SenderState.FAILED and (task is None or not task.cancelling()):
                return None
            if not waiting.cancel() and not waiting.cancelled() and waiting.exception() is None:
                result = waiting.result()
                if isinstance(result, PayloadBuffer):
                    result.release()  # lent and cancelled in the same turn of the loop
            raise
        finally:
            self._waiting = None

    async def _ended(self) -> None:
        """Wait for the driver, for a bounded time."""
        done, _ = await asyncio.wait([self._driver], timeout=ABORT_GRACE_S)
        if not done:
            self._driver.cancel()
            await asyncio.wait([self._driver])

    async def _drive(self) -> None:
        error: EngineError | None = TransferError("the export ended early")
        try:
            error = await self._run()
        except EngineError as failure:
            error = failure
        except asyncio.CancelledError:
            error = PeerUnavailable("the export was cancelled")
            raise
        except Exception as failure:
            # The source is another component (a device may be behind it); finish() must not wait for ever.
            error = TransferError(f"reading or sending blocks failed: {type(failure).__name__}: {failure}")
        finally:
            self._machine.handle(Failed(error or TransferError("over")))  # no effect after a proper end
            error = error and (self._verdict or error)
            if self._accept_timer is not None:
                self._accept_timer.cancel()
            if self._link is not None:
                self._link.detach(self.handle.lease_id, self.handle.epoch)
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
                self._done.exception()  # an aborted export's error may never be asked for
                if self._on_failed is not None:
                    self._on_failed(error)

    async def _run(self) -> EngineError | None:
        """Carry out instructions until the machine has finished; returns its verdict."""
        handle = self.handle
        link = await self._unless_failed(self._connect())
        if link is None:
            return self._verdict
        link.attach(handle.lease_id, handle.epoch, self._on_reply, self.fail)
        self._link = link
        if self._machine.state is not SenderState.FAILED:
            self._opened_at = self._clock.now()
            claim = Open(handle.ticket, handle.start_token, handle.num_tokens)
            await self._send(FrameKind.OPEN, claim.encode())
            self._accept_timer = asyncio.get_running_loop().call_later(self._accept_timeout_s, self._not_accepted)
        while True:
            while self._instructions:
                instruction = self._instructions.popleft()
                match instruction:
                    case SendKv() | SendCommit() if self._machine.state is SenderState.FAILED:
                        continue
                    case SendKv():
                        await self._send_kv(instruction)
                    case SendCommit():
                        await self._send_commit(instruction)
                    case SendAbort():
                        await self._send(FrameKind.ABORT, Rejection.of(instruction.error).encode())
                    case Finished():
                        return instruction.error
                    case _:
                        assert_never(instruction)
            await self._wake.wait()
            self._wake.clear()
            self._loop_yield.resumed()

    def _not_accepted(self) -> None:
        if self._machine.state is SenderState.OPENING:
            self._post(AbortRequested(PeerUnavailable(f"no answer to OPEN within {self._accept_timeout_s:g} s")))

    async def _send(self, kind: FrameKind, payload: bytes) -> None:
        handle = self.handle
        if self._link is not None:
            await self._link.connection.send(seal(kind, handle.lease_id, handle.epoch, handle.incarnation, payload))

    async def _send_commit(self, instruction: SendCommit) -> None:
        exposed_ns = round((self._clock.now() - (self._ready_at or self._clock.now())) * 1e9)
        commit = Commit(
            instruction.num_bytes, instruction.num_frames, instruction.digest, exposed_ns, instruction.record
        )
        await self._send(FrameKind.COMMIT, commit.encode())

    async def _send_kv(self, instruction: SendKv) -> None:
        link, handle, blocks = self._link, self.handle, instruction.blocks
        if link is None:
            return
        num_bytes = blocks.num_cells * self._source.layout.block_bytes
        started_at = self._clock.now()
        buffer = link.connection.reserve_now(num_bytes)
        if buffer is None:
            buffer = await self._unless_failed(link.connection.reserve(num_bytes))
            self._loop_yield.resumed()
        if buffer is None:
            return
        try:
            if self._machine.state is SenderState.FAILED:
                return  # failed while waiting for room: the blocks may no longer be ours to read
            frame = seal(
                FrameKind.KV,
                handle.lease_id,
                handle.epoch,
                handle.incarnation,
                buffer.view,
                layer_start=blocks.layer_start,
                num_layers=blocks.num_layers,
                first_block=blocks.first_block,
                num_blocks=blocks.num_blocks,
                buffer=buffer,
                pieces=gather(self._source, blocks, self._block_ids, buffer.view)
                if buffer.device is None
                else gather_on_device(self._source, blocks, self._block_ids, buffer.device),
            )
            await link.connection.send(frame)
        finally:
            buffer.release()
        self._cost.observe(num_bytes, self._clock.now() - started_at)
        self._post(KvSent(blocks, num_bytes, frame.header.digest))
        await self._loop_yield.pause()

    def _on_reply(self, frame: Frame) -> None:
        match frame.header.kind:
            case FrameKind.ACCEPTED:
                max_frame_bytes = 0 if self._link is None else self._link.connection.preferred_payload_bytes
                self._post(Accepted(Credit.decode(frame.payload).num_bytes, max_frame_bytes))
            case FrameKind.CREDIT:
                self._post(CreditGranted(Credit.decode(frame.payload).num_bytes))
            case FrameKind.COMMITTED:
                self._post(Acknowledged())
            case FrameKind.REJECTED:
                self._post(Failed(Rejection.decode(frame.payload).to_error()))
            case _:
                self._post(Failed(TransferError(f"the receiver sent {frame.header.kind.name}")))
