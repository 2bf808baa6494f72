"""The lease table: validity in time, epochs, tickets, sessions."""

from dataclasses import replace

import pytest

from engine.types import Epoch, LeaseId
from kv_transfer.handoff import lease as lease_module
from kv_transfer.handoff.lease import LeaseEnd, LeaseTable
from kvrelay.errors import LeaseExpired, LeaseUnknown, StaleEpoch
from tests.fakes_transport import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock: FakeClock) -> LeaseTable:
    return LeaseTable(clock)


def test_a_granted_lease_opens_with_its_ticket_only(table: LeaseTable) -> None:
    lease = table.grant("session", 5.0)
    assert lease.epoch == 1
    assert table.open(lease.lease_id, lease.epoch, lease.ticket) == lease
    for wrong in (bytes(16), lease.ticket[:-1], b"", lease.ticket + b"x"):
        with pytest.raises(LeaseUnknown):
            table.open(lease.lease_id, lease.epoch, wrong)
    assert lease.ticket.hex() not in repr(lease)
    assert repr(lease.ticket) not in repr(lease)


def test_a_lease_is_void_from_the_moment_its_time_runs_out(table: LeaseTable, clock: FakeClock) -> None:
    lease = table.grant("session", 5.0)
    clock.advance(4.999)
    table.check(lease.lease_id, lease.epoch)
    assert table.expire() == []
    clock.advance(0.001)
    for refused in (table.get, table.keep_alive, table.supersede):
        with pytest.raises(LeaseExpired):
            refused(lease.lease_id)
    assert [expired.lease_id for expired in table.expire()] == [lease.lease_id]
    assert table.expire() == []
    with pytest.raises(LeaseExpired):
        table.check(lease.lease_id, lease.epoch)
    table.check_invariants()


def test_keeping_alive_restarts_the_time(table: LeaseTable, clock: FakeClock) -> None:
    lease = table.grant("session", 5.0)
    for _ in range(3):
        clock.advance(4.0)
        table.keep_alive(lease.lease_id)
    assert table.expire() == []
    assert table.next_expiry() == clock.now() + 5.0


def test_superseding_fences_the_earlier_writer(table: LeaseTable) -> None:
    first = table.grant("session", 5.0)
    second = table.supersede(first.lease_id)
    assert (second.lease_id, second.epoch) == (first.lease_id, 2)
    assert second.ticket != first.ticket
    with pytest.raises(StaleEpoch):
        table.check(first.lease_id, first.epoch)
    with pytest.raises(StaleEpoch):
        table.open(first.lease_id, first.epoch, first.ticket)
    with pytest.raises(LeaseUnknown):
        table.open(second.lease_id, second.epoch, first.ticket)
    with pytest.raises(LeaseUnknown):
        table.check(second.lease_id, Epoch(3))
    table.open(second.lease_id, second.epoch, second.ticket)


def test_ended_leases_say_how_they_ended(table: LeaseTable) -> None:
    released, revoked = table.grant("session", 5.0), table.grant("session", 5.0)
    table.release(released.lease_id)
    table.revoke(revoked.lease_id)
    assert table.release(released.lease_id) is None
    assert table.revoke(released.lease_id) is None
    with pytest.raises(LeaseUnknown, match="released"):
        table.get(released.lease_id)
    with pytest.raises(LeaseUnknown, match="revoked"):
        table.get(revoked.lease_id)
    with pytest.raises(LeaseUnknown, match="no lease"):
        table.get(LeaseId(12345))


def test_the_end_of_a_session_revokes_its_leases_and_no_others(table: LeaseTable) -> None:
    mine = {table.grant("a", 5.0).lease_id for _ in range(3)}
    other = table.grant("b", 5.0)
    assert {lease.lease_id for lease in table.end_session("a")} == mine
    assert table.end_session("a") == []
    assert len(table) == 1
    assert other.lease_id in table
    table.check_invariants()


def test_the_memory_of_ended_leases_is_bounded(table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_REMEMBERED_ENDS", 3)
    leases = [table.grant("session", 5.0) for _ in range(5)]
    for lease in leases:
        table.release(lease.lease_id)
    table.check_invariants()
    with pytest.raises(LeaseUnknown, match="no lease"):
        table.get(leases[0].lease_id)
    with pytest.raises(LeaseUnknown, match="released"):
        table.get(leases[4].lease_id)


def test_ids_are_never_zero_or_used_twice(clock: FakeClock) -> None:
    draws = iter([bytes(8), b"\x02" * 8, b"t" * 16, b"\x02" * 8, b"\x04" * 8, b"u" * 16])
    table = LeaseTable(clock, lambda num_bytes: next(draws))
    first = table.grant("session", 5.0)
    table.release(first.lease_id)
    second = table.grant("session", 5.0)
    assert len({LeaseId(0), first.lease_id, second.lease_id}) == 3


def test_a_lease_needs_time_to_live(table: LeaseTable) -> None:
    for ttl_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            table.grant("session", ttl_s)


def test_contradictions_are_noticed(table: LeaseTable) -> None:
    lease = table.grant("session", 5.0)
    table._sessions["ghost"] = set()
    with pytest.raises(RuntimeError, match="without a lease"):
        table.check_invariants()
    del table._sessions["ghost"]
    table._sessions["session"] = {LeaseId(lease.lease_id + 1)}
    with pytest.raises(RuntimeError, match="disagree"):
        table.check_invariants()


def test_a_lease_with_broken_fields_is_noticed(table: LeaseTable) -> None:
    first, second = table.grant("session", 5.0), table.grant("session", 5.0)
    for broken, message in [
        (replace(first, session_id="other"), "not listed under its session"),
        (replace(first, epoch=Epoch(0)), "bad epoch or ticket"),
        (replace(first, ticket=b"short"), "bad epoch or ticket"),
        (replace(first, ticket=second.ticket), "share a ticket"),
    ]:
        table._leases[first.lease_id] = broken
        with pytest.raises(RuntimeError, match=message):
            table.check_invariants()
    table._leases[first.lease_id] = first
    table._ended[first.lease_id] = LeaseEnd.RELEASED
    with pytest.raises(RuntimeError, match="live and ended"):
        table.check_invariants()
