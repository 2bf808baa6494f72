"""The target's own text: a function of the seed, whatever is computed beside it."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, KvDtype, SchedulerConfig
from engine.engine import Engine
from engine.model.files.source import resolve_model
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.training.corpus import Conversation, Corpus
from engine.training.generate import Generator, is_looping
from engine.training.settings import GenerationSettings
from engine.training.topics import KINDS, assign
from kvrelay.text.tokenizer import load_tokenizer

SETTINGS = GenerationSettings(num_tokens=300, minutes=5, seed=3, num_streams=4, max_context=96)


def _write(folder: Path, source: Path | str, settings: GenerationSettings) -> list[Conversation]:
    model = load_model(str(source))
    config = model.config
    layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, 16, KvDtype.FP32)
    engine = Engine(model, KvCache(layout, 256, model.device), CacheConfig(256), SchedulerConfig())
    tokenizer = load_tokenizer(resolve_model(str(source)).path)
    with Corpus(folder) as corpus:
        Generator(engine, tokenizer, settings).run(corpus, lambda done, wanted: None)
        return corpus.conversations


def _by_index(conversations: list[Conversation]) -> dict[int, Conversation]:
    return {conversation.index: conversation for conversation in conversations}


def test_conversations_follow_from_seed_and_number_alone(tmp_path: Path, tiny_target: Path) -> None:
    few = _by_index(_write(tmp_path / "few", tiny_target, SETTINGS))
    many = _by_index(_write(tmp_path / "many", tiny_target, replace(SETTINGS, num_streams=9)))
    other = _by_index(_write(tmp_path / "other", tiny_target, replace(SETTINGS, seed=4)))
    both = few.keys() & many.keys()
    assert len(both) >= 3
    assert all(few[index] == many[index] for index in both)
    assert all(few[index] != other[index] for index in few.keys() & other.keys())


def test_answers_fill_what_was_asked_for_and_fit_the_context(tmp_path: Path, tiny_target: Path) -> None:
    conversations = _write(tmp_path, tiny_target, SETTINGS)
    assert sum(each.num_answer_tokens for each in conversations) >= SETTINGS.num_tokens
    assert all(len(each.token_ids) <= SETTINGS.max_context for each in conversations)
    assert all(0 < first < end <= len(each.token_ids) for each in conversations for first, end in each.answers)


def test_run_that_goes_on_writes_only_what_is_missing(tmp_path: Path, tiny_target: Path) -> None:
    first = _write(tmp_path, tiny_target, replace(SETTINGS, num_tokens=100))
    both = _write(tmp_path, tiny_target, SETTINGS)
    assert both[: len(first)] == first
    assert len({each.index for each in both}) == len(both) > len(first)


def test_chat_model_writes_the_users_turn_too(tmp_path: Path) -> None:
    settings = replace(SETTINGS, num_tokens=60, max_context=400, num_streams=6)
    tokenizer = load_tokenizer(resolve_model("smollm2").path)
    for conversation in _write(tmp_path, "smollm2", settings):
        text = tokenizer.decode(conversation.token_ids, skip_special_tokens=False)
        opening = assign(settings.seed, conversation.index).opening
        assert f"<|im_start|>user\n{opening}" in text
        for first, end in conversation.answers:
            before = tokenizer.decode(conversation.token_ids[:first], skip_special_tokens=False)
            assert before.endswith("<|im_start|>assistant\n")
            assert tokenizer.decode(conversation.token_ids[first:end]).strip()


@pytest.mark.parametrize(("period", "is_loop"), [(1, True), (5, True), (12, True), (13, False)])
def test_short_patterns_over_and_over_are_loops(period: int, is_loop: bool) -> None:
    tokens = [index % period for index in range(240)]
    assert is_looping([7, 8, *tokens]) is is_loop
    assert not is_looping(tokens[:150])
    assert not is_looping([*tokens, 99])


def test_every_kind_of_task_comes_up() -> None:
    assert {assign(1, index).kind.name for index in range(400)} == {kind.name for kind in KINDS}
