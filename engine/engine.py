"""Engine: plan, run, apply. One step at a time, on one thread.

`EngineLoop` (`engine/loop.py`) owns the thread and calls everything here; services never do so directly.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from engine.cache.block_pool import BlockPool
from engine.config import CacheConfig, SchedulerConfig
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.request_checks import check_leaves_a_token, check_sampling_params, check_token_ids
from engine.runner import ModelRunner
from engine.scheduler.plan import StepPlan
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.spec.head.follower import HeadFollower
from engine.spec.sampling import Sampler
from engine.spec.speculation import Speculation
from engine.types import BlockId, EngineRequest, RequestId, SequenceOutput
from engine.worker_types import WorkerLoad
from kvrelay.errors import InvalidRequest

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkProgress:
    """How far one hand-off sequence's KV reaches once the current step is through a layer."""

    request_id: RequestId
    num_tokens: int
    """KV of tokens [0, num_tokens) is final in that layer."""
    block_ids: tuple[BlockId, ...]
    """The sequence's block table on this worker."""


class ExportListener(Protocol):
    """Told, layer by layer, what may leave for decode workers."""

    def on_layer(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        """KV of this layer is final up to `progress`.

        Called during a step, on the engine's thread or on one that the cache has for it, layers in order, with the
        same `progress` object for all layers of a step. Must return at once and must not raise. The blocks stay with
        the sequence until `Engine.remove`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Granted:
    """Blocks reserved for one request."""

    block_ids: tuple[BlockId, ...]
    """The sequence's block table, cached prefix first."""
    num_cached_tokens: int
    """Tokens whose KV is already there; a multiple of the block size."""


class Engine:
    """Sequences, scheduler, pool and runner of one worker."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KvCache,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        export_listener: ExportListener | None = None,
        speculation: Speculation | None = None,
        sampler: Sampler | None = None,
        follower: HeadFollower | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.pool = BlockPool(
            cache_config.num_blocks, cache_config.block_size, enable_prefix_cache=cache_config.enable_prefix_cache
        )
        self.scheduler = Scheduler(
            scheduler_config,
            self.pool,
            max_position=model.config.max_position,
            eos_token_ids=model.config.eos_token_ids,
        )
        self._runner = ModelRunner(model, kv_cache, sampler, follower)
        self._export_listener = export_listener
        self._speculation = speculation
        self._follower = follower
        self.step_request_ids: tuple[RequestId, ...] = ()
        """Who takes part in the step under way, or in the last one."""

    @property
    def has_work(self) -> bool:
        """Whether a step could do anything."""
        return self.scheduler.has_work

    def add(self, request: EngineRequest) -> None:
        """Queue a request to be prefilled and decoded here.

        Raises:
            InvalidRequest: The request cannot be served; names the field.
            CapacityError: Too many are waiting.
        """
        self.scheduler.add(self._sequence(request))

    def add_handoff(self, request: EngineRequest) -> None:
        """Queue a request to be prefilled here for a decode worker: one token, then its blocks are held until `remove`.

        Raises:
            InvalidRequest: The request cannot be served; names the field.
            CapacityError: Too many are waiting.
        """
        self.scheduler.add(self._sequence(request, is_handoff=True))

    def reserve(self, request: EngineRequest) -> Granted | None:
        """Grant blocks for a request whose KV comes from a prefill worker; None = not now.

        Raises:
            InvalidRequest: The request cannot be served; names the field.
        """
        sequence = self._sequence(request)
        if not self.scheduler.reserve(sequence):
            return None
        return Granted(tuple(sequence.block_table), sequence.num_cached_tokens)

    def commit(self, request_id: RequestId, first_token_id: int, draft_state: bytes = b"") -> SequenceOutput | None:
        """Schedule a reserved request whose KV has been imported and verified; None when it is gone by now.

        Args:
            request_id: The request.
            first_token_id: What prefill sampled.
            draft_state: From `SequenceOutput.draft_state` on the prefill worker; empty = it has no draft head.

        Returns:
            The first token's output, which the prefill worker has already sent to the gateway.
        """
        sequence = self.scheduler.get(request_id)
        if sequence is None:
            return None
        if self._follower is not None:
            self._follower.take_over(request_id, sequence.num_tokens, draft_state)
        return self.scheduler.activate(sequence, first_token_id, time.monotonic_ns())

    def prefill_locally(self, request_id: RequestId) -> bool:
        """Prefill a reserved request here; False when it is gone by now."""
        sequence = self.scheduler.get(request_id)
        if sequence is None:
            return False
        self.scheduler.queue_reserved(sequence)
        return True

    def remove(self, request_ids: Iterable[RequestId]) -> list[RequestId]:
        """End requests at whatever phase and free their blocks; returns those that were here."""
        removed = [request_id for request_id in request_ids if self.scheduler.remove(request_id) is not None]
        for request_id in removed:
            if self._speculation is not None:
                self._speculation.forget(request_id)
            if self._follower is not None:
                self._follower.forget(request_id)
        return removed

    def step(self) -> list[SequenceOutput]:
        """Run one step; returns what it produced, or [] when nothing could run.

        What goes wrong in one sequence's row is that output's error. An exception here means that the device's state,
        or the scheduler's, is unknown: `step_request_ids` says who took part.
        """
        self.step_request_ids = ()
        plan = self.scheduler.plan(time.monotonic_ns(), self._drafts())
        self.step_request_ids = tuple(chunk.sequence.request_id for chunk in plan.chunks)
        if not plan.chunks:
            return []
        on_layer = None
        listener = self._export_listener
        progress = tuple(
            ChunkProgress(chunk.sequence.request_id, chunk.end, tuple(chunk.sequence.block_table))
            for chunk in plan.chunks
            if chunk.sequence.is_handoff
        )
        if listener is not None and progress:

            def on_layer(layer: int) -> None:
                listener.on_layer(layer, progress)

        started_ns = time.monotonic_ns()
        result = self._runner.run(plan, on_layer)
        self.kv_cache.end_step()
        finished_ns = time.monotonic_ns()
        outputs = self.scheduler.apply(plan, result, finished_ns)
        if self._speculation is not None:
            self._speculation.observe(plan, outputs, (finished_ns - started_ns) / 1e9)
        return outputs if self._follower is None else self._followed(self._follower, plan, outputs)

    def _drafts(self) -> dict[RequestId, tuple[int, ...]] | None:
        if self._speculation is None:
            return None
        if self._follower is not None:
            self.scheduler.look_ahead(self._speculation.max_draft_tokens)
        try:
            return self._speculation.propose(self.scheduler.decodes())
        except Exception:
            # A guess is worth no sequence's life. The tokens are the same without it.
            _log.exception("speculation.failed", consequence="no more drafts in this process")
            self._speculation = None
            return None

    @staticmethod
    def _followed(follower: HeadFollower, plan: StepPlan, outputs: list[SequenceOutput]) -> list[SequenceOutput]:
        """Add what a hand-off carries for drafting, and forget who ended."""
        handoffs = {chunk.sequence.request_id for chunk in plan.chunks if chunk.sequence.is_handoff}
        found: list[SequenceOutput] = []
        for output in outputs:
            if output.request_id in handoffs and output.error is None:
                output = replace(output, draft_state=follower.export(output.request_id))
            elif output.has_ended:
                follower.forget(output.request_id)
            found.append(output)
        return found

    def close(self) -> None:
        """Free what is not freed with the object; the engine is unusable then."""
        self.kv_cache.close()

    def load(self) -> WorkerLoad:
        """Return the counts now."""
        scheduler, pool = self.scheduler, self.pool
        return WorkerLoad(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_parked=scheduler.num_parked,
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_free_blocks=pool.num_free_blocks,
            num_blocks=pool.num_blocks,
            num_preemptions=scheduler.num_preemptions,
            num_cache_hit_tokens=scheduler.num_cache_hit_tokens,
            num_cache_query_tokens=scheduler.num_cache_query_tokens,
        )

    def _sequence(self, request: EngineRequest, *, is_handoff: bool = False) -> Sequence:
        vocab_size = self.model.config.vocab_size
        if not request.token_ids:
            raise InvalidRequest("prompt", "must have at least one token")
        if not 0 < request.num_prompt_tokens <= len(request.token_ids):
            raise InvalidRequest("num_prompt_tokens", "must name the prompt's part of token_ids")
        check_token_ids("token_ids", request.token_ids, vocab_size)
        params = request.sampling_params
        check_sampling_params(params, vocab_size)
        check_leaves_a_token(params, vocab_size, params.all_stop_ids(self.model.config.eos_token_ids))
        return Sequence(request, is_handoff=is_handoff, arrived_ns=time.monotonic_ns())
