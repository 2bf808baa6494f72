"""ModelRunner: turns a step plan into tensors, runs the model and samples. Knows nothing of requests' lives.

Next: `engine/model/interface.py` for the model, `engine/spec/sampling.py` for the tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.batch import StepBatch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest
from engine.scheduler.plan import SampledTokens, ScheduledChunk, StepPlan, StepResult
from engine.sequence import Sequence as EngineSequence
from engine.spec.head_follower import HeadFollower
from engine.spec.sampling import HostSampler, Sampler
from engine.spec.verify import VerifyItem

LayerCallback = Callable[[int], None]
"""Called on the engine's thread with a layer's index once the step's KV of that layer is in the cache."""


class ModelRunner:
    """Runs steps of one model over one KV cache, always on the same thread."""

    def __init__(
        self,
        model: LanguageModel,
        kv_cache: KvCache,
        sampler: Sampler | None = None,
        follower: HeadFollower | None = None,
    ) -> None:
        """Make a runner.

        Args:
            model: What computes.
            kv_cache: Where it keeps KV.
            sampler: What draws; by default logits are sampled on the host.
            follower: Of the model, where a draft head runs behind it.
        """
        self.model = model
        self.kv_cache = kv_cache
        self._sampler = sampler or HostSampler()
        self._follower = follower
        self._block_size = kv_cache.layout.block_size

    def run(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        """Compute a step's KV and sample after every chunk that reaches its sequence's end, verifying its drafts."""
        batch = self._build_batch(plan.chunks)
        logits: Tensor  # [num_logit_rows, vocab_size] fp32
        if self._follower is None:
            logits = self.model.forward(batch, self.kv_cache, on_layer)
        else:
            logits = self._follower.forward(batch, plan.chunks, on_layer)
        items: list[VerifyItem] = []
        num_rows = 0
        for chunk in plan.chunks:
            if chunk.samples:
                items.append(VerifyItem(num_rows, chunk.draft_token_ids, self._sample_request(chunk.sequence)))
                num_rows += 1 + len(chunk.draft_token_ids)
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        sampled = self._sampler.sample(logits, items)
        if self._follower is not None:
            new_counts = iter([len(new.token_ids) for new in sampled])
            self._follower.settle(plan.chunks, [next(new_counts) - 1 if chunk.samples else 0 for chunk in plan.chunks])
        return StepResult(
            tuple(
                SampledTokens(sequence.request_id, new.token_ids, new.logprobs)
                for sequence, new in zip(sequences, sampled, strict=True)
            )
        )

    def _sample_request(self, sequence: EngineSequence) -> SampleRequest:
        params = sequence.sampling_params
        eos = frozenset[int]() if params.ignore_eos else self.model.config.eos_token_ids
        history = TokenHistory(sequence.token_ids, sequence.num_prompt_tokens)
        return SampleRequest(params, history, params.stop_token_ids | eos)

    def _build_batch(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        token_ids: list[int] = []
        positions = np.concatenate([np.arange(chunk.start, chunk.start + chunk.num_rows) for chunk in chunks])
        logit_rows: list[int] = []
        slots: list[NDArray[np.int64]] = []
        query_start = [0]
        context_lens = [chunk.start + chunk.num_rows for chunk in chunks]
        max_blocks = -(-max(context_lens) // self._block_size)
        block_tables = np.zeros((len(chunks), max_blocks), dtype=np.int32)
        for index, chunk in enumerate(chunks):
            end = context_lens[index]
            token_ids.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
            token_ids.extend(chunk.draft_token_ids)
            query_start.append(query_start[-1] + chunk.num_rows)
            num_blocks = -(-end // self._block_size)
            table = np.asarray(chunk.sequence.block_table[:num_blocks], dtype=np.int64)
            block_tables[index, :num_blocks] = table
            rows = np.arange(chunk.start, end)
            slots.append(table[rows // self._block_size] * self._block_size + rows % self._block_size)
            if chunk.samples:
                first = query_start[-1] - 1 - len(chunk.draft_token_ids)
                logit_rows.extend(range(first, query_start[-1]))
        # On the host: a model plans from them there, and brings to its device what its kernels read.
        return StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64),
            positions=torch.as_tensor(positions, dtype=torch.int64),
            slot_mapping=torch.as_tensor(np.concatenate(slots), dtype=torch.int64),
            query_start=torch.tensor(query_start, dtype=torch.int32),
            context_lens=torch.tensor(context_lens, dtype=torch.int32),
            block_tables=torch.as_tensor(block_tables),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        )
