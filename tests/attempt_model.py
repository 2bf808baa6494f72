"""The world around one completion's machine: it stands where `driver.py` and `relay.py` of `gateway/relay/` stand.

Carries the instructions out by hand over the workers of `attempt_workers.py`, and insists on what must hold after each
event and at each instruction. Used by tests/property/test_attempt_machine.py, which decides what happens when.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.types import EngineRequest, SamplingParams, WorkerId
from gateway.relay.completion import CompletionMachine, CompletionState
from gateway.relay.instructions import (
    AttemptEvent,
    BeginAttempt,
    ClientReady,
    Emit,
    Fail,
    Finish,
    FromWorker,
    Instruction,
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
    Started,
)
from gateway.relay.output import CompletionOutput, TextDecoder
from gateway.relay.request import CompletionRequest
from gateway.workers.messages import AbortRequested, Event, Interrupted, SessionLost, Stalled
from kvrelay.errors import CapacityError, EngineError, LeaseExpired, StepFailed, WorkerUnavailable
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Command, Prefill, PrefillLocally, Reserve, Supersede
from kvrelay.wire.engine.events import Committed, Exported, Failed, Output, Reserved
from tests.attempt_workers import REQUEST_ID, Fleet, Worker

NUM_PROMPT_TOKENS = 40
LOCAL_MAX_TOKENS = 16
DEADLINE = 99.0


@dataclass
class Known:
    """What the machine was told of the reservation that it has now."""

    first_index: int = 0
    asked: int | None = None
    """The attempt number that decode was asked to grant."""
    granted: int | None = None
    is_committed: bool = False
    is_exported: bool = False
    has_first_token: bool = False
    has_decoded: bool = False

    def is_stale(self, event: Event) -> bool:
        """Whether the event names an attempt that is of no importance any more."""
        if not isinstance(event, Reserved | Committed | Exported | Output | Failed):
            return False
        return event.attempt not in (0, self.asked, self.granted)


class World:
    """Sessions, gate and client of one completion.

    Invariants, checked at every step: who was placed is let go of exactly once, and hears nothing afterwards; chunks
    hold the known tokens, each once and in order; attempts are within the budget; nothing follows the outcome.
    """

    def __init__(
        self, max_attempts: int, fleet: Fleet, *, max_tokens: int, expected: list[int], text: TextDecoder
    ) -> None:
        """Make a world in which nothing has happened.

        Args:
            max_attempts: The machine's budget.
            fleet: The workers.
            max_tokens: The request's limit.
            expected: The tokens that the client has to get.
            text: Their text.
        """
        params = SamplingParams(max_tokens=max_tokens)
        self.request = EngineRequest(REQUEST_ID, tuple(range(NUM_PROMPT_TOKENS)), params, NUM_PROMPT_TOKENS)
        self.max_attempts = max_attempts
        self.fleet = fleet
        self.expected = expected
        self.machine = CompletionMachine(
            CompletionRequest(self.request, deadline=DEADLINE),
            CompletionOutput(params, prompt_tokens=NUM_PROMPT_TOKENS, text=text, special_token_ids=frozenset()),
            max_attempts=max_attempts,
            local_prefill_max_tokens=LOCAL_MAX_TOKENS,
        )
        self.clock = 1.0
        self.box: list[tuple[WorkerId, Event]] = []
        self.held: dict[WorkerId, Worker] = {}
        """Workers that were placed and not let go of."""
        self.kept: WorkerId | None = None
        self.has_turn = False
        self.is_turn_due = self.is_client_busy = self.is_woken = False
        """Whether the gateway waits at the gate, the client has not taken its chunk, an event of the gateway came."""
        self.known = Known()
        self.emitted: list[int] = []
        self.attempts: list[int] = []
        """Numbers of the attempts that decode was asked for."""
        self.failed: set[WorkerId] = set()
        """Workers that must not be chosen again where there is another one."""
        self.num_broken_steps = 0
        self.has_fatal_fault = False
        """Whether something went wrong that may end the completion at once."""
        self.outcome: Finish | Fail | None = None

    # --- the driver's part --------------------------------------------------------------------------------------------

    def tell(self, event: AttemptEvent) -> None:
        """Tell the machine of an event and do what it asks for, as `CompletionDriver.tell` does."""
        events = deque([event])
        while events:
            event = events.popleft()
            self.clock += 0.001
            was_over = self.outcome is not None
            instructions = self.machine.handle(event, self.clock)
            assert not (was_over and instructions), "nothing follows the outcome"
            for instruction in instructions:
                assert self.outcome is None, "the outcome comes last"
                answer = self._carry_out(instruction)
                if answer is not None:
                    events.append(answer)
            if isinstance(event, OtherKnown):
                self._check_trouble(event)

    def _check_trouble(self, answer: OtherKnown) -> None:
        trouble = answer.trouble
        is_waited_for = trouble.may_pass and not answer.is_there
        assert (trouble.worker_id in self.held) is is_waited_for
        if isinstance(trouble.error, CapacityError) and not answer.is_there:
            assert self.machine.state is CompletionState.FAILING, "a full tier is asked again by the client"

    def _carry_out(self, instruction: Instruction) -> AttemptEvent | None:
        match instruction:
            case BeginAttempt(number, gate_tokens):
                self._check_nothing_held()
                assert not self.is_client_busy
                assert not self.attempts or number > self.attempts[-1]
                num_tokens = NUM_PROMPT_TOKENS + len(self.emitted)
                assert gate_tokens == num_tokens
                self.box.clear()
                self.known = Known(first_index=len(self.emitted))
                self.has_turn = self.is_turn_due = True
            case PlaceDecode(request, avoid):
                self._check_request(request)
                return self._place(avoid, is_decode=True)
            case PlacePrefill(request, num_tokens, avoid):
                self._check_request(request)
                assert num_tokens > LOCAL_MAX_TOKENS
                return self._place(avoid, is_decode=False)
            case LookForOther(trouble, _, avoid):
                assert trouble.worker_id in avoid
                return OtherKnown(trouble, bool(self.fleet.open_workers(is_decode=True) - avoid))
            case Send(worker_id, command):
                return self._send(self.held[worker_id], command)
            case KeepReservation(worker_id, is_kept):
                assert self.held[worker_id].is_decode
                self.kept = worker_id if is_kept else None
            case LetGo(worker_id, is_done):
                self._let_go(self.held.pop(worker_id), is_done=is_done)
            case LeaveGate():
                assert self.has_turn, "a turn is given back once"
                self.has_turn = False
            case Emit(chunk):
                assert not self.is_client_busy
                assert chunk.token_index == len(self.emitted)
                self.emitted += chunk.token_ids
                assert self.emitted == self.expected[: len(self.emitted)]
                self.is_client_busy = True
            case Finish() | Fail():
                self._check_nothing_held()
                self.outcome = instruction
        return None

    def _check_nothing_held(self) -> None:
        assert not self.held, "every worker was let go of"
        assert not self.has_turn, "the turn was given back"
        assert self.kept is None

    def _check_request(self, request: EngineRequest) -> None:
        num_resumed = self.known.first_index
        assert request.token_ids == (*self.request.token_ids, *self.emitted[:num_resumed])
        assert request.num_prompt_tokens == NUM_PROMPT_TOKENS
        assert request.is_suspect is (self.num_broken_steps > 0)
        assert self.num_broken_steps < 2, "who broke two steps is tried no more"

    def _place(self, avoid: frozenset[WorkerId], *, is_decode: bool) -> Placed | NotPlaced:
        assert avoid >= {worker_id for worker_id in self.failed if self.fleet.workers[worker_id].is_decode is is_decode}
        assert not any(worker.is_decode is is_decode for worker in self.held.values())
        candidates = self.fleet.open_workers(is_decode=is_decode)
        candidates = candidates - avoid or (candidates if is_decode else set())
        if not candidates:
            self.has_fatal_fault |= is_decode
            return NotPlaced(WorkerUnavailable("nobody is there"))
        chosen = min(candidates)
        self.held[chosen] = self.fleet.workers[chosen]
        return Placed(chosen)

    def _let_go(self, worker: Worker, *, is_done: bool) -> None:
        self.kept = None if self.kept == worker.worker_id else self.kept
        ends_itself = worker.job is None or worker.job.has_exported
        assert ends_itself or not is_done, "who still holds something must be told"
        assert is_done or not (worker.is_decode and self.known.has_decoded), "who has ended need not be told"
        worker.job = None
        worker.stream.clear()

    def _send(self, worker: Worker, command: Command) -> SendFailed | None:
        assert worker.is_decode is not isinstance(command, Prefill)
        match command:
            case Reserve(request, attempt, deadline):
                self._check_request(request)
                assert deadline == DEADLINE
                self._ask(attempt)
            case Supersede(_, attempt):
                assert self.kept == worker.worker_id
                self._ask(attempt)
            case PrefillLocally():
                assert self.kept is None
                assert not self.has_turn
            case Prefill(request, attempt, kv_handle, deadline):
                self._check_request(request)
                assert deadline == DEADLINE
                assert self.kept is not None, "the reservation is kept while its prefill waits"
                assert attempt == self.known.granted
                assert kv_handle == f"{self.kept}:{attempt}".encode()
                self.known.is_exported = False
        assert self.num_broken_steps < 2
        try:
            self.fleet.take(worker, command)
        except EngineError as error:
            self.has_fatal_fault |= isinstance(error, CapacityError)
            self.failed.add(worker.worker_id)
            return SendFailed(worker.worker_id, error)
        return None

    def _ask(self, attempt: int) -> None:
        assert attempt <= self.max_attempts
        assert not self.attempts or attempt > self.attempts[-1], "each attempt has a number of its own"
        self.attempts.append(attempt)
        self.known.asked = attempt

    # --- what workers say ---------------------------------------------------------------------------------------------

    def deliver(self, worker_id: WorkerId, event: Event) -> None:
        """Tell the machine what a worker said, and check that it took it for what it is."""
        worker, known = self.held.get(worker_id), self.known
        if known.is_stale(event) or (worker is None and not isinstance(event, Output)):
            assert not self.machine.handle(FromWorker(worker_id, event), self.clock), "nobody waits for this any more"
            return
        if worker is not None:
            self._note_failure(worker, event)
        # What the machine answers may already be about the next reservation.
        self._note(worker, event)
        was_held = set(self.held)
        self.tell(FromWorker(worker_id, event))
        match event:
            case Output() if known.has_first_token:
                assert not self.has_turn
            case Committed() | Exported():
                assert self.kept is None
            case SessionLost() | Failed():
                assert worker_id not in self.held
            case Stalled() if worker is not None and not worker.is_decode:
                assert worker_id not in self.held
            case Stalled() if self.machine.attempt == self.max_attempts:
                assert set(self.held) == was_held, "the last attempt is not given up for a worker that may come back"
            case _:
                pass
        if known.is_exported and known.has_first_token:
            assert all(worker.is_decode for worker in self.held.values()), "prefill has nothing more to say"

    def _note(self, worker: Worker | None, event: Event) -> None:
        known = self.known
        match event:
            case Reserved(attempt) if attempt == known.asked:
                known.granted, known.asked = attempt, None
            case Committed():
                known.is_committed, known.asked = True, None
            case Exported():
                known.is_exported = known.is_committed = True
            case Output(attempt, output) if output.finish_reason is not FinishReason.ABORT and attempt == known.granted:
                end = output.token_index + len(output.token_ids)
                known.has_first_token |= output.token_index <= known.first_index < end
                if worker is not None and worker.is_decode and output.finish_reason is not None:
                    known.has_decoded = True
            case _:
                pass

    def _note_failure(self, worker: Worker, event: Event) -> None:
        known = self.known
        is_needed = worker.is_decode or not (known.is_committed and known.has_first_token)
        if is_needed and isinstance(event, Failed | SessionLost):
            self.num_broken_steps += isinstance(event.error, StepFailed)
            if not isinstance(event.error, LeaseExpired):
                self.failed.add(worker.worker_id)

    # --- what can happen next -----------------------------------------------------------------------------------------

    def moves(self, slow_tier: str) -> list[Callable[[], None]]:
        """What could happen next if nothing goes wrong; a slow tier's part comes only where there is nothing else."""
        moves: list[Callable[[], None]] = []
        if self.outcome is not None:
            return moves
        if self.is_client_busy:
            moves.append(self.take_chunk)
        elif self.is_turn_due:
            moves.append(self.get_ready)
        elif self.box or self.is_woken:
            moves.append(self.pump)
        late: list[Callable[[], None]] = []
        for worker in self.fleet.workers.values():
            found = late if worker.worker_id[0] == slow_tier else moves
            if worker.stream:
                found.append(partial(self.arrive, worker))
            elif not worker.is_open:
                found.append(worker.reconnect)
            found += self.fleet.steps(worker)
        return moves or late

    def arrive(self, worker: Worker) -> None:
        """The gateway reads the next thing that a worker said; who was let go of is not listened to."""
        event = worker.stream.popleft()
        worker.history.append(event)
        if worker.worker_id in self.held:
            self.box.append((worker.worker_id, event))

    def start(self) -> None:
        """The gateway begins."""
        self.tell(Started())
        self.is_turn_due = True

    def get_ready(self) -> None:
        """The gate lets the prompt pass."""
        self.is_turn_due = False
        self.tell(Ready())
        self.tell(ClientReady())

    def pump(self) -> None:
        """The gateway looks at all that has come, then sends the client what follows, as `Relay._pump` does."""
        self.is_woken = False
        deliveries, self.box = self.box, []
        for worker_id, event in deliveries:
            self.deliver(worker_id, event)
        self.tell(ClientReady())

    def take_chunk(self) -> None:
        """The client takes its chunk; at an end the rest follows at once, as `Relay._give_out` has it."""
        self.is_client_busy = False
        if self.machine.is_ending:
            self.tell(ClientReady())

    def end(self, event: AbortRequested | Interrupted) -> None:
        """Somebody ends it: nobody holds anything from now on, even while the client is slow to read."""
        self.tell(event)
        self.is_woken = True
        self._check_nothing_held()
