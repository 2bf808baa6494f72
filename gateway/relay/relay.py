"""One completion's life between client and workers: attempts until it ends, its chunks, its timings.

    turn at the gate
      |
    place -> Reserve -> Reserved -> Prefill or PrefillLocally -> first token -> tokens -> end
                 ^          ^               |                                     |
                 |          +-- Supersede --+ prefill failed                      |
                 +--------------- next attempt, prompt + generated tokens --------+ decode failed

Owns the waiting: for events, for the client to take a chunk, for the deadline. What the events mean is in
`attempt.py`. However it ends (also cancelled), the workers are told to let go of the request before `run` returns.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import structlog

from engine.clock import Clock
from engine.types import WorkerId
from engine.worker_types import WorkerRole
from gateway.relay.attempt import Attempt
from gateway.relay.output import CompletionOutput
from gateway.relay.recovery import Recovery
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Completion, Timings, TokenChunk
from gateway.routing.prefill_gate import PrefillGate, Turn
from gateway.routing.router import Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import AbortRequested, Interrupted
from gateway.workers.pool import WorkerPool
from kvrelay.errors import DeadlineExceeded, EngineError
from kvrelay.serving.telemetry import span

_log = structlog.get_logger(__name__)

Emit = Callable[[TokenChunk], Awaitable[None]]
"""Sends a chunk to the client; returns when it was taken."""


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """What a relay may try."""

    max_attempts: int = 3
    local_prefill_max_tokens: int = 16
    """A prompt rest this short is prefilled by decode itself: a hand-off would cost more."""
    worker_wait_s: float = 5.0
    """How long another attempt waits for a decode worker where none is connected."""


class Relay:
    """Runs one completion. Made for one `run`; one event loop."""

    def __init__(
        self,
        request: CompletionRequest,
        output: CompletionOutput,
        *,
        pool: WorkerPool,
        router: Router,
        gate: PrefillGate,
        limits: RelayLimits,
        clock: Clock,
    ) -> None:
        self._request = request
        self._output = output
        self._pool = pool
        self._router = router
        self._gate = gate
        self._turn: Turn | None = None
        self._limits = limits
        self._clock = clock
        self._mailbox = Mailbox()
        self._recovery = Recovery(limits.max_attempts)
        self._attempt: Attempt | None = None
        self._timings = Timings()
        self._first_token_at = self._last_token_at = 0.0
        self._prefill_worker: WorkerId | None = None
        self._is_abort_due = False
        self._interruption: EngineError | None = None

    def abort(self) -> None:
        """End it with FinishReason.ABORT. The workers are told at once, even while the client is slow to read."""
        self._is_abort_due = True
        self._stop_workers()
        self._mailbox.post(None, AbortRequested())

    def interrupt(self, error: EngineError) -> None:
        """End it with an error of the gateway's own, e.g. at the end of a drain."""
        self._interruption = self._interruption or error
        self._stop_workers()
        self._mailbox.post(None, Interrupted(error))

    async def run(self, emit: Emit) -> Completion:
        """Run the completion to its end.

        Args:
            emit: Called with each chunk, in order; while it waits, outputs coalesce.

        Raises:
            EngineError: it failed for good; the typed reason.
            DeadlineExceeded: the client's time ran out.
        """
        deadline = self._request.deadline
        time_left = None if deadline is None else deadline - self._clock.now()
        decode_worker: WorkerId | None = None
        timer = asyncio.timeout(time_left)
        try:
            async with timer:
                while not self._output.has_ended():
                    attempt = await self._run_attempt(emit)
                    decode_worker = attempt.decode_worker
                    self._prefill_worker = self._prefill_worker or attempt.prefill_worker
        except TimeoutError:
            if timer.expired():
                raise DeadlineExceeded("the deadline passed before the request was finished") from None
            raise
        finally:
            self._stop_workers()
        if self._output.ending is None:
            raise EngineError("the completion stopped without an end")
        self._timings.total_ns = _ns(self._clock.now() - self._request.arrival)
        self._timings.decode_ns = _ns(self._last_token_at - self._first_token_at)
        return Completion(
            self._output.ending,
            self._output.usage,
            self._timings,
            self._prefill_worker,
            decode_worker,
            self._recovery.attempt,
        )

    async def _run_attempt(self, emit: Emit) -> Attempt:
        """Run one attempt to the completion's end or to its own; then the next one has been counted."""
        attempt = self._attempt = Attempt(
            self._request,
            self._output,
            self._timings,
            self._recovery,
            router=self._router,
            mailbox=self._mailbox,
            on_prefill_over=self._leave_gate,
            local_prefill_max_tokens=self._limits.local_prefill_max_tokens,
            clock=self._clock,
        )
        number = self._recovery.attempt
        with span("gateway.reserve", attempt=number):
            await self._pass_gate()
            await self._reserve(attempt)
            while not attempt.is_reserved and await self._pump(attempt, emit):
                pass
        if attempt.is_reserved:
            with span("gateway.prefill_wait", attempt=number):
                while len(self._output.token_ids) == attempt.first_index and await self._pump(attempt, emit):
                    pass
            while await self._pump(attempt, emit):
                pass
        if not self._output.has_ended():
            _log.warning(
                "request.retried",
                request_id=self._request.engine_request.request_id,
                attempt=number,
                num_generated_tokens=len(self._output.token_ids),
            )
            attempt.let_go()
            self._leave_gate()
            # No session knows the request now: what is still in the box is of this attempt.
            self._mailbox.drop_worker_events()
            self._output.restart()
            self._recovery.next_attempt()
        return attempt

    async def _pass_gate(self) -> None:
        """Wait until the prefill tier can use the prompt; a short one needs no tier."""
        request = self._request.engine_request
        num_tokens = len(request.token_ids) + len(self._output.token_ids)
        if num_tokens <= self._limits.local_prefill_max_tokens:
            return
        self._turn = self._gate.enter(
            num_tokens,
            priority=request.priority,
            deadline=self._request.deadline,
            is_resumed=self._recovery.attempt > 1,
        )
        await self._turn.wait()

    def _leave_gate(self) -> None:
        if self._turn is not None:
            self._turn.leave()

    async def _reserve(self, attempt: Attempt) -> None:
        request = self._request.engine_request
        request = replace(
            request,
            token_ids=request.token_ids + tuple(self._output.token_ids),
            is_suspect=self._recovery.is_suspect,
        )
        if self._recovery.attempt > 1:
            await self._pool.wait_usable(WorkerRole.DECODE, self._limits.worker_wait_s)
        if not self._is_abort_due and self._interruption is None:
            attempt.reserve(request)

    async def _pump(self, attempt: Attempt, emit: Emit) -> bool:
        """Wait for events, take all there are, and send the client what follows; False when the attempt is over.

        Raises:
            EngineError: the request cannot go on.
        """
        if self._output.has_ended() or attempt.is_restart_due:
            return False
        for source, event in await self._mailbox.drain():
            attempt.handle(source, event)
        await self._emit(emit, self._output.take_chunk())
        if self._is_abort_due and not self._output.has_ended():
            await self._emit(emit, self._output.abort())
        if self._output.has_ended():
            return False
        error = self._interruption or attempt.failure
        if error is not None:
            raise error
        return not attempt.is_restart_due

    async def _emit(self, emit: Emit, chunk: TokenChunk | None) -> None:
        if chunk is None:
            return
        if chunk.token_ids:
            self._last_token_at = self._clock.now()
            if chunk.token_index == 0:
                self._first_token_at = self._last_token_at
                self._timings.first_token_ns = _ns(self._first_token_at - self._request.arrival)
        await emit(chunk)

    def _stop_workers(self) -> None:
        self._leave_gate()
        if self._attempt is not None:
            self._attempt.let_go()


def _ns(seconds: float) -> int:
    return max(0, int(seconds * 1e9))
