"""Which workers serve a request.

Decode: the least loaded of those that can hold it, unless another one already saw its prefix and is not much busier.
Prefill: the one with the fewest prompt tokens outstanding, again with a preference for a known prefix. Decides from
what sessions report; sends nothing.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from engine.types import EngineRequest, WorkerId
from engine.worker_types import WorkerRole
from gateway.routing.affinity import PrefixAffinity, prefix_keys
from gateway.workers.pool import WorkerPool
from gateway.workers.session import WorkerSession
from kvrelay.errors import WorkerUnavailable


@dataclass(frozen=True, slots=True)
class AffinityLimits:
    """How far prefix affinity may bend the balance."""

    capacity: int = 65_536
    """Prefixes remembered per tier; 0 = off."""
    max_extra_load: float = 0.25
    """A known prefix is worth this much load (1 = a full worker), not more."""
    max_extra_tokens: int = 2_048
    """A known prefix is worth this many outstanding prompt tokens on the prefill tier, not more."""


class Router:
    """Places requests. One event loop."""

    def __init__(
        self, pool: WorkerPool, limits: AffinityLimits | None = None, common_prefix: tuple[int, ...] = ()
    ) -> None:
        """Make a router; `common_prefix` is what chats have in common whatever they say, see `prefix_keys`."""
        self._pool = pool
        self._common_prefix = common_prefix
        self._placed: dict[WorkerId, int] = {}
        self._num_placed = 0
        self._limits = limits or AffinityLimits()
        self._decode_affinity = PrefixAffinity(self._limits.capacity)
        self._prefill_affinity = PrefixAffinity(self._limits.capacity)

    def place(self, request: EngineRequest, *, avoid: Collection[WorkerId] = ()) -> WorkerSession:
        """Choose the decode worker. Who prefills is chosen once it has said what its cache lacks: `place_prefill`.

        Args:
            request: What to place; its tokens count against the workers' limits.
            avoid: Workers that failed this request; taken only where there is no other.

        Raises:
            WorkerUnavailable: no decode worker that could hold the request is connected.
        """
        candidates = self._decode_candidates(request)
        candidates = [session for session in candidates if session.info.worker_id not in avoid] or candidates
        num_tokens = len(request.token_ids) + 1
        roomy = [s for s in candidates if s.info.layout.num_blocks(num_tokens) <= s.num_free_blocks]
        chosen = self._choose(
            request, roomy or candidates, self._decode_affinity, _decode_load, self._limits.max_extra_load
        )
        if chosen is None:
            raise WorkerUnavailable("no decode worker is connected that could hold the request")
        return chosen

    def has_decode_besides(self, request: EngineRequest, avoid: Collection[WorkerId]) -> bool:
        """Whether a decode worker outside `avoid` could take the request now."""
        return any(session.info.worker_id not in avoid for session in self._decode_candidates(request))

    def place_prefill(self, request: EngineRequest, *, avoid: Collection[WorkerId] = ()) -> WorkerSession | None:
        """Choose a prefill worker outside `avoid`; None: there is none."""
        candidates = [
            session
            for session in self._pool.usable(WorkerRole.PREFILL)
            if session.info.worker_id not in avoid and len(request.token_ids) <= session.info.max_sequence_tokens
        ]
        return self._choose(
            request, candidates, self._prefill_affinity, _outstanding_tokens, self._limits.max_extra_tokens
        )

    def forget_worker(self, worker_id: WorkerId) -> None:
        """Drop what affinity knows of a worker that went away: its cache went with it."""
        self._placed.pop(worker_id, None)
        self._decode_affinity.forget_worker(worker_id)
        self._prefill_affinity.forget_worker(worker_id)

    def _decode_candidates(self, request: EngineRequest) -> list[WorkerSession]:
        num_tokens = request.num_prompt_tokens + request.sampling_params.max_tokens
        return [s for s in self._pool.usable(WorkerRole.DECODE) if num_tokens <= s.info.max_sequence_tokens]

    def _choose(
        self,
        request: EngineRequest,
        candidates: list[WorkerSession],
        affinity: PrefixAffinity,
        load: Callable[[WorkerSession], float],
        max_extra_load: float,
    ) -> WorkerSession | None:
        if not candidates:
            return None
        # Of equally loaded ones the one that has waited longest: requests that come one by one meet idle workers only.
        chosen = min(candidates, key=lambda s: (load(s), self._placed.get(s.info.worker_id, 0), s.info.worker_id))
        if self._limits.capacity > 0:
            keys = prefix_keys(request.token_ids, request.cache_salt, self._common_prefix)
            known = affinity.preferred(keys)
            for session in candidates:
                if session.info.worker_id == known and load(session) <= load(chosen) + max_extra_load:
                    chosen = session
            affinity.remember(keys, chosen.info.worker_id)
        self._num_placed += 1
        self._placed[chosen.info.worker_id] = self._num_placed
        return chosen


def _decode_load(session: WorkerSession) -> float:
    """Return how full a decode worker is, by sequences or by blocks, whichever is fuller; 1 = full."""
    # What other gateways run there shows only in its report; what this one placed since shows only here.
    num_sequences = max(session.load.num_running + session.load.num_waiting, session.num_requests)
    used_blocks = 1.0 - session.num_free_blocks / session.info.num_blocks
    return max(num_sequences / session.info.max_num_seqs, used_blocks)


def _outstanding_tokens(session: WorkerSession) -> float:
    return float(max(session.num_outstanding_tokens, session.load.num_waiting_tokens))
