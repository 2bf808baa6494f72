"""A completion's attempts under any interleaving of what workers say, faults, aborts and deadlines.

One outcome, whatever happens; every worker let go of exactly once; each token once, in order, and the right one; never
more attempts than allowed. `tests/attempt_model.py` is the world around the machine and checks each instruction.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.types import PrefillTiming
from gateway.relay.instructions import ClientLeft, DeadlinePassed, Fail, Finish, FromWorker
from gateway.relay.response import Completion
from gateway.workers.messages import AbortRequested, Event, Interrupted, Stalled
from kvrelay.errors import (
    CapacityError,
    ChecksumMismatch,
    DeadlineExceeded,
    DeviceError,
    EngineError,
    InvalidRequest,
    LeaseExpired,
    RequestCancelled,
    StepFailed,
    WorkerUnavailable,
)
from kvrelay.values import FinishReason
from kvrelay.wire.engine.events import Output
from tests.attempt_model import NUM_PROMPT_TOKENS, World
from tests.attempt_workers import Fleet, Worker, token_at

MAX_MOVES = 600
PASSING = (
    WorkerUnavailable("draining"),
    LeaseExpired("too slow"),
    ChecksumMismatch("damaged"),
    DeviceError("broken"),
)
FATAL = (
    StepFailed("a step broke"),
    CapacityError("full"),
    InvalidRequest("field", "wrong"),
    EngineError("a defect"),
)
"""Errors that may end the request although attempts are left: the second of the first kind, where nobody else is."""
TIMING = PrefillTiming(queue_ns=9_999, prefill_ns=9_999)


class PlainText:
    """Text without meaning, that a stop string may end at some token."""

    def __init__(self, stop_index: int | None) -> None:
        self._stop_index = stop_index
        self._num_pushed = 0
        self.text = "."
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> "PlainText":
        self.matched_stop = "stop" if self._num_pushed == self._stop_index else None
        self._num_pushed += 1
        return self

    def flush(self) -> str:
        return "|"


@dataclass(frozen=True)
class Setting:
    """What is so before anything happens."""

    max_attempts: int
    num_tokens: int
    """Tokens after which workers end the request."""
    num_more: int
    """Tokens that it would be allowed beyond them."""
    stop_index: int | None
    """Index of the token whose text completes a stop string."""
    num_decode: int
    num_prefill: int
    num_cached_tokens: int
    slow_tier: str
    """`d` or `p`: these workers do and say something when nothing else can happen."""

    def world(self) -> World:
        stop_index = self.stop_index if self.stop_index is not None and self.stop_index < self.num_tokens else None
        names = (*(f"d{i}" for i in range(self.num_decode)), *(f"p{i}" for i in range(self.num_prefill)))
        num_expected = self.num_tokens if stop_index is None else stop_index + 1
        return World(
            self.max_attempts,
            Fleet(names, NUM_PROMPT_TOKENS, self.num_tokens, self.num_cached_tokens),
            max_tokens=self.num_tokens + self.num_more,
            expected=[token_at(index) for index in range(num_expected)],
            text=PlainText(stop_index),
        )


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a worker that is busy with the request."""

    gap: int
    """Moves since the fault before, at least: it strikes when somebody is busy."""
    kind: str
    number: int
    """Chooses the worker, and what is repeated."""
    error: EngineError


ANY_SETTING: dict[str, st.SearchStrategy[Any]] = {
    "max_attempts": st.integers(1, 6),
    "num_tokens": st.integers(1, 6),
    "num_more": st.integers(0, 1),
    "stop_index": st.none() | st.integers(0, 5),
    "num_decode": st.integers(1, 3),
    "num_prefill": st.sampled_from((2, 3, 2, 1, 0)),
    "num_cached_tokens": st.sampled_from((0, 0, 0, 8, 39)),
    "slow_tier": st.sampled_from(("", "d", "p")),
}
MOVES = st.lists(st.integers(0, 11), min_size=20, max_size=60)
"""Which of the things happens that could happen next."""
KINDS = ("lose", "fail", "fail", "lose_acknowledgement", "stall", "give_up", "repeat", "repeat_old", "refuse")
FAULT = st.builds(
    Fault,
    st.integers(0, 8),
    st.sampled_from(KINDS),
    st.integers(0, 5),
    st.sampled_from((*PASSING, *FATAL)) | st.just(FATAL[0]),
)
NO_END: dict[int, str] = {}
ENDS = st.just(NO_END) | st.dictionaries(
    st.integers(0, 40), st.sampled_from(("abort", "abort", "interrupt", "deadline", "leave")), max_size=2
)
"""By the number of the move before which they come."""


class Story:
    """What happens in one world, and what must have come of it."""

    def __init__(self, setting: Setting, faults: list[Fault], ends: dict[int, str]) -> None:
        self.world = setting.world()
        self.slow_tier = setting.slow_tier
        self.faults = deque(faults)
        self.gap = 0
        self.ends = ends
        self.num_moves = 0
        self.num_faults = 0
        self.interruption = WorkerUnavailable("the gateway stops")
        self.told: set[str] = set()
        """The ends that came before the outcome."""

    def move(self, choice: int) -> bool:
        """Let one thing happen, out of those that could; False: nothing could."""
        self.gap += 1
        busy = list(self.world.held.values())
        if busy and self.faults and self.gap > self.faults[0].gap:
            self.gap = 0
            fault = self.faults.popleft()
            self.strike(fault, busy[fault.number % len(busy)])
        if self.num_moves in self.ends:
            self.end(self.ends[self.num_moves])
        self.num_moves += 1
        moves = self.world.moves(self.slow_tier)
        if moves:
            moves[choice % len(moves)]()
        return bool(moves)

    def end(self, end: str) -> None:
        """Let somebody end it."""
        if self.world.outcome is None:
            self.told.add(end)
        match end:
            case "abort":
                self.world.end(AbortRequested())
            case "interrupt":
                self.world.end(Interrupted(self.interruption))
            case "deadline":
                self.world.tell(DeadlinePassed())
            case "leave":
                self.world.tell(ClientLeft())

    def strike(self, fault: Fault, victim: Worker) -> None:
        """Let something go wrong."""
        world = self.world
        self.num_faults += 1
        match fault.kind:
            case "lose":
                victim.lose_session(num_kept=fault.number // 2)
            case "fail":
                world.has_fatal_fault |= fault.error in FATAL
                victim.end_job(fault.error)
            case "lose_acknowledgement":
                for worker in world.held.values():
                    world.fleet.lose_acknowledgement(worker, is_token_sent=fault.number % 2 == 0)
            case "stall":
                victim.say(Stalled(WorkerUnavailable("it hangs")))
            case "give_up":
                victim.give_up()
            case "refuse":
                victim.num_refusals += 1
            case "repeat":
                # What names no attempt could be of an older one, and nobody would know.
                numbered = [event for event in victim.history if getattr(event, "attempt", 0) > 0]
                if numbered:
                    world.box.append((victim.worker_id, numbered[fault.number % len(numbered)]))
            case "repeat_old":
                self.num_faults -= 1
                self._repeat_old()

    def _repeat_old(self) -> None:
        """Let all that was said in older attempts come again: whatever it is, nobody listens."""
        world = self.world
        for worker in world.fleet.workers.values():
            for event in worker.history:
                if world.known.is_stale(event):
                    world.deliver(worker.worker_id, self._spoiled(event))

    def _spoiled(self, event: Event) -> Event:
        """Return an event that must not count, with what would be noticed if it did: wrong tokens up to the limit."""
        if not isinstance(event, Output):
            return event
        num_left = self.world.request.sampling_params.max_tokens - event.output.token_index
        return replace(event, output=replace(event.output, token_ids=(999,) * num_left, prefill_timing=TIMING))

    def check_outcome(self) -> None:
        """Check how it ended, and that nothing can change that or is left of it."""
        world = self.world
        match world.outcome:
            case Finish(completion):
                self._check_finish(completion)
            case Fail(error):
                self._check_failure(error)
            case None:
                raise AssertionError(f"it hangs in {world.machine.state}")
        assert not any(worker.job for worker in world.fleet.workers.values())
        # A fault costs two attempts at most: another writer, and a new start when the lost one's commit was first.
        assert world.machine.attempt <= min(world.max_attempts, 1 + 2 * self.num_faults)
        told = repr(world.outcome)
        for worker in world.fleet.workers.values():
            for event in worker.history:
                world.tell(FromWorker(worker.worker_id, self._spoiled(event)))
        for end in ("abort", "interrupt", "deadline", "leave"):
            self.end(end)
        assert repr(world.outcome) == told

    def _check_finish(self, completion: Completion) -> None:
        world = self.world
        assert completion.usage.completion_tokens == len(world.emitted)
        assert completion.num_attempts <= world.max_attempts
        if completion.ending.finish_reason is FinishReason.ABORT:
            assert "abort" in self.told
        else:
            assert world.emitted == world.expected
        assert not self.told & {"deadline", "leave"}

    def _check_failure(self, error: EngineError) -> None:
        if self.told & {"deadline", "leave"}:
            assert isinstance(error, DeadlineExceeded | RequestCancelled)
            return
        assert "abort" not in self.told or error is self.interruption, "an aborted completion has an end"
        if error is self.interruption:
            assert "interrupt" in self.told
        else:
            # A fault costs two attempts at most: another writer, and a new start when the lost one's commit was first.
            is_budget_spent = 1 + 2 * self.num_faults > self.world.max_attempts
            assert self.world.has_fatal_fault or is_budget_spent


def _play(setting: Setting, moves: list[int], faults: list[Fault], ends: dict[int, str]) -> None:
    story = Story(setting, faults, ends)
    if 0 in ends:
        story.end(ends[0])  # even before it has begun
    story.world.start()
    for move in moves:
        story.move(move)
    story.faults.clear()
    for number in range(MAX_MOVES):
        if not story.move(number):
            break
    story.check_outcome()


@settings(max_examples=1500, deadline=None)
@given(st.builds(Setting, **ANY_SETTING), MOVES, st.lists(FAULT, max_size=6), ENDS)
def test_any_interleaving_ends_in_one_outcome(
    setting: Setting, moves: list[int], faults: list[Fault], ends: dict[int, str]
) -> None:
    _play(setting, moves, faults, ends)


COMMIT_IS_LATE = {
    "num_prefill": st.integers(1, 3),
    "num_cached_tokens": st.just(0),
    "slow_tier": st.just("d"),
    "stop_index": st.none(),
}


@settings(max_examples=500, deadline=None)
@given(
    st.builds(Setting, **ANY_SETTING | COMMIT_IS_LATE),
    MOVES,
    st.lists(FAULT, max_size=3),
    st.integers(2, 8),
    st.integers(0, 1),
)
def test_commit_that_is_heard_of_after_its_writer_failed(
    setting: Setting, moves: list[int], faults: list[Fault], gap: int, number: int
) -> None:
    """Decode was asked for another epoch by then; the first token has come, or is lost with its writer."""
    _play(setting, moves, [Fault(gap, "lose_acknowledgement", number, PASSING[0]), *faults], {})
