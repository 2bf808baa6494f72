"""Drives the receiving side of hand-offs on a decode worker: connections in, verified blocks out.

`Importer.serve` is the connection handler that the service gives to every transport it listens on. The decisions and
the fence are in `import_table.py`; this file owns connections and replies, and never touches a block.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence

import structlog

from engine.cache.layout import KvLayout
from engine.clock import Clock, SystemClock
from engine.types import BlockId, Incarnation, LeaseId, WorkerId
from engine.worker_types import KvHandle
from kv_transfer.blocks import BlockSink
from kv_transfer.frame import Frame, FrameError, FrameKind, seal, verify
from kv_transfer.handoff.import_table import CommitCallback, FailureCallback, ImportTable
from kv_transfer.handoff.lease import LeaseTable
from kv_transfer.handoff.messages import Hello, Rejection
from kv_transfer.handoff.receiver import DEFAULT_WINDOW_BYTES
from kv_transfer.transports.flow import LoopYield
from kv_transfer.transports.port import Connection, ConnectionClosed
from kvrelay.errors import EngineError, PeerUnavailable

HANDSHAKE_TIMEOUT_S = 5.0
MAX_QUEUED_REPLIES = 8192
"""Replies an exporter may leave unread before its connection is dropped."""

_log = structlog.get_logger(__name__)


class _ConnectedWriter:
    """One exporter's connection and the replies that wait for it."""

    _ids = itertools.count(1)

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.writer_id = next(self._ids)
        self.source: KvLayout = hello.layout
        self.worker_id = hello.worker_id
        self.transport = connection.scheme
        self._connection = connection
        self._replies: deque[Frame] = deque()
        self._wake = asyncio.Event()

    def reply(self, frame: Frame) -> None:
        """See `Writer.reply`."""
        if len(self._replies) >= MAX_QUEUED_REPLIES:
            _log.warning("kv_transfer.replies_unread", peer=self.worker_id, transport=self.transport)
            self._connection.abort()
            return
        self._replies.append(frame)
        self._wake.set()

    async def send_replies(self) -> None:
        """Send replies until cancelled or the connection ends."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._replies:
                await self._connection.send(self._replies.popleft())


class Importer:
    """The decode worker's end of every hand-off.

    All methods belong to one event loop; callbacks are called on it. `on_commit` takes over the blocks of the lease: it
    may raise an `EngineError` to refuse them, having freed them itself. `on_failed` is told that an attempt ended
    without a commit: with `LeaseExpired` the lease is gone and the blocks are the service's to free; with any other
    error the lease and its blocks still stand, for `supersede` or `release`.
    """

    def __init__(
        self,
        sink: BlockSink,
        leases: LeaseTable,
        on_commit: CommitCallback,
        on_failed: FailureCallback,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        clock: Clock | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        verify_digests: bool = True,
    ) -> None:
        """Make an importer.

        Args:
            sink: Where verified tokens are written.
            leases: The worker's lease table; only this importer may change it.
            on_commit: Called once per committed hand-off: lease id, epoch, hand-off record, stats.
            on_failed: Called once per failed attempt or expired lease: lease id, epoch, error.
            worker_id: This worker, for handles and HELLO.
            incarnation: This process; frames meant for an earlier one are refused.
            clock: Time for stats; defaults to the system clock.
            window_bytes: Credit of one hand-off.
            verify_digests: False only in the negative control of the corruption tests.
        """
        self._hello = Hello(worker_id, incarnation, sink.layout)
        self._leases = leases
        self._table = ImportTable(
            sink,
            leases,
            on_commit,
            on_failed,
            worker_id=worker_id,
            incarnation=incarnation,
            clock=clock or SystemClock(),
            window_bytes=window_bytes,
            verify_digests=verify_digests,
        )

    @property
    def num_reservations(self) -> int:
        """Reservations that have neither committed nor ended."""
        return len(self._table)

    def reserve(
        self, block_ids: Sequence[BlockId], start_token: int, num_tokens: int, session_id: str, ttl_s: float
    ) -> KvHandle:
        """Register blocks that the caller has allocated and return the right to fill them.

        Args:
            block_ids: Blocks for tokens from `start_token` on, in order: the sequence's block table without the prefix
                that was cached. More than needed is fine (the block of the first decode step); they are not written.
            start_token: First token that is not in this worker's prefix cache; a multiple of the block size.
            num_tokens: Tokens of the prompt.
            session_id: The gateway session the lease belongs to.
            ttl_s: Time to live. Frames and `keep_alive` restart it.

        Raises:
            InvalidRequest: The blocks do not cover the tokens, or one is reserved already.
        """
        return self._table.reserve(block_ids, start_token, num_tokens, session_id, ttl_s)

    def keep_alive(self, lease_id: LeaseId) -> None:
        """Restart a lease's time on behalf of a writer that waits for its turn.

        Does nothing once KV has come: from then on only frames are news, or a writer that got stuck would never be
        noticed. Raises `LeaseExpired` or `LeaseUnknown`.
        """
        if not self._table.has_begun(lease_id):
            self._leases.keep_alive(lease_id)

    def supersede(self, lease_id: LeaseId) -> KvHandle:
        """Fence the present attempt and return a handle for the next one, into the same blocks.

        Raises:
            LeaseUnknown: The lease has committed, was released, or never existed.
            LeaseExpired: It ran out of time.
        """
        return self._table.supersede(lease_id)

    def release(self, lease_id: LeaseId) -> bool:
        """End a reservation. Afterwards nothing writes into its blocks; the caller frees them.

        Returns:
            Whether there was one; False after a commit, whose blocks belong to the sequence.
        """
        return self._table.release(lease_id)

    def end_session(self, session_id: str) -> list[LeaseId]:
        """End every reservation of a session and return their leases; the caller frees the blocks."""
        return self._table.end_session(session_id)

    def tick(self) -> list[LeaseId]:
        """Expire what is due: fence it, then call `on_failed`. To be called about once a second. Returns the leases."""
        return self._table.tick()

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if reservations and leases contradict each other."""
        self._table.check_invariants()

    async def serve(self, connection: Connection) -> None:
        """Serve one exporter until its connection ends; the handler to give to `Transport.listen`.

        Raises:
            EngineError: The connection ended or the peer broke the protocol; its open attempts have failed.
        """
        hello = await self._shake_hands(connection)
        writer = _ConnectedWriter(connection, hello)
        replies = asyncio.get_running_loop().create_task(writer.send_replies())
        _log.info("kv_transfer.connected", peer=hello.worker_id, transport=connection.scheme)
        reason: EngineError = PeerUnavailable("the import was shut down")
        loop_yield = LoopYield()
        try:
            while True:
                frame = await connection.recv()
                try:
                    self._table.handle_frame(writer, frame)
                finally:
                    frame.release()
                # Frames may be waiting without a pause: the loop must get to serve tokens in between.
                await loop_yield.pause()
        except ConnectionClosed as error:
            reason = PeerUnavailable(f"the connection to prefill worker {hello.worker_id} was lost: {error}")
        except EngineError as error:
            reason = error
            raise
        finally:
            replies.cancel()
            self._table.writer_lost(writer, reason)
            # Kept here, in a frame that it passed, it would keep the connection until the next full collection.
            del reason
            await asyncio.gather(replies, return_exceptions=True)

    async def _shake_hands(self, connection: Connection) -> Hello:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                frame = await connection.recv()
        except TimeoutError as error:
            raise PeerUnavailable(f"no HELLO within {HANDSHAKE_TIMEOUT_S:g} s") from error
        try:
            hello = self._checked_hello(frame)
        except EngineError as error:
            await connection.send(seal(FrameKind.REJECTED, payload=Rejection.of(error).encode()))
            raise
        finally:
            frame.release()
        connection.trust_peer()
        incarnation = self._hello.incarnation
        await connection.send(seal(FrameKind.HELLO, incarnation=incarnation, payload=self._hello.encode()))
        return hello

    def _checked_hello(self, frame: Frame) -> Hello:
        verify(frame)
        if frame.header.kind is not FrameKind.HELLO:
            raise FrameError(f"a connection begins with HELLO, not {frame.header.kind.name}")
        if frame.header.incarnation not in (0, self._hello.incarnation):
            raise PeerUnavailable(f"worker {self._hello.worker_id} was restarted")
        hello = Hello.decode(frame.payload)
        self._hello.layout.check_convertible(hello.layout)
        return hello
