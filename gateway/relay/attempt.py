"""One attempt at a completion as a state machine without input or output: a reservation, and who fills it.

`Attempt.handle` takes an event and returns instructions, both from `instructions.py`; `completion.py` looks at what the
attempt has come to. What follows a failure is decided by `recovery.py`; the tokens go to `output.py`.

    WAITING -> PLACING -> RESERVING -> GRANTED -> PREFILLING ---> COMMITTED -> DECODED
                              |         ^   |         |               ^           ^
                              |         |   |         v               |           |
                              |         +---|---- SUPERSEDING --------+           |
                              |             |         |    the commit was first   |
                              +-------------+---------+--> LOCAL -----------------+
    from each of them: LOST, FAILED, CLOSED
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.types import PrefillTiming, WorkerId
from gateway.relay.instructions import (
    AttemptEvent,
    BeginAttempt,
    FromWorker,
    Instructions,
    KeepReservation,
    LeaveGate,
    LetGo,
    LookForOther,
    NotPlaced,
    OtherKnown,
    Placed,
    PlaceDecode,
    PlacePrefill,
    Ready,
    Send,
    SendFailed,
    Trouble,
)
from gateway.relay.output import CompletionOutput
from gateway.relay.recovery import Recovery, Remedy
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Timings, to_ns
from gateway.workers.messages import Event, SessionLost, Stalled
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Prefill, PrefillLocally, Reserve, Supersede
from kvrelay.wire.engine.events import Committed, Exported, Failed, Output, Reserved


class AttemptState(StrEnum):
    """Where an attempt stands."""

    WAITING = "waiting"
    """It waits until it can be placed: at the gate, or for a decode worker."""
    PLACING = "placing"
    """A decode worker is being chosen."""
    RESERVING = "reserving"
    """Decode was asked for blocks."""
    GRANTED = "granted"
    """They are reserved; a prefill worker to fill them is being chosen."""
    PREFILLING = "prefilling"
    """A prefill worker fills them."""
    SUPERSEDING = "superseding"
    """It failed, and decode was asked to fence it. A commit may have been first."""
    LOCAL = "local"
    """Decode computes the prompt itself, then generates."""
    COMMITTED = "committed"
    """Decode has taken the KV over and generates. The first token may still be on its way from prefill."""
    DECODED = "decoded"
    """Decode has sent its last token and holds nothing any more."""
    LOST = "lost"
    """Another attempt should go on behind the tokens that came."""
    FAILED = "failed"
    """The request cannot go on at all."""
    CLOSED = "closed"
    """It is not needed any more."""


_ASKED = (AttemptState.RESERVING, AttemptState.SUPERSEDING)
"""States that wait for Reserved. In others it is void: it answers a Supersede that a commit overtook."""
_TAKEN_OVER = (AttemptState.COMMITTED, AttemptState.DECODED)


@dataclass(frozen=True, slots=True)
class _Writer:
    """The prefill worker that fills the reservation."""

    worker_id: WorkerId
    is_exported: bool = False
    """Whether it was told that decode has taken over; then only its first token is still missing."""


class Attempt:
    """One attempt, from the wait for its turn on.

    Invariants: `_decode` and `_writer` are exactly the workers that were placed and not let go of, none in LOST, FAILED
    and CLOSED; tokens are taken only from the attempt number that the reservation is granted to.
    """

    def __init__(
        self,
        request: CompletionRequest,
        output: CompletionOutput,
        timings: Timings,
        recovery: Recovery,
        *,
        local_prefill_max_tokens: int,
    ) -> None:
        prompt = request.engine_request
        self._request = request
        self._output = output
        self._timings = timings
        self._recovery = recovery
        self._local_prefill_max_tokens = local_prefill_max_tokens
        self._id = prompt.request_id
        self._engine_request = replace(
            prompt, token_ids=prompt.token_ids + tuple(output.token_ids), is_suspect=recovery.is_suspect
        )
        """The prompt, followed by the tokens of earlier attempts."""
        self._first_index = len(output.token_ids)
        """Index of the first token that this attempt generates."""
        self._has_turn = False
        """Whether there is a turn at the gate to give back."""
        self._decode: WorkerId | None = None
        self._writer: _Writer | None = None
        self._grant: Reserved | None = None
        self._prefill_asked_at = 0.0
        self.state = AttemptState.WAITING
        self.error: EngineError | None = None
        """Why it is LOST or FAILED."""
        self.decode_worker: WorkerId | None = None
        self.prefill_worker: WorkerId | None = None
        """Who sampled the first token; None until it came."""

    def begin(self) -> BeginAttempt:
        """Return the first thing to be done."""
        num_tokens = len(self._engine_request.token_ids)
        self._has_turn = num_tokens > self._local_prefill_max_tokens
        return BeginAttempt(self._recovery.attempt, num_tokens if self._has_turn else None)

    def handle(self, event: AttemptEvent, now: float) -> Instructions:
        """Take one event, at clock second `now`, and return what is to be done, in order."""
        match event:
            case FromWorker():
                return self._on_worker(event.worker_id, event.event, now)
            case Ready() if self.state is AttemptState.WAITING:
                return self._place_decode()
            case Placed(worker_id):
                return self._on_placed(worker_id)
            case NotPlaced(error) if self.state is AttemptState.PLACING:
                return self._leave(AttemptState.FAILED, error)
            case NotPlaced() if self.state is AttemptState.GRANTED:
                return self._prefill_locally()
            case OtherKnown(trouble, is_there) if trouble.worker_id == self._decode:
                return self._on_trouble(trouble, has_other=is_there)
            case SendFailed(worker_id, error):
                return self._on_worker(worker_id, Failed(self._recovery.attempt, error), now)
            case _:
                return ()

    def close(self) -> Instructions:
        """Let go of everything: the completion has ended, or it is not wanted any more."""
        return self._leave(AttemptState.CLOSED)

    # --- what workers say ---------------------------------------------------------------------------------------------

    def _on_worker(self, worker_id: WorkerId, event: Event, now: float) -> Instructions:
        if isinstance(event, Output):
            # Tokens that are here count even when the worker that sent them was lost right after.
            return self._on_output(worker_id, event, now)
        if worker_id == self._decode:
            return self._on_decode(worker_id, event, now)
        if self._writer is not None and worker_id == self._writer.worker_id:
            return self._on_prefill(self._writer, event)
        return ()

    def _on_output(self, worker_id: WorkerId, event: Output, now: float) -> Instructions:
        output = event.output
        if output.finish_reason is FinishReason.ABORT:
            # Nobody here asked for it: the worker gave the request up.
            error = WorkerUnavailable(f"worker {worker_id} ended the request itself")
            return self._on_worker(worker_id, Failed(event.attempt, error), now)
        if event.attempt != self._granted:
            return ()
        self._output.note_cached(output.num_cached_tokens)
        try:
            self._output.add(output)
        except EngineError as error:
            return self._leave(AttemptState.FAILED, error)
        if worker_id == self._decode and output.finish_reason is not None:
            self.state = AttemptState.DECODED
        if output.token_index <= self._first_index < output.token_index + len(output.token_ids):
            return self._on_first_token(worker_id, output.prefill_timing)
        return ()

    def _on_first_token(self, worker_id: WorkerId, timing: PrefillTiming | None) -> Instructions:
        self.prefill_worker = self.prefill_worker or worker_id
        if timing is not None and self._first_index == 0:
            self._timings.queue_ns = to_ns(self._prefill_asked_at - self._request.arrival) + timing.queue_ns
            self._timings.prefill_ns = timing.prefill_ns
        if self._writer is not None and self._writer.is_exported:
            return self._let_go_of_writer(is_done=True)
        return self._leave_gate()

    def _on_decode(self, decode: WorkerId, event: Event, now: float) -> Instructions:
        match event:
            case Reserved(attempt) if attempt == self._recovery.attempt and self.state in _ASKED:
                return self._on_reserved(event, now)
            case Committed(attempt) if attempt == self._granted:
                return self._on_committed(event)
            case Failed(attempt, error):
                # An error that answers a Supersede is void once the commit is known; 0 stands for any attempt.
                others = () if self.state in _TAKEN_OVER else (0, self._recovery.attempt)
                return self._ask(Trouble(decode, error)) if attempt in (self._granted, *others) else ()
            case SessionLost(error):
                return self._ask(Trouble(decode, error, is_gone=True))
            case Stalled(error) if self._recovery.has_attempts_left:
                return self._ask(Trouble(decode, error, may_pass=True))
            case _:
                return ()

    def _on_reserved(self, granted: Reserved, now: float) -> Instructions:
        """Have the prompt computed: by a prefill worker if that is worth it and there is one, else by decode itself."""
        self._grant = granted
        self._output.note_cached(granted.num_cached_tokens)
        self._engine_request = replace(self._engine_request, is_suspect=self._recovery.is_suspect)
        self._prefill_asked_at = now
        num_uncached_tokens = len(self._engine_request.token_ids) - granted.num_cached_tokens
        if num_uncached_tokens <= self._local_prefill_max_tokens:
            return self._prefill_locally()
        self.state = AttemptState.GRANTED
        return (PlacePrefill(self._engine_request, num_uncached_tokens, frozenset(self._recovery.failed_prefill)),)

    def _on_committed(self, committed: Committed) -> Instructions:
        transfer = committed.transfer
        self._timings.transfer_ns, self._timings.transfer_bytes = transfer.total_ns, transfer.num_bytes
        self._timings.transfer_exposed_ns = self._timings.transfer_exposed_ns or transfer.exposed_ns
        self._timings.transport = transfer.transport
        taken_over = self._taken_over()
        if self._writer is None and not self._has_first_token():
            # The prefill worker was lost, but its hand-off had won. Only its first token is missing, and nobody else
            # can tell it.
            state = AttemptState.LOST if self._recovery.has_attempts_left else AttemptState.FAILED
            error = WorkerUnavailable("the first token was lost with its prefill worker")
            return (*taken_over, *self._leave(state, error))
        return taken_over

    def _taken_over(self) -> Instructions:
        if self._decode is None or self.state not in (AttemptState.PREFILLING, AttemptState.SUPERSEDING):
            return ()
        self.state = AttemptState.COMMITTED
        return (KeepReservation(self._decode, is_kept=False),)

    def _on_prefill(self, writer: _Writer, event: Event) -> Instructions:
        match event:
            case Exported(attempt, transfer) if attempt == self._granted:
                # Prefill knows best when its compute ended.
                self._timings.transfer_exposed_ns = transfer.exposed_ns or self._timings.transfer_exposed_ns
                self._writer = replace(writer, is_exported=True)
                taken_over = self._taken_over()
                return (*taken_over, *self._let_go_of_writer(is_done=True)) if self._has_first_token() else taken_over
            case Failed(attempt, error) if attempt == self._granted:
                return self._prefill_failed(writer, error)
            case SessionLost(error) | Stalled(error):
                return self._prefill_failed(writer, error)
            case _:
                return ()

    # --- getting to the first token -----------------------------------------------------------------------------------

    def _place_decode(self) -> Instructions:
        self.state = AttemptState.PLACING
        return (PlaceDecode(self._engine_request, frozenset(self._recovery.failed_decode)),)

    def _on_placed(self, worker_id: WorkerId) -> Instructions:
        deadline = self._request.deadline
        if self.state is AttemptState.PLACING:
            self.state = AttemptState.RESERVING
            self._decode = self.decode_worker = worker_id
            return (Send(worker_id, Reserve(self._engine_request, self._recovery.attempt, deadline)),)
        if self.state is AttemptState.GRANTED and self._decode is not None and self._grant is not None:
            self.state = AttemptState.PREFILLING
            self._writer = _Writer(worker_id)
            prefill = Prefill(self._engine_request, self._grant.attempt, self._grant.kv_handle, deadline)
            return (KeepReservation(self._decode, is_kept=True), Send(worker_id, prefill))
        return (LetGo(worker_id, is_done=True),)  # nobody needs it any more

    def _prefill_locally(self) -> Instructions:
        if self._decode is None:
            return ()
        self.state = AttemptState.LOCAL
        # It may have been kept for a prefill worker that failed.
        keep = KeepReservation(self._decode, is_kept=False)
        return (*self._leave_gate(), keep, Send(self._decode, PrefillLocally(self._id)))

    # --- failures -----------------------------------------------------------------------------------------------------

    def _prefill_failed(self, writer: _Writer, error: EngineError) -> Instructions:
        remedy = self._recovery.after_prefill_failure(
            error,
            writer.worker_id,
            is_committed=self.state in _TAKEN_OVER,
            has_first_token=self._has_first_token(),
        )
        instructions = self._let_go_of_writer(is_done=False)
        if remedy is Remedy.SUPERSEDE and self._decode is not None:
            self.state = AttemptState.SUPERSEDING
            return (*instructions, Send(self._decode, Supersede(self._id, self._recovery.next_attempt())))
        if remedy is Remedy.RESTART:
            return (*instructions, *self._leave(AttemptState.LOST, error))
        if remedy is Remedy.GIVE_UP:
            return (*instructions, *self._leave(AttemptState.FAILED, error))
        return instructions

    def _ask(self, trouble: Trouble) -> Instructions:
        avoid = frozenset({*self._recovery.failed_decode, trouble.worker_id})
        return (LookForOther(trouble, self._engine_request, avoid),)

    def _on_trouble(self, trouble: Trouble, *, has_other: bool) -> Instructions:
        if trouble.may_pass and not has_other:
            return ()
        remedy = self._recovery.after_decode_failure(
            trouble.error,
            trouble.worker_id,
            has_alternative=has_other,
            prefill_worker=None if self._writer is None else self._writer.worker_id,
        )
        instructions = self._let_go_of_decode(is_gone=trouble.is_gone)
        state = AttemptState.LOST if remedy is Remedy.RESTART else AttemptState.FAILED
        return (*instructions, *self._leave(state, trouble.error))

    # --- letting go ---------------------------------------------------------------------------------------------------

    def _leave(self, state: AttemptState, error: EngineError | None = None) -> Instructions:
        # After the commit prefill only waits to hear of it, and ends by itself.
        is_prefill_done = self._has_first_token() and self.state in _TAKEN_OVER
        instructions = (
            *self._let_go_of_writer(is_done=is_prefill_done),
            *self._let_go_of_decode(),
            *self._leave_gate(),
        )
        self.state, self.error = state, error
        return instructions

    def _let_go_of_writer(self, *, is_done: bool) -> Instructions:
        writer, self._writer = self._writer, None
        return () if writer is None else (*self._leave_gate(), LetGo(writer.worker_id, is_done))

    def _let_go_of_decode(self, *, is_gone: bool = False) -> Instructions:
        worker_id, self._decode = self._decode, None
        is_done = is_gone or self.state is AttemptState.DECODED
        return () if worker_id is None else (LetGo(worker_id, is_done),)

    def _leave_gate(self) -> Instructions:
        had_turn, self._has_turn = self._has_turn, False
        return (LeaveGate(),) if had_turn else ()

    @property
    def _granted(self) -> int | None:
        """The attempt number that the reservation is granted to."""
        return None if self._grant is None else self._grant.attempt

    def _has_first_token(self) -> bool:
        """Whether the first token of this attempt has come, from whomever."""
        return self._output.has_token(self._first_index)
