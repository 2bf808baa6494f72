"""A sequence: one request's tokens, counts and block table inside the engine.

Token ranges of a sequence, half-open, by index into `token_ids`:

    0        num_cached        num_computed                      num_tokens
    |  cached  |    computed     |   to compute (1 = plain decode)   |
    |<--------------- KV in blocks -------------->|
    |<----- num_prompt_tokens ----->|<------- output tokens -------->|

Invariant: a sequence that may run has num_computed < num_tokens; the token sampled in a step is appended, so there is
always at least one token whose KV is missing.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from engine.types import ROOT_HASH, BlockHash, BlockId, EngineRequest, RequestId, SamplingParams
from kvrelay.values import FinishReason


class SequenceStatus(StrEnum):
    """Where a sequence stands."""

    RESERVED = "reserved"
    """Blocks are granted; KV is expected from a prefill worker."""
    WAITING = "waiting"
    """Waits for its first step, or again after a preemption."""
    RUNNING = "running"
    """Takes part in steps."""
    HELD = "held"
    """Prefilled for a hand-off; blocks stay until the export ends."""
    FINISHED = "finished"
    """Ended; holds no blocks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine. Changed by `Scheduler` only."""

    request: EngineRequest
    is_handoff: bool = False
    """Ends its part here after one token and keeps its blocks until they are exported (prefill tier)."""
    arrival: int = 0
    """Order of arrival in this engine."""
    status: SequenceStatus = SequenceStatus.WAITING
    token_ids: list[int] = field(init=False)
    block_table: list[BlockId] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens found in the prefix cache when the sequence was first admitted."""
    num_preemptions: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the published blocks, first block first."""
    finish_reason: FinishReason | None = None
    arrived_ns: int = 0
    """Monotonic time of arrival in the engine."""
    first_scheduled_ns: int | None = None
    """Monotonic time of the first step; None before it."""

    is_on_trial: bool = field(init=False)
    """Whether its next sampled step is to be computed alone."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)
        self.is_on_trial = self.request.is_suspect

    @property
    def request_id(self) -> RequestId:
        """The request's id."""
        return self.request.request_id

    @property
    def sampling_params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.sampling_params

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt."""
        return self.request.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by this and earlier attempts."""
        return len(self.token_ids) - self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is missing; 1 for a plain decode step."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key of claims to blocks: priority, then arrival."""
        return (self.request.priority, self.arrival)

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sort key of the waiting line: priority, then arrival, but whoever holds blocks already goes first.

        Otherwise the head could wait for blocks that a sequence behind it holds.
        """
        return (not self.block_table, *self.rank)

    @property
    def last_block_hash(self) -> BlockHash:
        """Hash of the last published block, the parent of the next one."""
        return self.block_hashes[-1] if self.block_hashes else ROOT_HASH
