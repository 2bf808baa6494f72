"""ModelRunner: turns a step plan into tensors, runs the model and samples. Knows nothing of requests' lives.

Next: `engine/model/interface.py` for the model, `engine/sampling/sampler.py` for the tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.model.batch import StepBatch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest, position_logprobs, sample_rows
from engine.scheduler.plan import SampledToken, ScheduledChunk, StepPlan, StepResult
from engine.sequence import Sequence as EngineSequence
from engine.types import PositionLogprobs

LayerCallback = Callable[[int], None]
"""Called on the engine's thread with a layer's index once the step's KV of that layer is in the cache."""


class ModelRunner:
    """Runs steps of one model over one KV cache, always on the same thread."""

    def __init__(self, model: LanguageModel, kv_cache: KvCache) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self._block_size = kv_cache.layout.block_size

    def run(self, plan: StepPlan, on_layer: LayerCallback | None = None) -> StepResult:
        """Compute a step's KV and sample a token after every chunk that reaches its sequence's end."""
        batch = self._build_batch(plan.chunks)
        logits = self.model.forward(batch, self.kv_cache, on_layer)  # [num_logit_rows, vocab_size] fp32
        rows: NDArray[np.float32] = logits.detach().cpu().numpy()
        sequences = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        token_ids = sample_rows(rows, [self._sample_request(sequence) for sequence in sequences])
        sampled = tuple(
            SampledToken(sequence.request_id, token_id, self._logprobs(rows[row], sequence, token_id))
            for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True))
        )
        return StepResult(sampled)

    def _sample_request(self, sequence: EngineSequence) -> SampleRequest:
        params = sequence.sampling_params
        eos = frozenset[int]() if params.ignore_eos else self.model.config.eos_token_ids
        history = TokenHistory(sequence.token_ids, sequence.num_prompt_tokens)
        return SampleRequest(params, history, params.stop_token_ids | eos)

    @staticmethod
    def _logprobs(row: NDArray[np.float32], sequence: EngineSequence, token_id: int) -> PositionLogprobs | None:
        num_top = sequence.sampling_params.logprobs
        return None if num_top is None else position_logprobs(row, token_id, num_top)

    def _build_batch(self, chunks: Sequence[ScheduledChunk]) -> StepBatch:
        token_ids: list[int] = []
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        slots: list[NDArray[np.int64]] = []
        query_start = [0]
        max_blocks = max(-(-chunk.end // self._block_size) for chunk in chunks)
        block_tables = np.zeros((len(chunks), max_blocks), dtype=np.int32)
        for index, chunk in enumerate(chunks):
            token_ids.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
            query_start.append(query_start[-1] + chunk.num_tokens)
            num_blocks = -(-chunk.end // self._block_size)
            table = np.asarray(chunk.sequence.block_table[:num_blocks], dtype=np.int64)
            block_tables[index, :num_blocks] = table
            chunk_positions = np.arange(chunk.start, chunk.end)
            slots.append(
                table[chunk_positions // self._block_size] * self._block_size + chunk_positions % self._block_size
            )
        logit_rows = [query_start[index + 1] - 1 for index, chunk in enumerate(chunks) if chunk.samples]
        device = self.model.device
        return StepBatch(
            token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
            positions=torch.as_tensor(positions, dtype=torch.int64, device=device),
            slot_mapping=torch.as_tensor(np.concatenate(slots), dtype=torch.int64, device=device),
            query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
            context_lens=torch.tensor([chunk.end for chunk in chunks], dtype=torch.int32, device=device),
            block_tables=torch.as_tensor(block_tables, device=device),
            logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        )
