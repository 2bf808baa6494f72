"""One completion from its first attempt to its one outcome, as a state machine without input or output.

`CompletionMachine.handle` takes an event and returns instructions, both from `instructions.py`. `driver.py` carries
them out over the workers' sessions, `relay.py` waits for what comes next. What workers say is understood in
`attempt.py`, what the client sees of it is in `output.py`.

    NEW -> RUNNING -> ABORTING, FAILING, FINISHING -> OVER
             ^  |
             |  v
          RESTARTING
"""

from enum import StrEnum

from engine.types import WorkerId
from gateway.relay.attempt import Attempt, AttemptState
from gateway.relay.instructions import (
    AttemptEvent,
    ClientLeft,
    ClientReady,
    DeadlinePassed,
    Emit,
    Fail,
    Finish,
    FromWorker,
    Instructions,
    Started,
)
from gateway.relay.output import CompletionOutput
from gateway.relay.recovery import Recovery
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Completion, Timings, TokenChunk, to_ns
from gateway.workers.messages import AbortRequested, Interrupted
from kvrelay.errors import DeadlineExceeded, EngineError, RequestCancelled


class CompletionState(StrEnum):
    """Where a completion stands. Only in RUNNING may a worker hold anything for it."""

    NEW = "new"
    """Nothing was begun."""
    RUNNING = "running"
    """An attempt is under way."""
    RESTARTING = "restarting"
    """It was lost; what was sent before is given out, then the next one goes on behind it."""
    ABORTING = "aborting"
    """The client asked for the end; what was sent before is given out."""
    FAILING = "failing"
    """It cannot go on; what was sent before is given out."""
    FINISHING = "finishing"
    """It has ended; the client takes the last of it."""
    OVER = "over"
    """The outcome was told."""


_OUTCOME_KNOWN = (CompletionState.FINISHING, CompletionState.OVER)


class CompletionMachine:
    """One completion's attempts, one after the other.

    Invariants: `Finish` or `Fail` once, last; `BeginAttempt` at most `max_attempts` times; each token is emitted once,
    in the order of their indexes.
    """

    def __init__(
        self, request: CompletionRequest, output: CompletionOutput, *, max_attempts: int, local_prefill_max_tokens: int
    ) -> None:
        self._request = request
        self._output = output
        self._recovery = Recovery(max_attempts)
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._timings = Timings()
        self._first_token_at = self._last_token_at = 0.0
        self._attempt: Attempt | None = None
        """None: none was begun."""
        self._prefill_worker: WorkerId | None = None
        """Who sampled the first token, if an earlier attempt got it."""
        self._error: EngineError | None = None
        """Why it is FAILING."""
        self.state = CompletionState.NEW

    @property
    def attempt(self) -> int:
        """Number of the current attempt."""
        return self._recovery.attempt

    @property
    def is_waiting(self) -> bool:
        """Whether an attempt waits until it can be placed."""
        return self._attempt is not None and self._attempt.state is AttemptState.WAITING

    @property
    def is_reserving(self) -> bool:
        """Whether an attempt waits for blocks."""
        return self._attempt is not None and self._attempt.state is AttemptState.RESERVING

    @property
    def is_under_way(self) -> bool:
        """Whether an attempt was begun and has not made way for the next one yet, nor for the outcome."""
        return self.state not in (CompletionState.NEW, CompletionState.OVER) and not self.is_waiting

    @property
    def is_ending(self) -> bool:
        """Whether nobody is waited for but the client, until the outcome or the next attempt."""
        return self.state not in (CompletionState.NEW, CompletionState.RUNNING, CompletionState.OVER)

    def handle(self, event: AttemptEvent, now: float) -> Instructions:
        """Take one event, at clock second `now`, and return what is to be done, in order."""
        match event:
            case FromWorker():
                return () if self.state in _OUTCOME_KNOWN else self._on_attempt(event, now)
            case ClientReady():
                return self._on_client_ready(now)
            case Started() if self.state is CompletionState.NEW:
                return self._begin()
            case AbortRequested() if self.state not in _OUTCOME_KNOWN:
                return self._end(CompletionState.ABORTING)
            case Interrupted(error):
                return self._fail(error)
            case DeadlinePassed():
                return self._give_up(DeadlineExceeded("the deadline passed before the request was finished"))
            case ClientLeft():
                return self._give_up(RequestCancelled("the client has left"))
            case _:
                return self._on_attempt(event, now)

    def _begin(self) -> Instructions:
        self.state = CompletionState.RUNNING
        self._prefill_worker = self._first_prefill_worker()
        self._attempt = Attempt(
            self._request,
            self._output,
            self._timings,
            self._recovery,
            local_prefill_max_tokens=self._local_prefill_max_tokens,
        )
        return (self._attempt.begin(),)

    def _on_attempt(self, event: AttemptEvent, now: float) -> Instructions:
        if self._attempt is None:
            return ()
        instructions = self._attempt.handle(event, now)
        if self.state is CompletionState.RUNNING and self._attempt.state is AttemptState.LOST:
            self.state = CompletionState.RESTARTING
        if self._attempt.state is AttemptState.FAILED and self._attempt.error is not None:
            return (*instructions, *self._fail(self._attempt.error))
        return instructions

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, state: CompletionState) -> Instructions:
        self.state = state
        return () if self._attempt is None else self._attempt.close()

    def _fail(self, error: EngineError) -> Instructions:
        if self.state in (CompletionState.ABORTING, CompletionState.FAILING, *_OUTCOME_KNOWN):
            return ()
        self._error = error
        return self._end(CompletionState.FAILING)

    def _give_up(self, error: EngineError) -> Instructions:
        if self.state is CompletionState.OVER:
            return ()
        return (*self._end(CompletionState.OVER), Fail(error))

    # --- what the client gets -----------------------------------------------------------------------------------------

    def _on_client_ready(self, now: float) -> Instructions:
        if self.state is CompletionState.OVER:
            return ()
        instructions: Instructions = ()
        try:
            chunk = self._output.take_chunk()
        except EngineError as error:
            chunk, instructions = None, self._fail(error)
        if chunk is None and self.state is CompletionState.ABORTING:
            chunk = self._output.abort()
        if self._output.has_ended() and self.state is not CompletionState.FINISHING:
            instructions = self._end(CompletionState.FINISHING)
        if chunk is not None:
            return (*instructions, self._emit(chunk, now))
        return (*instructions, *self._go_on(now))

    def _emit(self, chunk: TokenChunk, now: float) -> Emit:
        if chunk.token_ids:
            self._last_token_at = now
            if chunk.token_index == 0:
                self._first_token_at = now
                self._timings.first_token_ns = to_ns(now - self._request.arrival)
        return Emit(chunk)

    def _go_on(self, now: float) -> Instructions:
        """Do what was due once everything was given out."""
        if self.state is CompletionState.RESTARTING:
            self._output.restart()
            self._recovery.next_attempt()
            return self._begin()
        if self.state is CompletionState.FAILING and self._error is not None:
            self.state = CompletionState.OVER
            return (Fail(self._error),)
        if self.state is CompletionState.FINISHING and self._output.ending is not None:
            self.state = CompletionState.OVER
            self._timings.total_ns = to_ns(now - self._request.arrival)
            self._timings.decode_ns = to_ns(self._last_token_at - self._first_token_at)
            completion = Completion(
                self._output.ending,
                self._output.usage,
                self._timings,
                self._first_prefill_worker(),
                None if self._attempt is None else self._attempt.decode_worker,
                self.attempt,
            )
            return (Finish(completion),)
        return ()

    def _first_prefill_worker(self) -> WorkerId | None:
        """Who sampled the very first token; None until it came."""
        return self._prefill_worker or (None if self._attempt is None else self._attempt.prefill_worker)
