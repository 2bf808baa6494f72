"""A completion's machine whose questions are answered at once, for the tests beside it."""

from dataclasses import dataclass
from typing import Any

from engine.types import RequestId, SequenceOutput, WorkerId
from engine.worker_types import TransferStats
from gateway.relay.completion import CompletionMachine
from gateway.relay.instructions import (
    AttemptEvent,
    ClientReady,
    FromWorker,
    Instruction,
    LookForOther,
    OtherKnown,
    Placed,
    PlaceDecode,
    PlacePrefill,
    Ready,
    Started,
)
from gateway.relay.output import CompletionOutput
from gateway.relay.request import CompletionRequest
from gateway.workers.messages import Event, SessionLost
from kvrelay.errors import (
    WorkerUnavailable,
)
from kvrelay.wire.engine.events import Output, Reserved
from tests.unit.gateway.builders import make_request

D, E, P, Q = WorkerId("d"), WorkerId("e"), WorkerId("p"), WorkerId("q")
STATS = TransferStats(num_bytes=10, num_frames=1, total_ns=5, exposed_ns=2, transport="shm")
LOST = SessionLost(WorkerUnavailable("gone"))
NOBODY: frozenset[WorkerId] = frozenset()


@dataclass
class Delta:
    text: str = ""
    matched_stop: str | None = None


class HeldText:
    """Shows nothing before the end."""

    matched_stop: str | None = None

    def push(self, token_id: int) -> Delta:
        return Delta()

    def flush(self) -> str:
        return "held"


class Bench:
    """A machine whose questions are answered at once: `d` or `e` decodes, `p` or `q` prefills."""

    def __init__(self, max_attempts: int = 3, num_prompt_tokens: int = 40, *, has_other: bool = True) -> None:
        self.request = make_request(num_prompt_tokens, max_tokens=5)
        params = self.request.sampling_params
        self.output = CompletionOutput(params, prompt_tokens=40, text=HeldText(), special_token_ids=frozenset())
        self.machine = CompletionMachine(
            CompletionRequest(self.request, arrival=100.0, deadline=900.0),
            self.output,
            max_attempts=max_attempts,
            local_prefill_max_tokens=16,
        )
        self.has_other = has_other
        self.now = 100.0

    def tell(self, event: AttemptEvent) -> list[Instruction]:
        """Tell the machine of an event; returns all instructions that follow, those after answers included."""
        instructions = list(self.machine.handle(event, self.now))
        for instruction in list(instructions):
            match instruction:
                case PlaceDecode(_, avoid):
                    instructions += self.tell(Placed(E if D in avoid else D))
                case PlacePrefill(_, _, avoid):
                    instructions += self.tell(Placed(Q if P in avoid else P))
                case LookForOther(trouble):
                    instructions += self.tell(OtherKnown(trouble, self.has_other))
                case _:
                    pass
        return instructions

    def hear(self, worker_id: WorkerId, event: Event) -> list[Instruction]:
        return self.tell(FromWorker(worker_id, event))

    def begin(self) -> None:
        """Go on until a decode worker was asked for blocks."""
        self.tell(Started())
        self.tell(Ready())

    def prefill(self, worker_id: WorkerId = D, attempt: int = 1) -> None:
        """Go on until a prefill worker was asked to compute the prompt."""
        self.hear(worker_id, Reserved(attempt, b"handle", 0))

    def token(self, worker_id: WorkerId, index: int, attempt: int = 1, **fields: Any) -> list[Instruction]:
        return self.hear(worker_id, Output(attempt, SequenceOutput(RequestId(1), index, (10 + index,), **fields)))

    def take(self) -> list[Instruction]:
        return self.tell(ClientReady())
