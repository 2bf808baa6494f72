"""One completion's life between client and workers: what its machine waits for.

    turn at the gate
      |
    place -> Reserve -> Reserved -> Prefill or PrefillLocally -> first token -> tokens -> end
                 ^          ^               |                                     |
                 |          +-- Supersede --+ prefill failed                      |
                 +--------------- next attempt, prompt + generated tokens --------+ decode failed

Owns the waiting: for the gate, for events, for the client to take a chunk, for the deadline. What the events mean is in
`completion.py`, what is done about them in `driver.py`. However it ends (also cancelled), the workers are told to let
go of the request before `run` returns.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from engine.clock import Clock
from engine.worker_types import WorkerRole
from gateway.relay.completion import CompletionMachine
from gateway.relay.driver import CompletionDriver
from gateway.relay.instructions import ClientLeft, DeadlinePassed, Fail, Finish, FromWorker, Ready, Started
from gateway.relay.output import CompletionOutput
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Completion, TokenChunk
from gateway.routing.prefill_gate import PrefillGate
from gateway.routing.router import Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import AbortRequested, Interrupted
from gateway.workers.pool import WorkerPool
from kvrelay.errors import EngineError
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
        self._limits = limits
        self._clock = clock
        self._mailbox = Mailbox()
        self._machine = CompletionMachine(
            request,
            output,
            max_attempts=limits.max_attempts,
            local_prefill_max_tokens=limits.local_prefill_max_tokens,
        )
        self._driver = CompletionDriver(
            self._machine, request, router=router, gate=gate, mailbox=self._mailbox, clock=clock
        )

    def abort(self) -> None:
        """End it with FinishReason.ABORT. The workers are told at once, even while the client is slow to read."""
        self._end(AbortRequested())

    def interrupt(self, error: EngineError) -> None:
        """End it with an error of the gateway's own, e.g. at the end of a drain."""
        self._end(Interrupted(error))

    def _end(self, event: AbortRequested | Interrupted) -> None:
        self._driver.tell(event)
        self._mailbox.post(None, event)  # wakes `_pump`

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
        timer = asyncio.timeout(time_left)
        try:
            async with timer:
                self._driver.tell(Started())
                while self._driver.outcome is None:
                    await self._run_attempt(emit)
        except TimeoutError:
            if not timer.expired():
                raise
            self._driver.tell(DeadlinePassed())
        finally:
            self._driver.tell(ClientLeft())
        return self._completion()

    def _completion(self) -> Completion:
        match self._driver.outcome:
            case Finish(completion):
                return completion
            case Fail(error):
                raise error
            case None:
                raise EngineError("the completion stopped without an outcome")

    async def _run_attempt(self, emit: Emit) -> None:
        """Run one attempt to the completion's end or to its own; then the next one has begun to wait."""
        machine, number, first_index = self._machine, self._machine.attempt, len(self._output.token_ids)
        with span("gateway.reserve", attempt=number):
            await self._get_ready()
            self._driver.tell(Ready())
            await self._give_out(emit)
            while machine.is_reserving:
                await self._pump(emit)
        if machine.is_under_way:
            with span("gateway.prefill_wait", attempt=number):
                while len(self._output.token_ids) == first_index and machine.is_under_way:
                    await self._pump(emit)
            while machine.is_under_way:
                await self._pump(emit)
        if machine.is_waiting:
            _log.warning(
                "request.retried",
                request_id=self._request.engine_request.request_id,
                attempt=number,
                num_generated_tokens=len(self._output.token_ids),
            )

    async def _get_ready(self) -> None:
        """Wait until the prefill tier can use the prompt, and for a decode worker where one was lost."""
        if self._driver.turn is not None:
            await self._driver.turn.wait()
        if self._machine.is_waiting and self._machine.attempt > 1:
            await self._pool.wait_usable(WorkerRole.DECODE, self._limits.worker_wait_s)

    async def _pump(self, emit: Emit) -> None:
        """Wait for events, take all there are, and send the client what follows."""
        for source, event in await self._mailbox.drain():
            if source is not None:  # what is not from a worker was told at once
                self._driver.tell(FromWorker(source, event))
        await self._give_out(emit)

    async def _give_out(self, emit: Emit) -> None:
        """Send the client what there is; at the end of an attempt, all that there is."""
        while (chunk := self._driver.next_chunk()) is not None:
            await emit(chunk)
            if not self._machine.is_ending:
                return
