"""The equivalence ladder on whole engines: however a request is served, its tokens are those it gets alone."""

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.types import EngineRequest, RequestId
from tests.engine_driver import make_engine, make_request, run_alone, run_to_end
from tests.tiny_models import TINY_FAMILIES

FolderOf = Callable[[str], Path]

SAMPLED = {
    "temperature": 0.8,
    "top_p": 0.95,
    "min_p": 0.02,
    "top_k": 50,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}


def _requests(count: int, seed: int = 0, vocab: int = 250) -> list[EngineRequest]:
    """Mixed lengths; every second one is sampled with every field."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        prompt = [rng.randrange(4, vocab) for _ in range(rng.choice([1, 5, 15, 16, 17, 33, 70, 120]))]
        params: dict[str, Any] = {"max_tokens": rng.choice([1, 7, 24]), "ignore_eos": True}
        if index % 2:
            params |= SAMPLED | {"seed": index}
        requests.append(make_request(index + 1, prompt, **params))
    return requests


@pytest.mark.parametrize("family", sorted(TINY_FAMILIES))
def test_batched_equals_alone(tiny_folder: FolderOf, family: str) -> None:
    requests = _requests(12)
    alone = run_alone(make_engine(tiny_folder(family)), requests)
    engine = make_engine(tiny_folder(family))
    for request in requests:
        engine.add(request)
    assert run_to_end(engine) == alone


def test_requests_that_join_and_leave_midway_change_nothing_for_the_others(tiny_folder: FolderOf) -> None:
    requests = _requests(16, seed=3)
    alone = run_alone(make_engine(tiny_folder("llama")), requests)
    engine = make_engine(tiny_folder("llama"))
    waiting = iter(requests)
    removed = {requests[4].request_id: 9, requests[9].request_id: 15}

    def before_step(step: int) -> None:
        for request in itertools.islice(waiting, 1 if step % 2 else 2):
            engine.add(request)
        engine.remove([request_id for request_id, when in removed.items() if when == step])

    tokens = run_to_end(engine, before_step)
    for request in requests:
        got = tokens.get(request.request_id, [])
        expected = alone[request.request_id]
        assert got == (expected[: len(got)] if request.request_id in removed else expected)


@pytest.mark.parametrize("budget", [1, 7, 16, 33, 64])
def test_chunked_prefill_equals_whole(tiny_folder: FolderOf, budget: int) -> None:
    requests = _requests(6, seed=1)
    whole = run_alone(make_engine(tiny_folder("qwen3")), requests)
    engine = make_engine(
        tiny_folder("qwen3"), scheduler=SchedulerConfig(max_num_seqs=min(64, budget), max_num_batched_tokens=budget)
    )
    for request in requests:
        engine.add(request)
    assert run_to_end(engine) == whole


def test_cache_hit_equals_miss(tiny_folder: FolderOf) -> None:
    shared = list(range(5, 75))
    requests = [
        make_request(index, shared + [200 + index] * index, max_tokens=12, ignore_eos=True, **SAMPLED, seed=index)
        for index in range(1, 6)
    ]
    missed = run_alone(make_engine(tiny_folder("qwen2"), prefix_cache=False), requests)
    engine = make_engine(tiny_folder("qwen2"))
    tokens: dict[int, list[int]] = {}
    for request in requests:
        engine.add(request)
        tokens |= run_to_end(engine)
    assert tokens == missed
    assert engine.scheduler.num_cache_hit_tokens == 64 * 4


@pytest.mark.parametrize("block_size", [8, 32])
def test_block_size_changes_nothing(tiny_folder: FolderOf, block_size: int) -> None:
    requests = _requests(6, seed=2)
    expected = run_alone(make_engine(tiny_folder("mistral")), requests)
    assert run_alone(make_engine(tiny_folder("mistral"), block_size=block_size), requests) == expected


def test_preempted_sequences_go_on_as_if_nothing_had_happened(tiny_folder: FolderOf) -> None:
    requests = [
        make_request(index, [10 + index] * 20, max_tokens=60, ignore_eos=True, **SAMPLED, seed=index)
        for index in range(1, 6)
    ]
    alone = run_alone(make_engine(tiny_folder("llama")), requests)
    engine = make_engine(tiny_folder("llama"), num_blocks=14, prefix_cache=False)
    for request in requests:
        engine.add(request)
    assert run_to_end(engine) == alone
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.num_free_blocks == 14


def test_resumed_request_continues_the_tokens_of_the_lost_one(tiny_folder: FolderOf) -> None:
    original = make_request(1, range(5, 40), max_tokens=20, ignore_eos=True, **SAMPLED, seed=77)
    engine = make_engine(tiny_folder("llama3"))
    expected = run_alone(engine, [original])[1]
    for num_done in (1, 7, 19):
        resumed = EngineRequest(RequestId(2), (*original.token_ids, *expected[:num_done]), original.sampling_params, 35)
        engine.pool.flush()
        engine.add(resumed)
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        assert [token for output in outputs for token in output.token_ids] == expected[num_done:]
        assert outputs[0].token_index == num_done


def test_same_seed_gives_same_tokens_and_another_seed_others(tiny_folder: FolderOf) -> None:
    engine = make_engine(tiny_folder("llama"))
    prompt = range(5, 25)
    runs = [
        run_alone(engine, [make_request(index, prompt, temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True)])[
            index
        ]
        for index, seed in ((1, 5), (2, 5), (3, 6))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_logprobs_do_not_depend_on_the_batch(tiny_folder: FolderOf) -> None:
    requests = [make_request(index, [index + 5] * (index * 7), logprobs=3, max_tokens=5) for index in range(1, 6)]

    def collect(add_all_at_once: bool) -> dict[int, list[Any]]:
        engine = make_engine(tiny_folder("llama"))
        logprobs: dict[int, list[Any]] = {}
        groups = [requests] if add_all_at_once else [[request] for request in requests]
        for group in groups:
            for request in group:
                engine.add(request)
            while engine.has_work:
                for output in engine.step():
                    for entry in output.logprobs:
                        values = [entry.sampled, *entry.top]
                        logprobs.setdefault(output.request_id, []).append(
                            [(value.token_id, value.rank, round(value.logprob, 4)) for value in values]
                        )
        return logprobs

    together, alone = collect(True), collect(False)
    assert together == alone
    assert all(len(entry) == 4 for entries in together.values() for entry in entries)


def test_every_step_says_that_it_is_launched_before_blocks_change_hands(
    tiny_folder: FolderOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_folder("llama"), scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8))
    num_free: list[int] = []
    monkeypatch.setattr(engine.kv_cache, "end_step", lambda: num_free.append(engine.pool.num_free_blocks))
    engine.add(make_request(1, range(5, 25), max_tokens=1))
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_free == [254] * num_steps  # in the last one, too, which ends the request
    assert num_steps == 3
