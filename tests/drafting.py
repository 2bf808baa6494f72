"""Engines with a random draft head, for tests: everything is drafted and verified, whatever it costs."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, KvDtype, SchedulerConfig
from engine.engine import Engine, ExportListener
from engine.model.cpu.model import NativeModel
from engine.model.kv_cache import KvCache
from engine.model.llama import LlamaModel
from engine.model.loader import load_model
from engine.sequence import Sequence
from engine.spec.auto import AutoDrafter
from engine.spec.drafter import Drafter, Proposal
from engine.spec.head.drafter import SOURCE, EagleDrafter
from engine.spec.head.eager import TorchDraftHead
from engine.spec.head.follower import HeadFollower
from engine.spec.head.native import NativeDraftHead
from engine.spec.ngram import NgramDrafter
from engine.spec.pace.pacer import DraftPacer, StartChoice
from engine.spec.speculation import Speculation
from tests.tiny_heads import make_tiny_head


class EagerPacer(DraftPacer):
    """Drafts and verifies all that it may, whatever it costs."""

    def choose_starts(self, source: str, sequences: SequenceOf[Sequence]) -> StartChoice:
        return StartChoice(tuple(sequences), is_try=False)

    def is_worth_a_pass(self, source: str, reached: SequenceOf[tuple[Sequence, float]], num_drafted: int = 0) -> bool:
        return True

    def choose(self, sequences: SequenceOf[Sequence], proposals: SequenceOf[Proposal]) -> list[int]:
        super().choose(sequences, proposals)
        counts = [min(len(proposal.token_ids), self.max_draft_tokens) for proposal in proposals]
        # Learn from all of them: what the pacer would have chosen depends on how long steps took.
        self._chosen = {
            sequence.request_id: proposal.evidence[:count]
            for sequence, proposal, count in zip(sequences, proposals, counts, strict=True)
        }
        return counts


@dataclass(frozen=True, slots=True)
class Drafting:
    """An engine with a head, and what drafts in it."""

    engine: Engine
    speculation: Speculation
    follower: HeadFollower


def make_drafting(
    source: Path | str,
    *,
    drafter: Literal["eagle", "auto"] | None = "eagle",
    max_draft_tokens: int = 5,
    num_blocks: int = 256,
    dtype: KvDtype = KvDtype.FP32,
    scheduler: SchedulerConfig | None = None,
    prefix_cache: bool = True,
    num_threads: int = 1,
    listener: ExportListener | None = None,
) -> Drafting:
    """Return an engine with a random head; with `drafter` None the head only follows, as on a prefill worker."""
    model = load_model(str(source), num_threads=num_threads)
    config = model.config
    # Every token can be drafted, so that now and then one is right.
    file = make_tiny_head(config, num_vocab_ids=config.vocab_size)
    layout = KvLayout(
        model.fingerprint, config.num_layers + 1, config.num_kv_heads, config.head_dim, 16, dtype, num_draft_layers=1
    )
    cache = KvCache(layout, num_blocks, torch.device("cpu"))
    if isinstance(model, NativeModel):
        follower = HeadFollower(model, NativeDraftHead(model, file), cache)
    else:
        assert isinstance(model, LlamaModel)
        follower = HeadFollower(model, TorchDraftHead(model, file), cache)
    pacer = EagerPacer(max_draft_tokens)
    proposer: Drafter = EagleDrafter(follower, pacer, config.vocab_size, config.eos_token_ids)
    if drafter == "auto":
        proposer = AutoDrafter(NgramDrafter(pacer), proposer, SOURCE, pacer)
    speculation = Speculation(proposer, pacer)
    engine = Engine(
        model,
        cache,
        CacheConfig(num_blocks, 16, dtype, prefix_cache),
        scheduler or SchedulerConfig(),
        listener,
        None if drafter is None else speculation,
        follower=follower,
    )
    return Drafting(engine, speculation, follower)


def make_plain(source: Path | str, dtype: KvDtype = KvDtype.FP32, listener: ExportListener | None = None) -> Engine:
    """Return an engine without a head, of the same numerics."""
    model = load_model(str(source), num_threads=1)
    config = model.config
    layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, 16, dtype)
    cache = KvCache(layout, 256, torch.device("cpu"))
    return Engine(model, cache, CacheConfig(256, 16, dtype), SchedulerConfig(), listener)
