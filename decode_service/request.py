"""DecodeRequest: what the decode service keeps of one request."""

import time
from dataclasses import dataclass, field
from enum import StrEnum

from engine.types import EngineRequest, LeaseId, RequestId
from worker.sessions.session import GatewaySession


class Phase(StrEnum):
    """Where a request stands on this worker."""

    QUEUED = "queued"
    """Waits for blocks."""
    RESERVED = "reserved"
    """Has blocks and a lease; KV is expected."""
    RUNNING = "running"
    """In the engine: committed, or prefilled here."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request on this worker."""

    request: EngineRequest
    attempt: int
    session: GatewaySession
    ttl_s: float
    """Time to live of its lease."""
    deadline: float | None
    """Monotonic seconds; None = none."""
    queued_until: float
    """Monotonic seconds after which it is shed if it still waits for blocks."""
    traceparent: str
    phase: Phase = Phase.QUEUED
    lease_id: LeaseId | None = None
    """Its reservation while the phase is RESERVED."""
    started_ns: int = field(default_factory=time.monotonic_ns)
    """When the present phase began."""
    num_output_tokens: int = 0
    """Tokens that left for the gateway."""

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    def enter(self, phase: Phase) -> None:
        """Change the phase and note the time."""
        self.phase = phase
        self.started_ns = time.monotonic_ns()

    def fail(self, error: BaseException) -> None:
        """Tell the gateway that the request has ended here with an error."""
        self.session.fail(self.request_id, self.attempt, error)
