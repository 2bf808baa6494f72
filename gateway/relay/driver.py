"""The hands of the machine in `completion.py`: carries its instructions out over the workers' sessions.

Owns the sessions that one completion is attached to, and its turn at the gate. Never waits: it keeps what somebody has
to wait for (a turn, a chunk for the client, the outcome) for `relay.py`. Decides nothing.
"""

from collections.abc import Callable
from dataclasses import replace

from engine.clock import Clock
from engine.types import WorkerId
from gateway.relay.completion import CompletionMachine
from gateway.relay.instructions import (
    AttemptEvent,
    BeginAttempt,
    ClientReady,
    Emit,
    Fail,
    Finish,
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
    Send,
    SendFailed,
)
from gateway.relay.request import CompletionRequest
from gateway.relay.response import TokenChunk
from gateway.routing.prefill_gate import PrefillGate, Turn
from gateway.routing.router import Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.session import WorkerSession
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.serving.telemetry import traceparent
from kvrelay.wire.engine.commands import Prefill, RequestCommand, Reserve


class CompletionDriver:
    """Tells one completion's machine what happens, and does what it asks for. One event loop.

    Invariant: the request is attached to exactly `_sessions`.
    """

    def __init__(
        self,
        machine: CompletionMachine,
        request: CompletionRequest,
        *,
        router: Router,
        gate: PrefillGate,
        mailbox: Mailbox,
        clock: Clock,
    ) -> None:
        self._machine = machine
        self._request = request
        self._id = request.engine_request.request_id
        self._router = router
        self._gate = gate
        self._mailbox = mailbox
        self._clock = clock
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._chunk: TokenChunk | None = None
        self.turn: Turn | None = None
        """The attempt's place at the gate; None: it needs none."""
        self.outcome: Finish | Fail | None = None
        """How the completion ended; None: it goes on."""

    def tell(self, event: AttemptEvent) -> None:
        """Tell the machine of an event, and do what follows from it."""
        instructions = self._machine.handle(event, self._clock.now())
        answers = [self._carry_out(instruction) for instruction in instructions]
        for answer in answers:
            if answer is not None:
                self.tell(answer)

    def next_chunk(self) -> TokenChunk | None:
        """Return what the client is to get now; None: nothing, and what was due once it had everything is done."""
        self.tell(ClientReady())
        chunk, self._chunk = self._chunk, None
        return chunk

    def _carry_out(self, instruction: Instruction) -> AttemptEvent | None:
        """Do one thing; returns what the machine is to hear of it."""
        match instruction:
            case BeginAttempt():
                self._begin(instruction)
            case PlaceDecode(request, avoid):
                num_tokens = len(request.token_ids)
                return self._attach(lambda: self._router.place(request, avoid=avoid), num_tokens)
            case PlacePrefill(request, num_tokens, avoid):
                return self._attach(lambda: self._router.place_prefill(request, avoid=avoid), num_tokens)
            case LookForOther(trouble, request, avoid):
                return OtherKnown(trouble, self._router.has_decode_besides(request, avoid))
            case Send(worker_id, command):
                return self._send(worker_id, command)
            case KeepReservation(worker_id, is_kept):
                self._sessions[worker_id].keep_reservation(self._id, is_kept=is_kept)
            case LetGo(worker_id, is_done):
                session = self._sessions.pop(worker_id)
                if not is_done:
                    session.abort(self._id)
                session.detach(self._id)
            case LeaveGate():
                if self.turn is not None:
                    self.turn.leave()
            case Emit(chunk):
                self._chunk = chunk
            case Finish() | Fail():
                self.outcome = instruction
        return None

    def _begin(self, attempt: BeginAttempt) -> None:
        # No session knows the request now: what is still in the box is of the attempt before.
        self._mailbox.drop_worker_events()
        self.turn = None
        if attempt.gate_tokens is not None:
            self.turn = self._gate.enter(
                attempt.gate_tokens,
                priority=self._request.engine_request.priority,
                deadline=self._request.deadline,
                is_resumed=attempt.number > 1,
            )

    def _attach(self, choose: Callable[[], WorkerSession | None], num_tokens: int) -> Placed | NotPlaced:
        try:
            session = choose()
            if session is None:
                raise WorkerUnavailable("no worker could take the request")
            session.attach(self._id, self._mailbox, num_tokens)
        except EngineError as error:
            return NotPlaced(error)
        self._sessions[session.info.worker_id] = session
        return Placed(session.info.worker_id)

    def _send(self, worker_id: WorkerId, command: RequestCommand) -> SendFailed | None:
        if isinstance(command, Reserve | Prefill):
            command = replace(command, traceparent=traceparent())
        try:
            self._sessions[worker_id].send(command)
        except EngineError as error:
            return SendFailed(worker_id, error)
        return None
