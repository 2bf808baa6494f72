"""What the machines in `completion.py` and `attempt.py` are told and what they ask for: events in, instructions out.

Values only. Events of workers come as `gateway/workers/messages.py` has them, inside `FromWorker`. `driver.py` carries
instructions out, and answers those that ask a question before it tells anything else.
"""

from dataclasses import dataclass
from typing import TypeAlias

from engine.types import EngineRequest, WorkerId
from gateway.relay.response import Completion, TokenChunk
from gateway.workers.messages import AbortRequested, Event, Interrupted
from kvrelay.errors import EngineError
from kvrelay.wire.engine.commands import RequestCommand


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a decode worker may have to be left. What follows depends on whether there is another one."""

    worker_id: WorkerId
    error: EngineError
    is_gone: bool = False
    """Whether all that it did for the request is void."""
    may_pass: bool = False
    """Whether it may come back, so that it is worth leaving only for another one."""


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The completion may begin."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The wait that `BeginAttempt` asked for is over."""


@dataclass(frozen=True, slots=True)
class Placed:
    """This worker was chosen. What it says of the request arrives from now on, until `LetGo`."""

    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """No worker was chosen."""

    error: EngineError


@dataclass(frozen=True, slots=True)
class OtherKnown:
    """The answer to `LookForOther`."""

    trouble: Trouble
    is_there: bool


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A command did not leave: no session is open, or the worker does not read."""

    worker_id: WorkerId
    error: EngineError


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A worker said something of the request, or something befell its session."""

    worker_id: WorkerId
    event: Event


@dataclass(frozen=True, slots=True)
class ClientReady:
    """The client takes a chunk, and all that workers had sent was told before.

    Answered by one `Emit`; or, when nothing is left to give out, by what comes after it, if anything does.
    """


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The client stopped waiting."""


@dataclass(frozen=True, slots=True)
class ClientLeft:
    """Nobody is there who would take anything."""


AttemptEvent: TypeAlias = (
    Started
    | Ready
    | Placed
    | NotPlaced
    | OtherKnown
    | SendFailed
    | FromWorker
    | ClientReady
    | AbortRequested
    | Interrupted
    | DeadlinePassed
    | ClientLeft
)


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Wait until the attempt can be placed, then tell `Ready`. No session knows the request now."""

    number: int
    """1 = the first; later ones go to the front, and wait for a decode worker if none is there."""
    gate_tokens: int | None
    """Tokens to take a turn at the gate for, until `LeaveGate`; None: so few that no prefill worker is needed."""


@dataclass(frozen=True, slots=True)
class PlaceDecode:
    """Choose a decode worker, outside `avoid` if there is one; answer `Placed` or `NotPlaced`."""

    request: EngineRequest
    avoid: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class PlacePrefill:
    """Choose a prefill worker outside `avoid`; answer `Placed` or `NotPlaced`."""

    request: EngineRequest
    num_tokens: int
    """Tokens that it has to compute."""
    avoid: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class LookForOther:
    """Answer `OtherKnown`: whether a decode worker outside `avoid` could take the request now."""

    trouble: Trouble
    """Why it matters; comes back in the answer."""
    request: EngineRequest
    avoid: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command, with the trace context; answer `SendFailed` if it does not leave."""

    worker_id: WorkerId
    command: RequestCommand


@dataclass(frozen=True, slots=True)
class KeepReservation:
    """Renew the lease from now on, because its prefill waits elsewhere; or stop doing so."""

    worker_id: WorkerId
    is_kept: bool


@dataclass(frozen=True, slots=True)
class LetGo:
    """Forget the worker. Once for each that was placed, and last of what is said of it."""

    worker_id: WorkerId
    is_done: bool
    """Whether it holds nothing or ends by itself; otherwise it is told to free what it holds."""


@dataclass(frozen=True, slots=True)
class LeaveGate:
    """Give the turn at the gate back."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Send the client a chunk, then tell `ClientReady`."""

    chunk: TokenChunk


@dataclass(frozen=True, slots=True)
class Finish:
    """The outcome: the completion has ended, and the client has all of it."""

    completion: Completion


@dataclass(frozen=True, slots=True)
class Fail:
    """The outcome: it cannot go on."""

    error: EngineError


Instruction: TypeAlias = (
    BeginAttempt
    | PlaceDecode
    | PlacePrefill
    | LookForOther
    | Send
    | KeepReservation
    | LetGo
    | LeaveGate
    | Emit
    | Finish
    | Fail
)
Instructions: TypeAlias = tuple[Instruction, ...]
