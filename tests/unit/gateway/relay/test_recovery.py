"""What follows which failure."""

import pytest

from engine.types import WorkerId
from gateway.relay.recovery import Recovery, Remedy, can_retry
from kvrelay.errors import (
    CapacityError,
    DeviceError,
    EngineError,
    InvalidRequest,
    LeaseExpired,
    PeerUnavailable,
    StepFailed,
    WorkerUnavailable,
)

LOST = WorkerUnavailable("gone")
P, D = WorkerId("p"), WorkerId("d")


@pytest.mark.parametrize(
    ("is_committed", "has_first_token", "remedy"),
    [
        (False, False, Remedy.SUPERSEDE),
        (False, True, Remedy.SUPERSEDE),
        (True, False, Remedy.RESTART),
        (True, True, Remedy.NOTHING),
    ],
)
def test_lost_prefill_worker(is_committed: bool, has_first_token: bool, remedy: Remedy) -> None:
    recovery = Recovery(3)
    found = recovery.after_prefill_failure(LOST, P, is_committed=is_committed, has_first_token=has_first_token)
    assert found is remedy
    assert (P in recovery.failed_prefill) is (remedy is not Remedy.NOTHING)


@pytest.mark.parametrize("error", [InvalidRequest("field", "wrong"), EngineError("bug")])
def test_what_cannot_be_retried_is_told(error: EngineError) -> None:
    assert not can_retry(error)
    recovery = Recovery(3)
    found = recovery.after_prefill_failure(error, P, is_committed=False, has_first_token=False)
    assert found is Remedy.GIVE_UP
    assert recovery.after_decode_failure(error, D, has_alternative=True) is Remedy.GIVE_UP


@pytest.mark.parametrize("error", [LOST, PeerUnavailable("x"), LeaseExpired("x"), DeviceError("x")])
def test_failed_decode_worker_means_another_attempt(error: EngineError) -> None:
    recovery = Recovery(3)
    assert recovery.after_decode_failure(error, D, has_alternative=False) is Remedy.RESTART
    assert recovery.failed_decode == {D}


def test_full_decode_worker_is_left_only_for_another_one() -> None:
    full = CapacityError("full")
    assert Recovery(3).after_decode_failure(full, D, has_alternative=True) is Remedy.RESTART
    assert Recovery(3).after_decode_failure(full, D, has_alternative=False) is Remedy.GIVE_UP


def test_attempts_are_limited() -> None:
    recovery = Recovery(2)
    assert recovery.next_attempt() == 2
    found = recovery.after_prefill_failure(LOST, P, is_committed=False, has_first_token=False)
    assert found is Remedy.GIVE_UP
    assert recovery.after_decode_failure(LOST, D, has_alternative=True) is Remedy.GIVE_UP
    with pytest.raises(ValueError, match="no attempt"):
        recovery.next_attempt()


def test_request_in_two_broken_steps_is_tried_no_more() -> None:
    """Whichever tiers they were on; what is told is no reason to send it again."""
    recovery = Recovery(9)
    broken = StepFailed("a step failed")
    assert recovery.after_prefill_failure(broken, P, is_committed=False, has_first_token=False) is Remedy.SUPERSEDE
    assert recovery.after_decode_failure(broken, D, has_alternative=True) is Remedy.GIVE_UP
    assert not broken.is_retryable


def test_lost_workers_accuse_nobody() -> None:
    recovery = Recovery(9)
    assert recovery.after_decode_failure(StepFailed("x"), D, has_alternative=True) is Remedy.RESTART
    for error in (LOST, DeviceError("the engine has stopped"), PeerUnavailable("x"), LOST):
        assert recovery.after_decode_failure(error, D, has_alternative=True) is Remedy.RESTART
    assert recovery.after_decode_failure(StepFailed("x"), D, has_alternative=True) is Remedy.GIVE_UP
