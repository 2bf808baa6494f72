"""The lease table against a naive model, under any order of grants, renewals, ends and passing time."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.types import Epoch, LeaseId
from kv_transfer.handoff.lease import LeaseTable
from kvrelay.errors import EngineError, LeaseExpired, LeaseUnknown, StaleEpoch
from tests.fakes_transport import FakeClock

SESSIONS = ["a", "b", "c"]
PICK = st.integers(0, 1 << 16)


@dataclass
class ModelLease:
    """What the model knows of one lease."""

    session: str
    ttl_s: float
    expires_at: float
    tickets: list[bytes]
    """Tickets of all epochs, the present one last."""
    end: type[EngineError] | None = None
    """Once it has ended: the error that its users get."""


class LeaseTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table = LeaseTable(self.clock)
        self.model: dict[LeaseId, ModelLease] = {}

    def pick(self, number: int) -> tuple[LeaseId, ModelLease]:
        return list(self.model.items())[number % len(self.model)]

    def expected_error(self, lease: ModelLease) -> type[EngineError] | None:
        if lease.end is not None:
            return lease.end
        return LeaseExpired if self.clock.now() >= lease.expires_at else None

    @rule(session=st.sampled_from(SESSIONS), ttl_s=st.sampled_from([1.0, 2.5, 10.0]))
    def grant(self, session: str, ttl_s: float) -> None:
        lease = self.table.grant(session, ttl_s)
        assert lease.lease_id not in self.model
        assert all(lease.ticket not in other.tickets for other in self.model.values())
        self.model[lease.lease_id] = ModelLease(session, ttl_s, self.clock.now() + ttl_s, [lease.ticket])

    @precondition(lambda self: self.model)
    @rule(number=PICK)
    def keep_alive(self, number: int) -> None:
        lease_id, lease = self.pick(number)
        error = self.outcome(lambda: self.table.keep_alive(lease_id))
        assert error is self.expected_error(lease)
        if error is None:
            lease.expires_at = self.clock.now() + lease.ttl_s

    @precondition(lambda self: self.model)
    @rule(number=PICK)
    def supersede(self, number: int) -> None:
        lease_id, lease = self.pick(number)
        expected = self.expected_error(lease)
        error = self.outcome(lambda: lease.tickets.append(self.table.supersede(lease_id).ticket))
        assert error is expected
        if error is None:
            lease.expires_at = self.clock.now() + lease.ttl_s

    @precondition(lambda self: self.model)
    @rule(number=PICK, epoch_index=st.integers(0, 4), ticket_index=st.integers(0, 4))
    def open(self, number: int, epoch_index: int, ticket_index: int) -> None:
        """Only the present epoch's own ticket opens a lease, and only while it is valid."""
        lease_id, lease = self.pick(number)
        ticket = lease.tickets[ticket_index] if ticket_index < len(lease.tickets) else bytes(16)
        epoch = Epoch(epoch_index + 1)
        present = Epoch(len(lease.tickets))
        expected = self.expected_error(lease)
        if expected is None:
            if epoch < present:
                expected = StaleEpoch
            elif epoch > present or ticket != lease.tickets[-1]:
                expected = LeaseUnknown
        assert self.outcome(lambda: self.table.open(lease_id, epoch, ticket)) is expected

    @precondition(lambda self: self.model)
    @rule(number=PICK, is_revoked=st.booleans())
    def end(self, number: int, is_revoked: bool) -> None:
        lease_id, lease = self.pick(number)
        ended = self.table.revoke(lease_id) if is_revoked else self.table.release(lease_id)
        assert (ended is None) == (lease.end is not None)
        lease.end = lease.end or LeaseUnknown

    @rule(session=st.sampled_from(SESSIONS))
    def end_session(self, session: str) -> None:
        expected = {key for key, lease in self.model.items() if lease.session == session and lease.end is None}
        assert {lease.lease_id for lease in self.table.end_session(session)} == expected
        for lease_id in expected:
            self.model[lease_id].end = LeaseUnknown

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        now = self.clock.now()
        expected = {key for key, lease in self.model.items() if lease.end is None and now >= lease.expires_at}
        assert {lease.lease_id for lease in self.table.expire()} == expected
        for lease_id in expected:
            self.model[lease_id].end = LeaseExpired

    @invariant()
    def books_agree(self) -> None:
        self.table.check_invariants()
        live = {key: lease for key, lease in self.model.items() if lease.end is None}
        assert len(self.table) == len(live)
        assert self.table.next_expiry() == min((lease.expires_at for lease in live.values()), default=None)

    @staticmethod
    def outcome(call: object) -> type[EngineError] | None:
        assert callable(call)
        try:
            call()
        except EngineError as error:
            return type(error)
        return None


TestLeaseTable = LeaseTableMachine.TestCase
TestLeaseTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
