"""Silence of a worker, and of the gateway itself."""

from gateway.workers.liveness import Liveness


def test_silence_is_noticed_and_ends_with_a_word() -> None:
    liveness = Liveness(now=0.0, silence_s=5.0, look_interval_s=0.5)
    looks = [(step / 2, liveness.is_silent(step / 2)) for step in range(1, 13)]
    assert [when for when, is_silent in looks if is_silent] == [5.5, 6.0]
    liveness.heard(6.2)
    assert not liveness.is_silent(6.5)


def test_time_in_which_the_gateway_stood_still_counts_for_nobody() -> None:
    liveness = Liveness(now=0.0, silence_s=5.0, look_interval_s=0.5)
    assert not liveness.is_silent(0.5)
    # It was stopped for a minute: what workers said meanwhile waits in its sockets.
    assert not liveness.is_silent(60.5)
    assert not any(liveness.is_silent(60.5 + step / 2) for step in range(1, 9))
    assert liveness.is_silent(65.0)
