"""Values about workers and hand-offs that gateway and workers tell one another. Torch-free and frozen.

`kvrelay/wire/engine` turns them into protos and back; the values about a request are in `types.py`.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.cache.layout import KvLayout
from engine.types import Epoch, Incarnation, LeaseId, WorkerId

TICKET_BYTES = 16
"""Length of a ticket: 128 random bits."""


class WorkerRole(StrEnum):
    """The tier of a worker."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it describes itself when it registers."""

    worker_id: WorkerId
    incarnation: Incarnation
    role: WorkerRole
    address: str
    """gRPC address to dial, host:port."""
    model_name: str
    architecture: str
    vocab_size: int
    context_length: int
    layout: KvLayout
    num_blocks: int
    max_num_seqs: int
    transfer_addresses: tuple[str, ...] = ()
    """Where KV can be sent to, best first (decode only)."""
    transports: tuple[str, ...] = ()
    kernels: str = ""
    """What it computes with, for people."""

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens one sequence can ever hold there: the context's limit or the pool's."""
        return min(self.context_length, self.num_blocks * self.layout.block_size)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Counts of one worker at one moment; see `WorkerLoad` in `protos/kvrelay/v1/session.proto`.

    The engine counts its sequences and blocks, the tier's service adds what it knows of leases and queues.
    """

    num_running: int = 0
    """Sequences that take part in steps."""
    num_waiting: int = 0
    """Sequences that wait for their first step, or requests for a reservation."""
    num_parked: int = 0
    """Sequences that are done but keep their blocks, because an export still reads them."""
    num_waiting_tokens: int = 0
    """Tokens still to be prefilled."""
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_leases: int = 0
    num_preemptions: int = 0
    """Since start, like the next two."""
    num_cache_hit_tokens: int = 0
    num_cache_query_tokens: int = 0
    is_draining: bool = False
    step_age_ms: int = 0
    """How long the step under way has taken so far; 0 = none is under way."""
    is_stalled: bool = False
    """That is longer than the worker can explain."""


@dataclass(frozen=True, slots=True)
class KvHandle:
    """The right to write one sequence's KV into one reservation, for one epoch.

    Decode issues it and prefill shows it. It holds no address: peers are found by worker id in what the registry
    announced, never in a request.
    """

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
class TransferPeer:
    """A decode worker as prefill workers may send KV to it."""

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
