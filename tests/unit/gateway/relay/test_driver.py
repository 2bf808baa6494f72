"""What workers are sent when events come in the orders that only races bring about: machine, driver and sessions."""

import pytest

from engine.types import RequestId
from gateway.relay.completion import CompletionState
from gateway.workers.messages import SessionLost, Stalled
from kvrelay.errors import CapacityError, EngineError, LeaseUnknown, StepFailed, WorkerUnavailable
from kvrelay.serving.telemetry import span, traceparent
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import session_pb2
from kvrelay.values import FinishReason
from kvrelay.wire.engine.events import Committed, Exported, Failed, Reserved
from tests.unit.gateway.builders import sent
from tests.unit.gateway.relay.driver_bench import HANDLE, STATS, Bench, D, P, Q, fill, kinds


def test_reserve_then_prefill_with_the_handle_as_it_came() -> None:
    bench = Bench()
    assert kinds(sent(bench.decode)) == [decode_pb2.ReserveCommand]
    bench.reserved()
    (prefill,) = sent(bench.prefills[P])
    assert prefill.kv_handle.SerializeToString() == HANDLE
    assert prefill.request.attempt == 1
    assert bench.decode.num_requests == bench.prefills[P].num_requests == 1


def test_hidden_fields_of_a_handle_survive_the_relay() -> None:
    bench = Bench()
    newer = HANDLE + b"\xa2\x06\x03new"
    bench.tell(D, Reserved(1, newer, 0))
    (prefill,) = sent(bench.prefills[P])
    assert prefill.kv_handle.SerializeToString() == newer


@pytest.mark.parametrize(("num_cached_tokens", "is_local"), [(23, False), (24, True), (39, True)])
def test_short_rest_is_prefilled_locally(num_cached_tokens: int, is_local: bool) -> None:
    bench = Bench()
    sent(bench.decode)
    bench.reserved(num_cached_tokens=num_cached_tokens)
    assert bool(sent(bench.prefills[P])) is not is_local
    assert kinds(sent(bench.decode)) == ([decode_pb2.PrefillLocallyCommand] if is_local else [])


def test_lost_prefill_supersedes_and_the_next_writer_gets_the_new_handle() -> None:
    bench = Bench()
    bench.reserved()
    sent(bench.decode)
    bench.lose(P)
    (supersede,) = sent(bench.decode)
    assert (supersede.request_id, supersede.attempt) == (1, 2)
    # What the old writer still says is void once the new epoch is granted.
    bench.reserved(attempt=2)
    bench.token(P, 0, attempt=1)
    assert bench.given_out() == []
    (prefill,) = sent(bench.prefills[Q])
    assert prefill.request.attempt == 2
    bench.token(Q, 0, attempt=2)
    bench.token(D, 1, attempt=2)
    assert bench.given_out() == [0, 1]
    assert bench.completion().prefill_worker == Q


def test_commit_that_overtakes_a_supersede_wins() -> None:
    bench = Bench()
    bench.reserved()
    bench.token(P, 0)
    bench.tell(P, Failed(1, WorkerUnavailable("late")))
    bench.tell(D, Committed(1, STATS))
    bench.tell(D, Failed(2, LeaseUnknown("committed already")))
    bench.reserved(attempt=2)
    assert bench.is_going_on
    bench.token(D, 1)
    assert bench.given_out() == [0, 1]
    assert not sent(bench.prefills[Q])


def test_commit_that_overtakes_a_supersede_without_its_first_token_restarts() -> None:
    bench = Bench()
    bench.reserved()
    bench.lose(P)
    bench.tell(D, Committed(1, STATS))
    assert bench.is_restart_due
    assert sent(bench.decode)[0] == session_pb2.AbortCommand(request_ids=[1])
    assert bench.decode.num_requests == 0


def test_lost_first_token_without_attempts_left_is_an_error() -> None:
    bench = Bench(max_attempts=1)
    bench.reserved()
    bench.tell(D, Committed(1, STATS))
    bench.lose(P)
    assert isinstance(bench.failure(), WorkerUnavailable)


def test_supersede_that_fails_is_a_failure_of_decode() -> None:
    bench = Bench()
    bench.reserved()
    bench.lose(P)
    bench.tell(D, Failed(2, LeaseUnknown("expired")))
    assert bench.is_restart_due


@pytest.mark.parametrize("attempt", [0, 1])
def test_error_of_decode_restarts_and_lets_prefill_go(attempt: int) -> None:
    bench = Bench()
    bench.reserved()
    sent(bench.prefills[P])
    bench.tell(D, Failed(attempt, LeaseUnknown("expired")))
    assert bench.is_restart_due
    assert kinds(sent(bench.prefills[P])) == [session_pb2.AbortCommand]
    assert bench.decode.num_requests == bench.prefills[P].num_requests == 0


def test_error_of_an_older_attempt_is_void() -> None:
    bench = Bench()
    bench.reserved()
    bench.lose(P)
    bench.reserved(attempt=2)
    bench.tell(Q, Failed(1, WorkerUnavailable("old")))
    bench.tell(D, Failed(1, WorkerUnavailable("old")))
    assert bench.is_going_on


def test_tokens_that_came_before_their_worker_was_lost_count() -> None:
    bench = Bench()
    bench.reserved()
    bench.lose(D)
    bench.token(P, 0)
    assert bench.is_restart_due
    assert bench.given_out() == [0]


def test_worker_that_gives_up_by_itself_has_failed() -> None:
    bench = Bench()
    bench.reserved()
    bench.token(P, 0)
    bench.token(D, 1, finish=FinishReason.ABORT)
    assert bench.is_restart_due
    assert bench.given_out() == [0]


def test_broken_output_ends_the_request_only() -> None:
    bench = Bench()
    bench.reserved()
    bench.token(P, 9)
    assert bench.decode.num_requests == bench.prefills[P].num_requests == 0
    assert type(bench.failure()) is EngineError


@pytest.mark.parametrize("is_exported_first", [False, True])
def test_prefill_is_released_after_export_and_first_token(is_exported_first: bool) -> None:
    bench = Bench()
    bench.reserved()
    sent(bench.prefills[P])
    for is_export in (is_exported_first, not is_exported_first):
        assert bench.prefills[P].num_requests == 1
        if is_export:
            bench.tell(P, Exported(1, STATS))
        else:
            bench.token(P, 0)
    assert bench.prefills[P].num_requests == 0
    assert sent(bench.prefills[P]) == []
    assert bench.prefills[P].num_outstanding_tokens == 0


def test_finished_request_is_not_aborted_at_decode() -> None:
    bench = Bench()
    bench.reserved()
    bench.token(P, 0)
    bench.tell(P, Exported(1, STATS))
    bench.token(D, 1, finish=FinishReason.STOP)
    sent(bench.decode)
    assert bench.completion().ending.finish_reason is FinishReason.STOP
    assert sent(bench.decode) == []
    assert bench.decode.num_requests == 0


def test_request_that_ends_on_prefills_token_is_aborted_at_decode() -> None:
    bench = Bench()
    bench.reserved()
    bench.token(P, 0, finish=FinishReason.LENGTH)
    sent(bench.decode)
    assert bench.given_out() == [0]
    assert kinds(sent(bench.decode)) == [session_pb2.AbortCommand]
    assert bench.completion().ending.finish_reason is FinishReason.LENGTH
    assert sent(bench.decode) == []


def test_timings_add_the_gateways_wait_to_the_workers() -> None:
    bench = Bench()
    bench.pool.clock.time += 2.0
    bench.reserved()
    bench.token(P, 0)
    bench.tell(D, Committed(1, STATS))
    timings = bench.completion().timings
    assert timings.queue_ns == 2_000_000_003
    assert timings.prefill_ns == 4
    assert (timings.transfer_ns, timings.transfer_bytes, timings.transport) == (5, 10, "shm")


def test_reservation_is_kept_while_its_prefill_waits() -> None:
    """From the command to the prefill worker until the commit, a new prefill included; never without a prefill."""
    bench = Bench()
    assert not bench.decode._awaiting_prefill
    bench.reserved()
    assert bench.decode._awaiting_prefill == {RequestId(1)}
    bench.lose(P)
    bench.reserved(attempt=2)
    assert bench.decode._awaiting_prefill == {RequestId(1)}
    bench.tell(D, Committed(2, STATS))
    assert not bench.decode._awaiting_prefill
    cached = Bench()
    cached.reserved(num_cached_tokens=39)
    assert not cached.decode._awaiting_prefill


@pytest.mark.parametrize("is_over_by", ["token", "loss", "end", "local"])
def test_gate_is_left_once_the_prefill_is_over(is_over_by: str) -> None:
    bench = Bench()
    assert (bench.gate.num_prompts, bench.gate.num_tokens) == (1, 40)
    bench.reserved(num_cached_tokens=39 if is_over_by == "local" else 0)
    assert bench.gate.num_prompts == (is_over_by != "local")
    if is_over_by == "token":
        bench.token(P, 0)
    elif is_over_by == "loss":
        bench.lose(P)
    elif is_over_by == "end":
        bench.end()
    assert (bench.gate.num_prompts, bench.gate.num_tokens) == (0, 0)


def test_hung_prefill_worker_is_left_for_another_writer() -> None:
    bench = Bench()
    bench.reserved()
    sent(bench.decode)
    sent(bench.prefills[P])
    bench.tell(P, Stalled(WorkerUnavailable("hangs")))
    # It may come back: it is told that it need not go on.
    assert kinds(sent(bench.prefills[P])) == [session_pb2.AbortCommand]
    assert kinds(sent(bench.decode)) == [decode_pb2.SupersedeCommand]
    bench.reserved(attempt=2)
    assert bench.prefills[Q].num_requests == 1


@pytest.mark.parametrize("has_other", [True, False])
def test_hung_decode_worker_is_left_only_for_another_one(has_other: bool) -> None:
    bench = Bench()
    if has_other:
        bench.pool.add("other")
    bench.reserved()
    bench.token(P, 0)
    bench.tell(D, Committed(1, STATS))
    sent(bench.decode)
    for _ in range(3):
        bench.tell(D, Stalled(WorkerUnavailable("hangs")))
    assert bench.is_restart_due is has_other
    assert bench.machine.state is not CompletionState.FAILING
    assert kinds(sent(bench.decode)) == ([session_pb2.AbortCommand] if has_other else [])
    if not has_other:
        # It moves again, and the request with it.
        bench.token(D, 1)
        assert bench.given_out() == [0, 1]


def test_hung_decode_worker_costs_no_request_its_last_attempt() -> None:
    bench = Bench(max_attempts=1)
    bench.pool.add("other")
    bench.reserved()
    bench.tell(D, Stalled(WorkerUnavailable("hangs")))
    assert bench.is_going_on


def test_request_of_a_second_broken_step_fails_with_its_reason() -> None:
    bench = Bench(max_attempts=9)
    bench.reserved()
    bench.tell(P, Failed(1, StepFailed("a step failed")))
    assert kinds(sent(bench.decode))[-1] is decode_pb2.SupersedeCommand
    bench.reserved(attempt=2)
    bench.tell(Q, Failed(2, StepFailed("a step failed")))
    assert isinstance(bench.failure(), StepFailed)


def test_prefill_worker_that_does_not_read_is_left_for_another_writer() -> None:
    bench = Bench()
    fill(bench.prefills[P])
    bench.reserved()
    assert kinds(sent(bench.decode))[-1] is decode_pb2.SupersedeCommand
    assert bench.prefills[P].num_requests == 0
    bench.reserved(attempt=2)
    assert bench.prefills[Q].num_requests == 1


def test_decode_worker_that_does_not_read_is_left() -> None:
    bench = Bench(is_decode_full=True)
    assert isinstance(bench.failure(), CapacityError)
    assert bench.decode.num_requests == bench.decode.num_outstanding_tokens == 0
    assert bench.gate.num_prompts == 0


def test_commands_carry_the_trace() -> None:
    with span("test"):
        bench = Bench()
        bench.reserved()
        expected = traceparent()
    (reserve,) = sent(bench.decode)
    (prefill,) = sent(bench.prefills[P])
    assert reserve.request.traceparent == prefill.request.traceparent == expected != ""


def test_what_was_in_the_box_at_a_restart_is_forgotten() -> None:
    bench = Bench()
    bench.lose(D)
    bench.mailbox.post(D, SessionLost(WorkerUnavailable("again")))
    assert bench.driver.next_chunk() is None
    assert bench.mailbox._deliveries == []
