"""The KV handle: what decode issues for a reservation and prefill shows to write into it.

A value only. It holds no address: peers are found by worker id in what the registry announced, never in a request.
"""

from dataclasses import dataclass, field

from engine.cache.layout import KvLayout
from engine.types import Epoch, Incarnation, LeaseId, WorkerId

TICKET_BYTES = 16
"""Length of a ticket: 128 random bits."""


@dataclass(frozen=True, slots=True)
class KvHandle:
    """The right to write one sequence's KV into one reservation, for one epoch."""

    lease_id: LeaseId
    epoch: Epoch
    ticket: bytes = field(repr=False)
    """Secret of this epoch, `TICKET_BYTES` long. Kept out of `repr` so that it cannot reach a log."""
    worker_id: WorkerId
    """The decode worker that issued it."""
    incarnation: Incarnation
    """The decode worker's process; after a restart the handle is void."""
    start_token: int
    """First token decode lacks; its prefix cache holds the ones before. A multiple of decode's block size."""
    num_tokens: int
    """Tokens of the prompt: KV of `[start_token, num_tokens)` is to be sent."""
    layout_fingerprint: str
    """`KvLayout.fingerprint` of the decode worker's cache."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A decode worker as the registry announces it to prefill workers."""

    worker_id: WorkerId
    incarnation: Incarnation
    addresses: tuple[str, ...]
    """Transfer addresses, `scheme://location`, in any order."""
    layout: KvLayout


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Size and timing of one hand-off as one side saw it."""

    num_bytes: int
    """KV payload bytes."""
    num_frames: int
    """KV frames."""
    total_ns: int
    """From OPEN to COMMITTED."""
    exposed_ns: int
    """From the moment the last layer's KV was ready until the commit: the part that compute does not hide."""
    transport: str
    """Scheme of the transport."""
