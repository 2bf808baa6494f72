"""The draft model: as its own drafter the target is always right, tokens are the same, and its memory is bounded."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from decode_service.settings import DecodeSettings
from engine.cache.layout import KvLayout
from engine.config import KvDtype, SchedulerConfig
from engine.engine import Engine
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.spec import draft_model
from engine.spec.draft_model import ModelDrafter
from engine.spec.pace.cost import CostShape
from engine.spec.pace.pacer import DraftPacer
from engine.spec.speculation import Speculation
from engine.types import EngineRequest, RequestId
from kvrelay.errors import InvalidRequest
from prefill_service.settings import PrefillSettings
from tests.drafting import EagerPacer
from tests.engine_driver import make_engine, make_request, run_alone
from tests.oracle.test_speculation_ladder import FIELDS, Eager, speculation_requests
from tests.tiny_models import write_tiny_model
from worker.compute import drafters
from worker.compute.drafters import check_same_tokens, make_speculation

FolderOf = Callable[[str], Path]


class AlwaysEager(Eager):
    """Drafts as far as the limit goes, whatever a pass takes."""

    choose_starts = EagerPacer.choose_starts

    def is_worth_a_pass(self, *_: Any, **__: Any) -> bool:
        return True


def _cache(model: LanguageModel, num_blocks: int, dtype: KvDtype = KvDtype.FP32) -> KvCache:
    config = model.config
    layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, 16, dtype)
    return KvCache(layout, num_blocks, torch.device("cpu"))


def _drafter(
    source: Path | str, pacer: DraftPacer, num_blocks: int = 256, eos_token_ids: frozenset[int] = frozenset({2})
) -> ModelDrafter:
    model = load_model(str(source))
    return ModelDrafter(model, _cache(model, num_blocks), pacer, eos_token_ids)


def _run(engine: Engine, requests: list[EngineRequest]) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """Run all at once; returns tokens and every step's (drafted, accepted) of a sequence that went on."""
    tokens: dict[int, list[int]] = {}
    counts: list[tuple[int, int]] = []
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is None:
                counts.append((output.num_draft_tokens, output.num_accepted_tokens))
    return tokens, counts


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_target_as_its_own_drafter_is_accepted_always(tiny_folder: FolderOf, name: str) -> None:
    requests = speculation_requests(FIELDS[name])
    expected = run_alone(make_engine(tiny_folder("llama")), requests)
    pacer = AlwaysEager(5)
    drafter = _drafter(tiny_folder("llama"), pacer)
    tokens, counts = _run(make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer)), requests)
    assert tokens == expected
    assert all(drafted == accepted for drafted, accepted in counts)
    assert sum(drafted for drafted, _ in counts) > 0
    assert drafter.pool.num_free_blocks == 256


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_other_weights_draft_the_same_tokens_with_rejections(
    tiny_folder: FolderOf, tmp_path: Path, family: str
) -> None:
    other = write_tiny_model(tmp_path / "other", family, seed=1)
    requests = speculation_requests(FIELDS["all"] | {"ignore_eos": True, "max_tokens": 40}, count=8)
    expected = run_alone(make_engine(tiny_folder(family)), requests)
    pacer = AlwaysEager(4)
    drafter = _drafter(other, pacer)
    engine = make_engine(
        tiny_folder(family),
        num_blocks=14,
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6),
        speculation=Speculation(drafter, pacer),
    )
    tokens, counts = _run(engine, requests)
    assert tokens == expected
    assert engine.scheduler.num_preemptions > 0
    assert any(drafted > accepted for drafted, accepted in counts)
    assert drafter.pool.num_free_blocks == 256


def test_prompt_is_computed_in_parts_and_drafting_begins_behind_it(
    tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_model, "MIN_CATCH_UP_TOKENS", 10)
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_TOKENS", 10)
    pacer = AlwaysEager(3)
    drafter = _drafter(tiny_folder("llama"), pacer)
    request = make_request(1, range(5, 46), max_tokens=30, ignore_eos=True)
    tokens, counts = _run(make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer)), [request])
    assert tokens == run_alone(make_engine(tiny_folder("llama")), [request])
    drafted = [drafted for drafted, _ in counts]
    assert drafted[:5] == [0] * 5  # the prompt's own step, and 40 of 42 tokens in four parts
    assert min(drafted[5:-1]) == 3


def test_memory_is_bounded_by_forgetting_who_waited_longest(tiny_folder: FolderOf) -> None:
    pacer = AlwaysEager(3)
    drafter = _drafter(tiny_folder("llama"), pacer, num_blocks=6)
    requests = [make_request(index, range(5, 40), max_tokens=30, ignore_eos=True) for index in range(1, 5)]
    engine = make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer))
    expected = run_alone(make_engine(tiny_folder("llama")), requests)
    tokens, counts = _run(engine, requests)
    assert tokens == expected
    assert sum(drafted for drafted, _ in counts) > 0
    drafter.pool.check_invariants()
    assert drafter.pool.num_free_blocks == 6


def test_block_of_a_sequence_that_is_drafted_for_goes_to_nobody_else(tiny_folder: FolderOf) -> None:
    pacer = AlwaysEager(3)
    drafter = _drafter(tiny_folder("llama"), pacer, num_blocks=4)
    engine = make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer))
    engine.add(make_request(1, range(5, 30), max_tokens=60, ignore_eos=True))
    for _ in range(4):
        engine.step()
    first = drafter._states[RequestId(1)].block_table
    engine.add(make_request(2, range(5, 30), max_tokens=60, ignore_eos=True))
    for _ in range(3):
        engine.step()
    second = drafter._states[RequestId(2)].block_table if RequestId(2) in drafter._states else []
    assert not set(first) & set(second)
    while engine.has_work:
        engine.step()
    assert drafter.pool.num_free_blocks == 4


def test_request_without_drafts_costs_the_draft_model_nothing(tiny_folder: FolderOf) -> None:
    pacer = AlwaysEager(3)
    drafter = _drafter(tiny_folder("llama"), pacer)
    engine = make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer))
    engine.add(make_request(1, range(5, 30), num_draft_tokens=0))
    while engine.has_work:
        engine.step()
        assert not drafter._states


def test_drafting_that_costs_as_much_as_it_saves_stops_by_itself(tiny_folder: FolderOf) -> None:
    pacer = DraftPacer(6, CostShape({1: 1.0, 8: 1.5}))
    drafter = _drafter(tiny_folder("llama"), pacer)
    request = make_request(1, range(5, 30), max_tokens=200, ignore_eos=True)
    tokens, counts = _run(make_engine(tiny_folder("llama"), speculation=Speculation(drafter, pacer)), [request])
    assert tokens == run_alone(make_engine(tiny_folder("llama")), [request])
    # The target itself takes a whole step's time for each draft.
    assert sum(drafted for drafted, _ in counts[-100:]) <= 5


def test_model_of_another_vocabulary_is_refused(tiny_folder: FolderOf) -> None:
    target, other = load_model(str(tiny_folder("llama"))), load_model(str(tiny_folder("llama3")))
    with pytest.raises(InvalidRequest, match="512 token ids, the model 257") as caught:
        check_same_tokens(str(tiny_folder("llama")), target.config, str(tiny_folder("llama3")), other.config)
    assert caught.value.field == "draft_model"


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    """Tokens that are given bytes."""

    pieces: tuple[bytes, ...]
    special_token_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token_id: int, skip_special_tokens: bool) -> bytes:
        assert not skip_special_tokens
        return self.pieces[token_id]


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (FakeTokenizer((b"a", b"b", b"<s>"), frozenset({2})), None),
        (FakeTokenizer((b"a", b"c", b"<s>"), frozenset({2})), "token 1 is another text"),
        (FakeTokenizer((b"a", b"b", b"<s>")), "another tokenizer"),
        (FakeTokenizer((b"a", b"b"), frozenset({2})), "another tokenizer"),
    ],
)
def test_model_of_another_tokenizer_is_refused(
    theirs: FakeTokenizer,
    reason: str | None,
    tiny_folder: FolderOf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, other = tiny_folder("llama"), write_tiny_model(tmp_path / "other", "llama", seed=1)
    ours = FakeTokenizer((b"a", b"b", b"<s>"), frozenset({2}))
    monkeypatch.setattr(drafters, "load_tokenizer", lambda path: ours if path == source else theirs)
    target, draft = load_model(str(source)), load_model(str(other))
    if reason is None:
        check_same_tokens(str(source), target.config, str(other), draft.config)
        return
    with pytest.raises(InvalidRequest, match=reason) as caught:
        check_same_tokens(str(source), target.config, str(other), draft.config)
    assert caught.value.field == "draft_model"


def test_settings_lead_to_a_draft_model(tiny_folder: FolderOf) -> None:
    source = str(tiny_folder("llama"))
    target = load_model(source)
    cache = _cache(target, 64)
    flags = ["--model", source, "--speculation", "draft"]
    settings = DecodeSettings.parse([*flags, "--draft-model", source], "decode")
    assert make_speculation(settings, target, cache) is not None
    prefill = PrefillSettings.parse([*flags, "--draft-model", source], "prefill")
    assert make_speculation(prefill, target, cache) is None
    for wrong, reason in ((flags, "names no model"), ([*flags, "--draft-model", "/nowhere"], "/nowhere")):
        with pytest.raises(InvalidRequest, match=reason) as caught:
            make_speculation(DecodeSettings.parse(wrong, "decode"), target, cache)
        assert caught.value.field == "draft_model"
