"""The machine of one completion, event by event: which instructions follow, and when the outcome is told."""

from dataclasses import replace

import pytest

from engine.types import PrefillTiming, RequestId
from gateway.relay.instructions import (
    AttemptEvent,
    BeginAttempt,
    ClientLeft,
    DeadlinePassed,
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
    Placed,
    PlaceDecode,
    PlacePrefill,
    Ready,
    Send,
    SendFailed,
    Started,
    Trouble,
)
from gateway.workers.messages import AbortRequested, Interrupted
from kvrelay.errors import (
    CapacityError,
    DeadlineExceeded,
    EngineError,
    LeaseExpired,
    RequestCancelled,
    StepFailed,
    WorkerUnavailable,
)
from kvrelay.values import FinishReason
from kvrelay.wire.engine.commands import Prefill, PrefillLocally, Reserve, Supersede
from kvrelay.wire.engine.events import Committed, Exported, Failed, Reserved
from tests.unit.gateway.relay.machine_bench import LOST, NOBODY, STATS, Bench, D, E, P, Q


def emitted(instructions: list[Instruction]) -> list[int]:
    return [token_id for i in instructions if isinstance(i, Emit) for token_id in i.chunk.token_ids]


def outcome(instructions: list[Instruction]) -> Finish | Fail:
    (found,) = [i for i in instructions if isinstance(i, Finish | Fail)]
    assert instructions[-1] is found
    return found


def test_each_step_to_the_first_token_is_asked_for() -> None:
    bench = Bench()
    assert bench.tell(Started()) == [BeginAttempt(1, gate_tokens=40)]
    assert bench.tell(Ready()) == [PlaceDecode(bench.request, NOBODY), Send(D, Reserve(bench.request, 1, 900.0))]
    assert bench.hear(D, Reserved(1, b"handle", 8)) == [
        PlacePrefill(bench.request, 32, NOBODY),
        KeepReservation(D, is_kept=True),
        Send(P, Prefill(bench.request, 1, b"handle", 900.0)),
    ]
    assert bench.token(P, 0) == [LeaveGate()]
    assert bench.hear(D, Committed(1, STATS)) == [KeepReservation(D, is_kept=False)]
    assert bench.hear(P, Exported(1, STATS)) == [LetGo(P, is_done=True)]


def test_short_prompt_takes_no_turn_and_no_prefill_worker() -> None:
    bench = Bench(num_prompt_tokens=16)
    assert bench.tell(Started()) == [BeginAttempt(1, gate_tokens=None)]
    bench.tell(Ready())
    assert bench.hear(D, Reserved(1, b"handle", 0)) == [
        KeepReservation(D, is_kept=False),
        Send(D, PrefillLocally(RequestId(1))),
    ]


def test_outcome_waits_until_the_client_has_the_last_chunk() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(P, 0)
    bench.token(D, 1, finish_reason=FinishReason.STOP)
    last = bench.take()
    assert emitted(last) == [10, 11]
    assert not any(isinstance(i, Finish) for i in last)
    # The workers do not wait for a slow client.
    assert {i.worker_id for i in last if isinstance(i, LetGo)} == {D, P}
    assert bench.tell(AbortRequested()) == bench.tell(Interrupted(WorkerUnavailable("stop"))) == []
    (finish,) = bench.take()
    assert isinstance(finish, Finish)
    assert finish.completion.ending.finish_reason is FinishReason.STOP
    assert bench.take() == []


def test_deadline_that_passes_while_the_client_reads_is_the_outcome() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(P, 0, finish_reason=FinishReason.STOP)
    bench.take()
    assert isinstance(bench.tell(DeadlinePassed())[-1], Fail)
    assert bench.take() == bench.tell(ClientLeft()) == []


@pytest.mark.parametrize(("event", "kind"), [(DeadlinePassed(), DeadlineExceeded), (ClientLeft(), RequestCancelled)])
def test_deadline_or_a_lost_client_ends_it_at_once(event: AttemptEvent, kind: type[EngineError]) -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    *released, fail = bench.tell(event)
    assert released == [LeaveGate(), LetGo(P, is_done=False), LetGo(D, is_done=False)]
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, kind)


def test_abort_lets_go_at_once_and_gives_out_what_had_come() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(P, 0)
    assert bench.tell(AbortRequested()) == [LetGo(P, is_done=False), LetGo(D, is_done=False)]
    bench.token(D, 1)
    assert emitted(bench.take()) == [10, 11]
    (held_back,) = bench.take()
    assert isinstance(held_back, Emit)
    assert (held_back.chunk.token_ids, held_back.chunk.text) == ((), "held")
    finish = outcome(bench.take())
    assert isinstance(finish, Finish)
    assert finish.completion.ending.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("phase", ["before it begins", "at the gate"])
def test_abort_before_anything_was_placed(phase: str) -> None:
    bench = Bench()
    if phase == "at the gate":
        bench.tell(Started())
    assert bench.tell(AbortRequested()) == ([LeaveGate()] if phase == "at the gate" else [])
    assert bench.tell(Started()) == bench.tell(Ready()) == []
    bench.take()
    assert isinstance(outcome(bench.take()), Finish)


def test_abort_overtakes_a_restart() -> None:
    bench = Bench()
    bench.begin()
    bench.hear(D, LOST)
    bench.tell(AbortRequested())
    bench.take()
    assert isinstance(outcome(bench.take()), Finish)


def test_first_interruption_is_the_error_and_comes_after_the_tokens() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(P, 0)
    first, second = WorkerUnavailable("first"), WorkerUnavailable("second")
    assert len(bench.tell(Interrupted(first))) == 2
    assert bench.tell(Interrupted(second)) == []
    assert emitted(bench.take()) == [10]
    assert bench.take() == [Fail(first)]


def test_next_attempt_goes_on_behind_what_was_given_out() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(P, 0)
    bench.hear(P, Exported(1, STATS))
    assert bench.hear(D, LOST)[-1] == LetGo(D, is_done=True)
    assert emitted(bench.take()) == [10]
    assert bench.take() == [BeginAttempt(2, gate_tokens=41)]
    request = replace(bench.request, token_ids=(*bench.request.token_ids, 10))
    assert bench.tell(Ready()) == [PlaceDecode(request, frozenset({D})), Send(E, Reserve(request, 2, 900.0))]


def test_token_that_came_too_early_is_forgotten_with_its_attempt() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(D, 1, finish_reason=FinishReason.STOP)
    bench.hear(D, LOST)
    assert emitted(bench.take()) == []
    bench.tell(Ready())
    bench.hear(E, Reserved(2, b"handle", 39))
    bench.token(E, 0, attempt=2)
    assert emitted(bench.take()) == [10]
    assert bench.take() == []


def test_nobody_to_decode_is_a_failure_and_nobody_to_prefill_is_none() -> None:
    bench = Bench()
    error = WorkerUnavailable("nobody is there")
    bench.tell(Started())
    bench.machine.handle(Ready(), 100.0)
    assert bench.tell(NotPlaced(error)) == [LeaveGate()]
    assert bench.take() == [Fail(error)]
    other = Bench()
    other.begin()
    other.machine.handle(FromWorker(D, Reserved(1, b"handle", 0)), 100.0)
    assert other.tell(NotPlaced(error))[-1] == Send(D, PrefillLocally(RequestId(1)))


def test_worker_that_nobody_needs_any_more_is_let_go_of() -> None:
    bench = Bench()
    bench.begin()
    assert bench.tell(Placed(P)) == [LetGo(P, is_done=True)]


@pytest.mark.parametrize("has_other", [True, False])
def test_decode_worker_that_does_not_read_is_left_for_another_one(has_other: bool) -> None:
    bench = Bench(has_other=has_other)
    bench.begin()
    full = CapacityError("it does not read")
    assert bench.tell(SendFailed(D, full)) == [
        LookForOther(Trouble(D, full), bench.request, frozenset({D})),
        LetGo(D, is_done=False),
        LeaveGate(),
    ]
    assert bench.take() == ([BeginAttempt(2, gate_tokens=40)] if has_other else [Fail(full)])


def test_prefill_worker_that_does_not_read_is_superseded_and_not_asked_again() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    assert bench.tell(SendFailed(P, CapacityError("it does not read"))) == [
        LeaveGate(),
        LetGo(P, is_done=False),
        Send(D, Supersede(RequestId(1), 2)),
    ]
    place, *_ = bench.hear(D, Reserved(2, b"next", 0))
    assert place == PlacePrefill(bench.request, 40, frozenset({P}))


def test_writer_that_was_told_of_the_commit_and_lost_with_its_token_is_not_superseded() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    assert bench.hear(P, Exported(1, STATS)) == [KeepReservation(D, is_kept=False)]
    assert bench.hear(P, LOST) == [LeaveGate(), LetGo(P, is_done=False), LetGo(D, is_done=False)]
    assert bench.take() == [BeginAttempt(2, gate_tokens=40)]


def test_reservation_is_kept_no_longer_than_it_waits_for_prefill() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.hear(P, LOST)
    assert KeepReservation(D, is_kept=False) in bench.hear(D, Reserved(2, b"next", 39))


def test_expired_lease_is_blamed_on_its_writer() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.hear(D, Failed(1, LeaseExpired("too slow")))
    bench.take()
    assert PlaceDecode(bench.request, NOBODY) in bench.tell(Ready())
    assert PlacePrefill(bench.request, 40, frozenset({P})) in bench.hear(D, Reserved(2, b"next", 0))


def test_request_of_a_broken_step_is_told_of_as_a_suspect() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.hear(P, Failed(1, StepFailed("a step broke")))
    suspect = replace(bench.request, is_suspect=True)
    assert bench.hear(D, Reserved(2, b"next", 0))[-1] == Send(Q, Prefill(suspect, 2, b"next", 900.0))


@pytest.mark.parametrize("is_granted", [False, True])
def test_worker_that_gives_up_has_failed_at_any_time(is_granted: bool) -> None:
    bench = Bench()
    bench.begin()
    if is_granted:
        bench.hear(D, Reserved(1, b"handle", 39))
    assert LetGo(D, is_done=False) in bench.token(D, 0, finish_reason=FinishReason.ABORT)
    assert isinstance(bench.take()[0], BeginAttempt)


def test_last_attempt_is_not_followed_by_another() -> None:
    bench = Bench(max_attempts=2)
    bench.begin()
    bench.prefill()
    bench.hear(P, LOST)
    bench.hear(D, Committed(1, STATS))
    fail = outcome(bench.take())
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, WorkerUnavailable)


def test_decode_that_has_ended_need_not_be_told_when_it_hangs() -> None:
    bench = Bench()
    bench.begin()
    bench.prefill()
    bench.token(D, 1, finish_reason=FinishReason.STOP)
    assert LetGo(D, is_done=True) in bench.hear(D, Failed(1, WorkerUnavailable("late")))


def test_completion_tells_times_workers_and_attempts() -> None:
    bench = Bench()
    bench.now = 101.0
    bench.begin()
    bench.now = 102.0
    bench.prefill()
    bench.token(P, 0, prefill_timing=PrefillTiming(queue_ns=3, prefill_ns=4))
    bench.now = 103.0
    bench.take()
    bench.hear(D, Committed(1, STATS))
    bench.hear(P, Exported(1, replace(STATS, exposed_ns=1)))
    bench.token(D, 1, finish_reason=FinishReason.STOP)
    bench.now = 105.0
    bench.take()
    bench.now = 106.0
    finish = outcome(bench.take())
    assert isinstance(finish, Finish)
    completion = finish.completion
    assert (completion.prefill_worker, completion.decode_worker, completion.num_attempts) == (P, D, 1)
    timings = completion.timings
    assert (timings.queue_ns, timings.prefill_ns) == (2_000_000_003, 4)
    assert (timings.first_token_ns, timings.decode_ns, timings.total_ns) == (3 * 10**9, 2 * 10**9, 6 * 10**9)
    assert (timings.transfer_ns, timings.transfer_bytes, timings.transport) == (5, 10, "shm")
    assert timings.transfer_exposed_ns == 1, "prefill knows best when its compute ended"
    told = repr(completion)
    bench.token(P, 0, prefill_timing=PrefillTiming(queue_ns=9, prefill_ns=9))
    assert repr(completion) == told
