"""ModelRunner: turns a step plan into tensors, runs the model and samples. Knows nothing of requests' lives.

Next: `engine/model/interface.py` for the model, `engine/spec/sampling.py` for the tokens.
"""

from collections.abc import Callable

from torch import Tensor

from engine.model.batch import SequenceRows, build_batch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.sampling.distribution import TokenHistory
from engine.sampling.sampler import SampleRequest
from engine.scheduler.plan import SampledTokens, ScheduledChunk, StepPlan, StepResult
from engine.sequence import Sequence as EngineSequence
from engine.spec.head.follower import HeadFollower
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
        batch = build_batch([_rows(chunk) for chunk in plan.chunks], self._block_size)
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
            num_accepted = [max(0, next(new_counts) - 1) if chunk.samples else 0 for chunk in plan.chunks]
            self._follower.settle(plan.chunks, num_accepted)
        return StepResult(
            tuple(
                SampledTokens(sequence.request_id, new.token_ids, new.logprobs, new.error)
                for sequence, new in zip(sequences, sampled, strict=True)
            )
        )

    def _sample_request(self, sequence: EngineSequence) -> SampleRequest:
        params = sequence.sampling_params
        history = TokenHistory(sequence.token_ids, sequence.num_prompt_tokens)
        return SampleRequest(params, history, params.all_stop_ids(self.model.config.eos_token_ids))


def _rows(chunk: ScheduledChunk) -> SequenceRows:
    """A chunk's tokens and the drafts behind them; logits are wanted from the last token on, if it is sampled from."""
    sequence = chunk.sequence
    token_ids = [*sequence.token_ids[chunk.start : chunk.end], *chunk.draft_token_ids]
    num_logit_rows = 1 + len(chunk.draft_token_ids) if chunk.samples else 0
    return SequenceRows(token_ids, chunk.start, sequence.block_table, num_logit_rows)
