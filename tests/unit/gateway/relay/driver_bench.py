"""A completion's machine with its driver and real sessions that no network carries, for the tests beside it."""

from dataclasses import dataclass
from typing import Any

from engine.types import PrefillTiming, RequestId, SequenceOutput, WorkerId
from engine.worker_types import TransferStats, WorkerRole
from gateway.relay.completion import CompletionMachine, CompletionState
from gateway.relay.driver import CompletionDriver
from gateway.relay.instructions import Fail, Finish, FromWorker, Ready, Started
from gateway.relay.output import CompletionOutput
from gateway.relay.request import CompletionRequest
from gateway.relay.response import Completion
from gateway.routing.prefill_gate import PrefillGate
from gateway.routing.router import AffinityLimits, Router
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import AbortRequested, Event, SessionLost
from gateway.workers.session import WorkerSession
from kvrelay.errors import EngineError, WorkerUnavailable
from kvrelay.v1 import handoff_pb2
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Prefill, Reserve
from kvrelay.wire.engine.events import Output, Reserved
from tests.unit.gateway.builders import OfflinePool, make_request

D, P, Q = WorkerId("d"), WorkerId("p"), WorkerId("q")
STATS = TransferStats(num_bytes=10, num_frames=1, total_ns=5, exposed_ns=2, transport="shm")
HANDLE = handoff_pb2.KvHandle(lease_id=7, epoch=1, ticket=b"secret", worker_id="d").SerializeToString()


@dataclass
class Delta:
    text: str = ""
    matched_stop: str | None = None


class NoText:
    matched_stop: str | None = None

    def push(self, token_id: int) -> Delta:
        return Delta()

    def flush(self) -> str:
        return ""


class Bench:
    """A completion that has been placed on `d`, with prefill workers `p` and `q`."""

    def __init__(
        self, max_attempts: int = 3, prefills: tuple[WorkerId, ...] = (P, Q), *, is_decode_full: bool = False
    ) -> None:
        self.pool = OfflinePool()
        self.decode = self.pool.add(D)
        if is_decode_full:
            fill(self.decode)
        self.prefills = {name: self.pool.add(name, WorkerRole.PREFILL) for name in prefills}
        engine_request = make_request(max_tokens=5)
        self.output = CompletionOutput(
            engine_request.sampling_params, prompt_tokens=40, text=NoText(), special_token_ids=frozenset()
        )
        request = CompletionRequest(engine_request, arrival=self.pool.clock.now())
        self.machine = CompletionMachine(request, self.output, max_attempts=max_attempts, local_prefill_max_tokens=16)
        self.gate = PrefillGate(1_000, lambda: 1)
        self.mailbox = Mailbox()
        self.driver = CompletionDriver(
            self.machine,
            request,
            router=Router(self.pool, AffinityLimits(capacity=0)),
            gate=self.gate,
            mailbox=self.mailbox,
            clock=self.pool.clock,
        )
        self.driver.tell(Started())
        self.driver.tell(Ready())

    def tell(self, source: WorkerId, event: Event) -> None:
        self.driver.tell(FromWorker(source, event))

    def reserved(self, attempt: int = 1, num_cached_tokens: int = 0) -> None:
        self.tell(D, Reserved(attempt, HANDLE, num_cached_tokens))

    def token(self, source: WorkerId, index: int, attempt: int = 1, finish: FinishReason | None = None) -> None:
        timing = PrefillTiming(3, 4) if index == 0 else None
        output = SequenceOutput(RequestId(1), index, (index,), finish_reason=finish, prefill_timing=timing)
        self.tell(source, Output(attempt, output))

    def lose(self, source: WorkerId) -> None:
        self.tell(source, SessionLost(WorkerUnavailable("gone")))

    def given_out(self) -> list[int]:
        """Let the client take what there is, and return all that it has got."""
        self.driver.next_chunk()
        return self.output.token_ids

    @property
    def is_restart_due(self) -> bool:
        return self.machine.state is CompletionState.RESTARTING

    @property
    def is_going_on(self) -> bool:
        return self.machine.state is CompletionState.RUNNING

    def failure(self) -> EngineError:
        """Return the error that it fails with, now that the client has got what came before."""
        self.driver.next_chunk()
        assert isinstance(self.driver.outcome, Fail)
        return self.driver.outcome.error

    def end(self) -> None:
        """End it as a client does that has enough of it."""
        self.driver.tell(AbortRequested())

    def completion(self) -> Completion:
        """End it, unless it has ended, and return what it came to."""
        while self.driver.next_chunk() is not None:
            pass
        self.end()
        while self.driver.next_chunk() is not None:
            pass
        assert isinstance(self.driver.outcome, Finish)
        return self.driver.outcome.completion


def fill(session: WorkerSession) -> None:
    """Let as many commands of another request wait as the session takes."""
    other = make_request(request_id=2)
    is_decode = session.info.role is WorkerRole.DECODE
    command = Reserve(other, 1, None) if is_decode else Prefill(other, 1, HANDLE, None)
    for _ in range(session._limits.max_queued_commands):
        session.send(command)


def kinds(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]
