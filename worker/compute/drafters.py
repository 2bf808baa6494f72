"""Builds what drafts tokens on a decode worker: drafter, pacer, and the models they need."""

from collections.abc import Callable
from typing import TypeVar

import structlog

from engine.cache.layout import KvLayout
from engine.config import KvDtype, ModelConfig
from engine.model.files.open import open_weights
from engine.model.files.source import resolve_model
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.sampling.rows import RowSampler, row_sampler
from engine.spec.auto import AutoDrafter
from engine.spec.draft_model import ModelDrafter
from engine.spec.drafter import Drafter
from engine.spec.head.drafter import SOURCE, EagleDrafter
from engine.spec.head.follower import HeadFollower
from engine.spec.head.loader import find_head, load_draft_head
from engine.spec.head.port import DraftHead
from engine.spec.ngram import NgramDrafter
from engine.spec.pace.pacer import DraftPacer
from engine.spec.pace.probe import probe_shape
from engine.spec.speculation import Speculation
from kvrelay.errors import InvalidRequest
from kvrelay.text.tokenizer import load_tokenizer
from worker.settings import WorkerSettings

_log = structlog.get_logger(__name__)

_Found = TypeVar("_Found")
_NO_DRAFT_MODEL = "names no model; speculation with a draft model needs one"


def load_head(settings: WorkerSettings, model: LanguageModel) -> DraftHead | None:
    """Return the draft head to run behind the model; None where none is asked for or, with `auto`, none fits.

    Prefill workers run it too, so that decode need not compute its KV of a prompt.

    Raises:
        InvalidRequest: There is no such head, or it cannot be used with the model; names `draft_head`.
    """
    return _unless_none_fits(settings, lambda: load_draft_head(model, settings.draft_head))


def num_draft_layers(settings: WorkerSettings, config: ModelConfig) -> int:
    """Return how many layers of KV the draft head of `load_head` adds, found out without the model's weights.

    Raises:
        InvalidRequest: As `load_head`.
    """
    return 0 if _unless_none_fits(settings, lambda: find_head(config, settings.draft_head)) is None else 1


def _unless_none_fits(settings: WorkerSettings, find: Callable[[], _Found]) -> _Found | None:
    if settings.speculation not in ("eagle", "auto"):
        return None
    try:
        return find()
    except InvalidRequest as error:
        if settings.speculation == "eagle" or settings.draft_head:
            raise
        _log.info("speculation.no_draft_head", reason=error.description, fallback="ngram")
        return None


def make_speculation(
    settings: WorkerSettings,
    model: LanguageModel,
    kv_cache: KvCache,
    rows: RowSampler | None = None,
    follower: HeadFollower | None = None,
) -> Speculation | None:
    """Return what drafts tokens, or None where nothing is to be drafted.

    Args:
        settings: The worker's.
        model: The target.
        kv_cache: Its cache, no block of which is in use yet.
        rows: What draws for the target, where that is on the host; drafters draw with it too.
        follower: Of the head from `load_head`, where there is one.

    Raises:
        InvalidRequest: The draft model cannot be used with the target; names `draft_model`.
    """
    # A prefill worker hands a request over after one token: there is nothing to draft.
    if settings.speculation == "none" or settings.section == "prefill":
        return None
    pacer = DraftPacer(settings.max_draft_tokens, probe_shape(model, kv_cache))
    drafter: Drafter
    match settings.speculation:
        case "ngram":
            drafter = NgramDrafter(pacer)
        case "draft":
            drafter = _model_drafter(settings, model, kv_cache, pacer, rows)
        case "eagle" | "auto":
            drafter = _head_drafter(settings, model, pacer, rows, follower)
    return Speculation(drafter, pacer)


def _head_drafter(
    settings: WorkerSettings,
    model: LanguageModel,
    pacer: DraftPacer,
    rows: RowSampler | None,
    follower: HeadFollower | None,
) -> Drafter:
    if follower is None:
        return NgramDrafter(pacer)  # `auto` without a head
    config = model.config
    head = EagleDrafter(follower, pacer, config.vocab_size, config.eos_token_ids, rows)
    return head if settings.speculation == "eagle" else AutoDrafter(NgramDrafter(pacer), head, SOURCE, pacer)


def _model_drafter(
    settings: WorkerSettings, target: LanguageModel, kv_cache: KvCache, pacer: DraftPacer, rows: RowSampler | None
) -> ModelDrafter:
    if not settings.draft_model:
        raise InvalidRequest("draft_model", _NO_DRAFT_MODEL)
    device = target.device
    try:
        model = load_model(
            settings.draft_model,
            device=device,
            compute="auto" if settings.compute == "triton" else settings.compute,
            num_threads=settings.threads or None,
        )
    except InvalidRequest as error:
        raise InvalidRequest("draft_model", f"{settings.draft_model}: {error.description}") from error
    check_same_tokens(settings.model, target.config, settings.draft_model, model.config)
    # With the target's own type, the target as its own drafter is right each time.
    dtype = kv_cache.layout.dtype if device.type == "cpu" else KvDtype.FP32
    layout = KvLayout.of_model(model.fingerprint, model.config, settings.block_size, dtype)
    num_blocks = layout.blocks_within(settings.draft_kv_memory_mib << 20)
    if num_blocks < 1:
        raise InvalidRequest("draft_kv_memory_mib", "does not hold a single KV block of the draft model")
    rows = rows or row_sampler(settings.threads or None)
    return ModelDrafter(model, KvCache(layout, num_blocks, device), pacer, target.config.eos_token_ids, rows)


def check_draft_model(settings: WorkerSettings, target: ModelConfig) -> None:
    """Make sure that the draft model could be loaded and used with the target; reads its files, but no weights.

    Raises:
        InvalidRequest: It could not; names `draft_model`.
    """
    if not settings.draft_model:
        raise InvalidRequest("draft_model", _NO_DRAFT_MODEL)
    try:
        config, _ = open_weights(settings.draft_model)
    except InvalidRequest as error:
        raise InvalidRequest("draft_model", f"{settings.draft_model}: {error.description}") from error
    check_same_tokens(settings.model, target, settings.draft_model, config)


def check_same_tokens(target_source: str, target: ModelConfig, draft_source: str, draft: ModelConfig) -> None:
    """Make sure that a token id means the same to both models.

    Raises:
        InvalidRequest: It does not; names `draft_model`.
    """
    sizes = target.vocab_size, draft.vocab_size
    if sizes[0] != sizes[1]:
        raise InvalidRequest("draft_model", f"has {sizes[1]} token ids, the model {sizes[0]}")
    paths = [resolve_model(source).path for source in (target_source, draft_source)]
    if paths[0] == paths[1]:
        return
    ours, theirs = (load_tokenizer(path) for path in paths)
    if ours.vocab_size != theirs.vocab_size or ours.special_token_ids != theirs.special_token_ids:
        raise InvalidRequest("draft_model", "has another tokenizer than the model")
    for token_id in range(ours.vocab_size):
        if ours.token_bytes(token_id, False) != theirs.token_bytes(token_id, False):
            raise InvalidRequest("draft_model", f"has another tokenizer: token {token_id} is another text")
