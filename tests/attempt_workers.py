"""Workers that generate known tokens for one request, and can fail at any moment. No engine, no network.

What they say waits in `Worker.stream` until somebody reads it. Used by `attempt_model.py`, which reads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.types import PrefillTiming, RequestId, SequenceOutput, WorkerId
from engine.worker_types import TransferStats
from gateway.workers.messages import Event, SessionLost
from kvrelay.errors import CapacityError, EngineError, LeaseUnknown, PeerUnavailable, StaleEpoch, WorkerUnavailable
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Command, Prefill, PrefillLocally, Reserve, Supersede
from kvrelay.wire.engine.events import Committed, Exported, Failed, Output, Reserved

REQUEST_ID = RequestId(1)
STATS = TransferStats(num_bytes=10, num_frames=1, total_ns=5, exposed_ns=2, transport="shm")


def token_at(index: int) -> int:
    """The token that every worker generates at `index`."""
    return 100 + 7 * index % 23


@dataclass
class Job:
    """What a worker holds for the request."""

    attempt: int
    next_index: int
    """Index of the next token it generates."""
    phase: str
    """decode: queued, reserved, running. prefill: computing."""
    handle: str = ""
    """prefill: whose reservation it fills, for which attempt."""
    has_sampled: bool = False
    has_exported: bool = False


@dataclass
class Worker:
    """One worker and the gateway's session to it."""

    worker_id: WorkerId
    is_decode: bool
    job: Job | None = None
    stream: deque[Event] = field(default_factory=deque)
    """Said, and not read by the gateway yet."""
    history: list[Event] = field(default_factory=list)
    """Read."""
    is_open: bool = True
    num_refusals: int = 0
    """Commands that it will not read."""

    def say(self, event: Event) -> None:
        """Send the gateway an event."""
        self.stream.append(event)

    def end_job(self, error: EngineError) -> None:
        """Fail the request."""
        if self.job is not None:
            self.say(Failed(self.job.attempt, error))
            self.job = None

    def give_up(self) -> None:
        """End the request without being asked to."""
        if self.job is not None:
            output = SequenceOutput(REQUEST_ID, self.job.next_index, (), finish_reason=FinishReason.ABORT)
            self.say(Output(self.job.attempt, output))
            self.job = None

    def lose_session(self, num_kept: int) -> None:
        """What it holds is freed, and only `num_kept` of the things that it said still arrive."""
        if self.is_open:
            self.is_open, self.job = False, None
            self.stream = deque(list(self.stream)[:num_kept])
            self.say(SessionLost(WorkerUnavailable("the session ended")))

    def reconnect(self) -> None:
        """Open the session again."""
        self.is_open = True


class Fleet:
    """All workers.

    Args:
        names: Their ids; decode's begin with `d`.
        num_prompt_tokens: Tokens of the prompt.
        num_tokens: Tokens after which they end the request.
        num_cached_tokens: Prompt tokens that decode's prefix cache holds.
    """

    def __init__(self, names: Sequence[str], num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = num_tokens
        self._num_cached_tokens = num_cached_tokens
        self.workers = {WorkerId(name): Worker(WorkerId(name), name.startswith("d")) for name in names}

    def open_workers(self, *, is_decode: bool) -> set[WorkerId]:
        """Return a tier's workers whose session is open."""
        workers = self.workers.values()
        return {worker.worker_id for worker in workers if worker.is_open and worker.is_decode is is_decode}

    def take(self, worker: Worker, command: Command) -> None:
        """Let a worker have a command.

        Raises:
            EngineError: It does not get it.
        """
        if not worker.is_open:
            raise WorkerUnavailable("no session")
        if worker.num_refusals:
            worker.num_refusals -= 1
            raise CapacityError("it does not read")
        match command:
            case Reserve(request, attempt):
                assert worker.job is None, "an earlier attempt was let go of before"
                worker.job = Job(attempt, len(request.token_ids) - self._num_prompt_tokens, "queued")
            case Prefill(request, attempt, kv_handle):
                next_index = len(request.token_ids) - self._num_prompt_tokens
                worker.job = Job(attempt, next_index, "computing", handle=kv_handle.decode())
            case Supersede(_, attempt):
                if worker.job is None or worker.job.phase != "reserved":
                    worker.say(Failed(attempt, LeaseUnknown("it is not reserved")))
                else:
                    worker.job.attempt = attempt
                    self._grant(worker, worker.job)
            case PrefillLocally():
                if worker.job is None or worker.job.phase != "reserved":
                    worker.say(Failed(0, LeaseUnknown("it is not reserved")))
                else:
                    worker.job.phase = "running"

    def steps(self, worker: Worker) -> list[Callable[[], None]]:
        """What a worker could do next."""
        job = worker.job
        if job is None:
            return []
        if job.phase == "queued":
            return [partial(self._grant, worker, job)]
        if job.phase == "running":
            return [partial(self._generate, worker, job, num_tokens) for num_tokens in (1, 2)]
        if job.phase == "computing":
            steps = ((self._sample, job.has_sampled), (self._export, job.has_exported))
            return [partial(step, worker, job) for step, is_done in steps if not is_done]
        return []

    def _grant(self, worker: Worker, job: Job) -> None:
        """Decode reserves blocks, or lets another writer have them."""
        job.phase = "reserved"
        worker.say(Reserved(job.attempt, f"{worker.worker_id}:{job.attempt}".encode(), self._num_cached_tokens))

    def _generate(self, worker: Worker, job: Job, num_tokens: int) -> None:
        """Decode sends its next tokens, and perhaps its end."""
        first, job.next_index = job.next_index, min(job.next_index + num_tokens, self._num_tokens)
        is_end = job.next_index == self._num_tokens
        worker.job = None if is_end else job
        tokens = tuple(token_at(index) for index in range(first, job.next_index))
        finish = FinishReason.STOP if is_end else None
        worker.say(Output(job.attempt, SequenceOutput(REQUEST_ID, first, tokens, finish_reason=finish)))

    def _sample(self, worker: Worker, job: Job) -> None:
        """Prefill sends the first token."""
        job.has_sampled = True
        index = job.next_index
        output = SequenceOutput(
            REQUEST_ID,
            index,
            (token_at(index),),
            finish_reason=FinishReason.STOP if index + 1 == self._num_tokens else None,
            prefill_timing=PrefillTiming(3, 4),
        )
        worker.say(Output(job.attempt, output))
        worker.job = None if job.has_exported else job

    def _export(self, worker: Worker, job: Job) -> None:
        """Prefill commits its KV to decode, and is told that decode has taken over."""
        if self._commit(worker, job):
            job.has_exported = True
            worker.say(Exported(job.attempt, STATS))
            worker.job = None if job.has_sampled else job

    def lose_acknowledgement(self, worker: Worker, *, is_token_sent: bool) -> None:
        """Prefill commits its KV to decode, but does not hear of it, perhaps before the first token was sent."""
        if worker.job is None or worker.job.phase != "computing" or worker.job.has_exported:
            return
        if is_token_sent and not worker.job.has_sampled:
            self._sample(worker, worker.job)
        if self._commit(worker, worker.job):
            worker.end_job(PeerUnavailable("nothing was heard of the commit"))

    def _commit(self, worker: Worker, job: Job) -> bool:
        """Let decode take the KV over unless the writer was fenced; returns whether it did."""
        name, _, attempt = job.handle.partition(":")
        decode = self.workers[WorkerId(name)]
        target = decode.job
        if target is None or target.phase != "reserved" or target.attempt != int(attempt):
            worker.end_job(StaleEpoch("fenced"))
            return False
        target.phase, target.next_index = "running", job.next_index + 1
        decode.say(Committed(target.attempt, STATS))
        if target.next_index == self._num_tokens:
            decode.job = None  # the request ended on prefill's token
        return True
