"""The lease table: who may write into which reservation, until when.

Lives on the decode worker. Sans-IO: it takes a clock, touches no block and sends nothing. A lease is granted to a
session, kept alive, and ends by release (holder), expiry (time) or revocation (owner); its epoch fences writers of
earlier attempts. The order that every caller keeps: end or supersede the lease first (fence), then free blocks.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from engine.clock import Clock
from engine.types import Epoch, LeaseId
from engine.worker_types import TICKET_BYTES
from kvrelay.errors import EngineError, LeaseExpired, LeaseUnknown, StaleEpoch

MAX_REMEMBERED_ENDS = 4096
"""Ended leases whose reason is still known, so that a late writer is told why it is refused."""


class LeaseEnd(StrEnum):
    """How a lease ended."""

    RELEASED = "released"
    """Its holder gave it up: the hand-off committed, or the request ended."""
    EXPIRED = "expired"
    """Its time ran out."""
    REVOKED = "revoked"
    """Its session ended, or its owner took the blocks back."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A live lease as it stands; the table replaces the value when it changes."""

    lease_id: LeaseId
    epoch: Epoch
    ticket: bytes = field(repr=False)
    session_id: str
    ttl_s: float
    expires_at: float
    """Seconds on the table's clock; from then on the lease is not valid."""


class LeaseTable:
    """All leases of one decode worker.

    Invariants (`check_invariants`): every lease is listed under exactly its session; no session is listed without a
    lease; no id is both live and ended; epochs start at 1 and tickets have their length; tickets are all different.
    """

    def __init__(self, clock: Clock, random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._clock = clock
        self._random_bytes = random_bytes
        self._leases: dict[LeaseId, Lease] = {}
        self._sessions: dict[str, set[LeaseId]] = {}
        self._ended: OrderedDict[LeaseId, LeaseEnd] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease_id: LeaseId) -> bool:
        return lease_id in self._leases

    def grant(self, session_id: str, ttl_s: float) -> Lease:
        """Make a lease at epoch 1 with a fresh id and ticket.

        Raises:
            ValueError: `ttl_s` is not positive.
        """
        if not ttl_s > 0:
            raise ValueError(f"ttl_s must be positive, not {ttl_s}")
        lease_id = self._new_id()
        lease = Lease(
            lease_id, Epoch(1), self._random_bytes(TICKET_BYTES), session_id, ttl_s, self._clock.now() + ttl_s
        )
        self._leases[lease_id] = lease
        self._sessions.setdefault(session_id, set()).add(lease_id)
        return lease

    def get(self, lease_id: LeaseId) -> Lease:
        """Return a lease that is valid now.

        Raises:
            LeaseExpired: Its time has run out, whether or not `expire` has removed it yet.
            LeaseUnknown: It was released or revoked, or never existed.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise self._ended_error(lease_id)
        if self._clock.now() >= lease.expires_at:
            raise LeaseExpired(f"lease {lease_id:x} ran out of time")
        return lease

    def check(self, lease_id: LeaseId, epoch: Epoch) -> Lease:
        """Return the lease if a writer of `epoch` may write under it now.

        Raises:
            StaleEpoch: A newer attempt owns the lease.
            LeaseUnknown: Also for an epoch that was never granted.
            LeaseExpired: As in `get`.
        """
        lease = self.get(lease_id)
        if epoch < lease.epoch:
            raise StaleEpoch(f"lease {lease_id:x} is at epoch {lease.epoch}, the writer at {epoch}")
        if epoch > lease.epoch:
            raise LeaseUnknown(f"lease {lease_id:x} has no epoch {epoch}")
        return lease

    def open(self, lease_id: LeaseId, epoch: Epoch, ticket: bytes) -> Lease:
        """Return the lease if `ticket` opens it at `epoch`; the comparison takes constant time.

        Raises:
            LeaseUnknown: The ticket is wrong; it reads like an unknown lease. Otherwise as `check`.
        """
        lease = self.check(lease_id, epoch)
        if not hmac.compare_digest(lease.ticket, ticket):
            raise LeaseUnknown(f"no lease {lease_id:x}")
        return lease

    def keep_alive(self, lease_id: LeaseId) -> Lease:
        """Restart a valid lease's time. Raises like `get`: an expired lease stays expired."""
        lease = self.get(lease_id)
        renewed = replace(lease, expires_at=self._clock.now() + lease.ttl_s)
        self._leases[lease_id] = renewed
        return renewed

    def supersede(self, lease_id: LeaseId) -> Lease:
        """Raise a valid lease's epoch for a new attempt: new ticket, time restarted. Raises like `get`."""
        lease = self.get(lease_id)
        successor = replace(
            lease,
            epoch=Epoch(lease.epoch + 1),
            ticket=self._random_bytes(TICKET_BYTES),
            expires_at=self._clock.now() + lease.ttl_s,
        )
        self._leases[lease_id] = successor
        return successor

    def release(self, lease_id: LeaseId) -> Lease | None:
        """End a lease for its holder; None when it has already ended."""
        return self._end(lease_id, LeaseEnd.RELEASED)

    def revoke(self, lease_id: LeaseId) -> Lease | None:
        """End a lease for its owner; None when it has already ended."""
        return self._end(lease_id, LeaseEnd.REVOKED)

    def end_session(self, session_id: str) -> list[Lease]:
        """Revoke every lease of a session and return them, oldest id first."""
        ended = [self.revoke(lease_id) for lease_id in sorted(self._sessions.get(session_id, ()))]
        return [lease for lease in ended if lease is not None]

    def expire(self) -> list[Lease]:
        """End every lease whose time has run out and return them, the one due longest first."""
        now = self._clock.now()
        due = sorted((lease for lease in self._leases.values() if now >= lease.expires_at), key=lambda x: x.expires_at)
        for lease in due:
            self._end(lease.lease_id, LeaseEnd.EXPIRED)
        return due

    def next_expiry(self) -> float | None:
        """Return when the next lease runs out, on the table's clock; None = no leases."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if the table contradicts itself."""
        listed = [lease_id for lease_ids in self._sessions.values() for lease_id in lease_ids]
        if sorted(listed) != sorted(self._leases):
            raise RuntimeError("sessions and leases disagree")
        if not all(self._sessions.values()):
            raise RuntimeError("a session is listed without a lease")
        for lease in self._leases.values():
            if lease.lease_id not in self._sessions.get(lease.session_id, ()):
                raise RuntimeError(f"lease {lease.lease_id:x} is not listed under its session")
            if lease.lease_id in self._ended:
                raise RuntimeError(f"lease {lease.lease_id:x} is live and ended")
            if lease.epoch < 1 or len(lease.ticket) != TICKET_BYTES:
                raise RuntimeError(f"lease {lease.lease_id:x} has a bad epoch or ticket")
        if len({lease.ticket for lease in self._leases.values()}) != len(self._leases):
            raise RuntimeError("two leases share a ticket")
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            raise RuntimeError("too many ended leases are remembered")

    def _new_id(self) -> LeaseId:
        # Random, so that a handle from before a restart does not meet a lease of the same number.
        while True:
            lease_id = LeaseId(int.from_bytes(self._random_bytes(8), "little") >> 1)
            if lease_id and lease_id not in self._leases and lease_id not in self._ended:
                return lease_id

    def _end(self, lease_id: LeaseId, how: LeaseEnd) -> Lease | None:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        siblings = self._sessions[lease.session_id]
        siblings.discard(lease_id)
        if not siblings:
            del self._sessions[lease.session_id]
        self._ended[lease_id] = how
        while len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        return lease

    def _ended_error(self, lease_id: LeaseId) -> EngineError:
        how = self._ended.get(lease_id)
        if how is None:
            return LeaseUnknown(f"no lease {lease_id:x}")
        if how is LeaseEnd.EXPIRED:
            return LeaseExpired(f"lease {lease_id:x} ran out of time")
        return LeaseUnknown(f"lease {lease_id:x} was {how}")
