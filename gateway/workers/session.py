"""One multiplexed stream to one worker: commands of all requests out, events of all requests in.

Owns the stream's life (connect, greeting, reconnect with back-off), the order of what is sent, and which request an
event belongs to. When the stream ends, for whatever reason, every request on it is told `SessionLost`; one request's
error never ends the stream. Decides nothing about requests; that is `gateway/relay/attempt.py`. No client interceptors
here: they leak on long streams (grpc issue 25449).
"""

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc
import grpc.aio
import structlog

from engine.clock import Clock
from engine.types import RequestId
from engine.worker_types import TransferPeer, WorkerInfo, WorkerLoad, WorkerRole
from gateway.workers.liveness import Liveness
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import Event, SessionLost, Stalled
from gateway.workers.stream import Message, WorkerStream, encode
from kvrelay.channel import channel_options
from kvrelay.errors import CapacityError, EngineError, WorkerUnavailable
from kvrelay.wire.engine.commands import Abort, Prefill, Renew, RequestCommand, Reserve, UpdatePeers
from kvrelay.wire.engine.events import Ending, ForRequest, Ready, Step
from kvrelay.wire.status import from_rpc_error

_log = structlog.get_logger(__name__)

LOOK_INTERVAL_S = 0.5
"""How often a session is looked at: whether its worker hangs, whether leases want renewal."""
RENEWAL_SHARE = 0.25
"""Leases are renewed after this share of their time to live."""
_LAST_WORDS_S = 1.0
"""Wait for the stream's status after a failed write: the write itself may report INTERNAL (grpc issue 36066)."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of a session."""

    ready_timeout_s: float = 10.0
    """Longest wait for a worker's greeting."""
    silence_s: float = 5.0
    """How long nothing may be heard of a worker before others are used; a live one reports every second."""
    max_queued_commands: int = 1024
    """Most commands waiting to be written; beyond it requests are refused."""
    min_backoff_s: float = 0.05
    max_backoff_s: float = 2.0


@dataclass(slots=True)
class _Attached:
    mailbox: Mailbox
    num_tokens: int


class WorkerSession:
    """The session to one registered worker. One event loop.

    Invariants: requests are attached only while the session is open; `num_outstanding_tokens` is the sum over them;
    an abort is written before any command that was given after it.
    """

    def __init__(
        self,
        info: WorkerInfo,
        *,
        clock: Clock,
        peers: Callable[[], Sequence[TransferPeer]],
        on_change: Callable[[], None],
        limits: SessionLimits,
    ) -> None:
        self.info = info
        self.load = WorkerLoad(num_free_blocks=info.num_blocks, num_blocks=info.num_blocks)
        """As last reported; before that as if idle."""
        self.is_open = False
        """Whether the worker has greeted and commands can be sent."""
        self.is_drain_announced = False
        """Whether the registry says that the worker drains."""
        self.is_stall_announced = False
        """Whether the registry says that the worker's engine hangs."""
        self.num_outstanding_tokens = 0
        """Tokens of all attached requests."""
        self._clock = clock
        self._peers = peers
        self._on_change = on_change
        self._limits = limits
        self._requests: dict[RequestId, _Attached] = {}
        self._commands: deque[tuple[RequestId, Message]] = deque()
        self._aborts: dict[RequestId, None] = {}
        self._has_new_peers = True
        self._awaiting_prefill: set[RequestId] = set()
        self._is_renewal_due = False
        self._lease_ttl_s = 0.0
        self._liveness = Liveness(0.0, limits.silence_s, LOOK_INTERVAL_S)
        self._is_silent = False
        self._num_unreported_blocks = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- what requests use --------------------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be placed here."""
        return self.is_open and not self.is_draining and not self.is_stalled

    @property
    def is_draining(self) -> bool:
        """Whether the worker takes no new requests."""
        return self.is_drain_announced or self.load.is_draining

    @property
    def is_stalled(self) -> bool:
        """Whether the worker's engine hangs, or nothing is heard of it; it may come back."""
        return self._is_silent or self.is_stall_announced or self.load.is_stalled

    @property
    def num_requests(self) -> int:
        """Requests attached."""
        return len(self._requests)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks as last reported, less what was asked for since."""
        return max(0, self.load.num_free_blocks - self._num_unreported_blocks)

    def attach(self, request_id: RequestId, mailbox: Mailbox, num_tokens: int) -> None:
        """Let a request's events go to its mailbox until `detach`, or until `SessionLost` is posted there.

        Raises:
            WorkerUnavailable: the session is not open.
        """
        if not self.is_open:
            raise WorkerUnavailable(f"no session is open to worker {self.info.worker_id}")
        self.detach(request_id)
        self._requests[request_id] = _Attached(mailbox, num_tokens)
        self.num_outstanding_tokens += num_tokens
        self._num_unreported_blocks += self.info.layout.num_blocks(num_tokens)

    def detach(self, request_id: RequestId) -> None:
        """Forget a request; its later events are dropped. Unknown ones are ignored."""
        self.keep_reservation(request_id, is_kept=False)
        attached = self._requests.pop(request_id, None)
        if attached is not None:
            self.num_outstanding_tokens -= attached.num_tokens

    def keep_reservation(self, request_id: RequestId, *, is_kept: bool) -> None:
        """Renew an attached request's lease from now on, because its prefill waits elsewhere; or stop doing so."""
        if is_kept and request_id in self._requests:
            self._awaiting_prefill.add(request_id)
        else:
            self._awaiting_prefill.discard(request_id)

    def send(self, command: RequestCommand) -> None:
        """Queue a command; never waits.

        Raises:
            WorkerUnavailable: the session is not open.
            CapacityError: too many commands wait because the worker does not read.
        """
        if not self.is_open:
            raise WorkerUnavailable(f"no session is open to worker {self.info.worker_id}")
        if len(self._commands) >= self._limits.max_queued_commands:
            raise CapacityError(f"worker {self.info.worker_id} does not keep up with its commands")
        request_id = command.request.request_id if isinstance(command, Reserve | Prefill) else command.request_id
        self._commands.append((request_id, encode(self.info.role, command, self._clock.now())))
        self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        """End a request at the worker, whatever its phase. Without a session nothing is left there to end."""
        if not self.is_open:
            return
        if self._commands:
            self._commands = deque(entry for entry in self._commands if entry[0] != request_id)
        self._aborts[request_id] = None
        self._wake.set()

    def announce_peers(self) -> None:
        """Send the list of decode workers (again); coalesces."""
        self._has_new_peers = True
        self._wake.set()

    # --- the stream's life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect in the background, and again whenever the stream ends, until `close`."""
        # A context of its own: the session outlives the call that registered the worker, and must not log under it.
        self._task = asyncio.get_running_loop().create_task(
            self._run(), name=f"session {self.info.worker_id}", context=contextvars.Context()
        )

    async def close(self) -> None:
        """End the stream and wait for it; attached requests are told."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_s = self._limits.min_backoff_s
        while True:
            was_open = False
            try:
                error = await self._connect_and_serve()
                was_open = self.is_open
            finally:
                self._lose(f"the session to worker {self.info.worker_id} was closed")
            # Told once; that a worker stays away is said by the registry.
            log = _log.warning if was_open else _log.debug
            log("session.ended", worker_id=self.info.worker_id, was_open=was_open, error=str(error))
            backoff_s = self._limits.min_backoff_s if was_open else min(self._limits.max_backoff_s, backoff_s * 2)
            # Jitter, so that the gateways of a cluster do not dial a restarted worker in step.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.5))

    async def _connect_and_serve(self) -> EngineError:
        """Run one stream to its end and return why it ended."""
        # A pool of its own, so that every attempt dials at once instead of sharing another channel's back-off. And one
        # attempt per channel, for which gRPC's shortest back-off is also how long it may take to connect.
        connect_timeout_ms = int(self._limits.ready_timeout_s * 1000)
        options = (
            *channel_options(),
            ("grpc.min_reconnect_backoff_ms", connect_timeout_ms),
            ("grpc.use_local_subchannel_pool", 1),
        )
        async with grpc.aio.insecure_channel(self.info.address, options=options) as channel:
            stream = WorkerStream(self.info.role, channel)
            loop = asyncio.get_running_loop()
            reader = loop.create_task(self._read(stream), name=f"session read {self.info.worker_id}")
            writer = loop.create_task(self._write(stream), name=f"session write {self.info.worker_id}")
            watch = loop.create_task(self._watch(), name=f"session watch {self.info.worker_id}")
            try:
                done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                if reader not in done:
                    await asyncio.wait((reader,), timeout=_LAST_WORDS_S)
                return self._reason(reader, writer)
            finally:
                reader.cancel()
                writer.cancel()
                watch.cancel()
                stream.cancel()
                await asyncio.gather(reader, writer, watch, return_exceptions=True)

    def _reason(self, reader: "asyncio.Task[None]", writer: "asyncio.Task[None]") -> EngineError:
        # A write to a stream that is over fails too; why it is over is for the reader to tell.
        task = reader if reader.done() else writer
        error = None if task.cancelled() else task.exception()
        if error is None:
            return WorkerUnavailable(f"worker {self.info.worker_id} ended the session")
        if isinstance(error, EngineError):
            return error
        if isinstance(error, TimeoutError):
            return WorkerUnavailable(f"no greeting within {self._limits.ready_timeout_s:g} s")
        if isinstance(error, grpc.RpcError):
            return from_rpc_error(error)
        _log.error("session.failed", worker_id=self.info.worker_id, exc_info=error)
        return EngineError(f"{type(error).__name__} in the session to {self.info.worker_id}")

    async def _read(self, stream: WorkerStream) -> None:
        async with asyncio.timeout(self._limits.ready_timeout_s) as ready_timer:
            loop = asyncio.get_running_loop()
            while (event := await stream.read()) is not None:
                self._liveness.heard(loop.time())
                match event:
                    case Step(outputs):
                        for output in outputs:
                            self._post(output.output.request_id, output)
                    case ForRequest(request_id, happened):
                        self._post(request_id, happened)
                    case WorkerLoad():
                        self._take_load(event)
                    case Ready():
                        self._greet(event)
                        ready_timer.reschedule(None)
                    case Ending(reason):
                        raise WorkerUnavailable(reason)

    async def _watch(self) -> None:
        """Tell requests while their worker hangs, and keep the reservations of those whose prefill waits."""
        loop = asyncio.get_running_loop()
        self._liveness = Liveness(loop.time(), self._limits.silence_s, LOOK_INTERVAL_S)
        renewed_at, was_stalled = loop.time(), False
        while True:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now = loop.time()
            self._is_silent = self.is_open and self._liveness.is_silent(now)
            if self.is_stalled != was_stalled:
                was_stalled = self.is_stalled
                log = _log.warning if was_stalled else _log.info
                log("session.stalled" if was_stalled else "session.moves_again", worker_id=self.info.worker_id)
                self._on_change()
            if was_stalled:
                self._post_all(Stalled(WorkerUnavailable(f"worker {self.info.worker_id} does not answer")))
            if self._awaiting_prefill and now - renewed_at >= self._lease_ttl_s * RENEWAL_SHARE:
                renewed_at = now
                self._is_renewal_due = True
                self._wake.set()

    async def _write(self, stream: WorkerStream) -> None:
        self._has_new_peers = True
        while True:
            message = self._next_message()
            if message is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await stream.write(message)

    def _next_message(self) -> Message | None:
        role, now = self.info.role, self._clock.now()
        # Decode sends KV to nobody, and only decode reserves anything.
        if self._has_new_peers:
            self._has_new_peers = False
            if role is WorkerRole.PREFILL:
                return encode(role, UpdatePeers(tuple(self._peers())), now)
        if self._aborts:
            request_ids, self._aborts = self._aborts, {}
            return encode(role, Abort(tuple(request_ids)), now)
        if self._is_renewal_due:
            self._is_renewal_due = False
            if role is WorkerRole.DECODE:
                return encode(role, Renew(tuple(self._awaiting_prefill)), now)
        return self._commands.popleft()[1] if self._commands else None

    def _greet(self, ready: Ready) -> None:
        if (ready.worker_id, ready.incarnation) != (self.info.worker_id, self.info.incarnation):
            # A restarted process that has not registered yet, or an address in use by another worker.
            raise WorkerUnavailable(
                f"at {self.info.address} answers {ready.worker_id}, not this incarnation of {self.info.worker_id}"
            )
        self.is_open = True
        self._lease_ttl_s = ready.lease_ttl_ms / 1000
        _log.info("session.opened", worker_id=self.info.worker_id, worker_role=self.info.role.value)
        self._on_change()

    def _take_load(self, load: WorkerLoad) -> None:
        is_changed = load.is_draining != self.load.is_draining
        self.load = load
        self._num_unreported_blocks = 0
        if is_changed:
            self._on_change()

    def _post(self, request_id: RequestId, event: Event) -> None:
        attached = self._requests.get(request_id)
        if attached is not None:
            attached.mailbox.post(self.info.worker_id, event)

    def _post_all(self, event: Event) -> None:
        for attached in self._requests.values():
            attached.mailbox.post(self.info.worker_id, event)

    def _lose(self, reason: str) -> None:
        was_open, self.is_open = self.is_open, False
        self._is_silent = False
        self.load = replace(self.load, is_stalled=False)  # its next session tells
        self._commands.clear()
        self._aborts.clear()
        self._awaiting_prefill.clear()
        self._post_all(SessionLost(WorkerUnavailable(reason)))
        self._requests.clear()
        self.num_outstanding_tokens = self._num_unreported_blocks = 0
        if was_open:
            self._on_change()
