"""A draft head is invisible: tokens are those of plain decoding for every sampling field, batch mix and memory."""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest

from engine.config import KvDtype, SchedulerConfig
from engine.sequence import Sequence as EngineSequence
from engine.spec.head import drafter as eagle
from engine.spec.pace.pacer import StartChoice
from engine.types import EngineRequest, RequestId
from tests.drafting import EagerPacer, make_drafting, make_plain
from tests.engine_driver import arriving, make_request, run_alone, run_to_end
from tests.oracle.test_speculation_ladder import FIELDS
from tests.tiny_models import write_tiny_gguf

FolderOf = Callable[[str], Path]
DrafterName = Literal["eagle", "auto"]


def requests_of(fields: Mapping[str, Any], count: int = 5, max_tokens: int = 24) -> list[EngineRequest]:
    rng = random.Random(4)
    requests = []
    for index in range(1, count + 1):
        period = [rng.randrange(4, 250) for _ in range(rng.choice([3, 8]))]
        prompt = (period * 20)[: rng.choice([6, 17, 40])]
        requests.append(make_request(index, prompt, **{"max_tokens": max_tokens, "seed": index} | dict(fields)))
    return requests


@pytest.fixture(scope="module")
def quantized(tiny_folder: FolderOf) -> FolderOf:
    def write(family: str) -> Path:
        path = tiny_folder(family).with_suffix(".eagle.gguf")
        return path if path.exists() else write_tiny_gguf(tiny_folder(family), path, gguf.GGMLQuantizationType.Q8_0)

    return write


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize("drafter", ["eagle", "auto"])
def test_a_head_changes_no_token(tiny_folder: FolderOf, drafter: DrafterName, name: str) -> None:
    requests = requests_of(FIELDS[name])
    expected = run_alone(make_plain(tiny_folder("llama")), requests)
    drafting = make_drafting(tiny_folder("llama"), drafter=drafter)
    for request in requests:
        drafting.engine.add(request)
    assert run_to_end(drafting.engine) == expected
    assert drafting.engine.pool.num_free_blocks == 256
    assert drafting.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("drafter", ["eagle", "auto"])
@pytest.mark.parametrize("fields", ["greedy", "all"])
@pytest.mark.parametrize("dtype", [KvDtype.FP32, KvDtype.INT8], ids=str)
def test_a_native_head_changes_no_token(quantized: FolderOf, drafter: DrafterName, fields: str, dtype: KvDtype) -> None:
    requests = requests_of(FIELDS[fields] | {"ignore_eos": True})
    expected = run_alone(make_plain(quantized("llama"), dtype), requests)
    drafting = make_drafting(quantized("llama"), drafter=drafter, dtype=dtype, num_threads=2)
    for request in requests:
        drafting.engine.add(request)
    assert run_to_end(drafting.engine) == expected
    assert drafting.speculation.num_draft_tokens > 0


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
@pytest.mark.parametrize("drafter", ["eagle", "auto"])
def test_a_head_goes_with_chunks_preemption_and_arrivals(
    tiny_folder: FolderOf, drafter: DrafterName, family: str
) -> None:
    requests = requests_of(FIELDS["all"] | {"ignore_eos": True}, count=10, max_tokens=40)
    expected = run_alone(make_plain(tiny_folder(family)), requests)
    drafting = make_drafting(
        tiny_folder(family),
        drafter=drafter,
        num_blocks=14,
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6),
    )
    engine = drafting.engine
    assert run_to_end(engine, arriving(engine, requests)) == expected
    assert engine.scheduler.num_preemptions > 0
    assert drafting.speculation.num_draft_tokens > 0


def test_drafts_are_the_same_after_a_chunked_prefill(quantized: FolderOf) -> None:
    """The head's KV and features do not depend on how the prompt was computed."""
    counts = []
    for budget in (512, 7):
        drafting = make_drafting(
            quantized("llama"),
            scheduler=SchedulerConfig(max_num_seqs=min(64, budget), max_num_batched_tokens=budget),
            prefix_cache=False,
        )
        drafting.engine.add(make_request(1, range(5, 60), max_tokens=40, ignore_eos=True))
        run_to_end(drafting.engine)
        counts.append((drafting.speculation.num_draft_tokens, drafting.speculation.num_accepted_tokens))
    # The smaller budget cuts no draft: 1 + 5 rows fit into 7.
    assert counts[0] == counts[1]


def _starting(is_wanted: Callable[[EngineSequence], bool]) -> Callable[..., StartChoice]:
    """A pacer's choice: the sequences that are wanted."""

    def choose_starts(_: EagerPacer, __: str, sequences: Sequence[EngineSequence]) -> StartChoice:
        return StartChoice(tuple(filter(is_wanted, sequences)), is_try=False)

    return choose_starts


@pytest.mark.parametrize("first_draft_at", [17, 50])
def test_drafts_are_the_same_after_a_pause(
    quantized: FolderOf, monkeypatch: pytest.MonkeyPatch, first_draft_at: int
) -> None:
    """A head that catches up on many steps at once drafts what it would have drafted after each of them."""
    monkeypatch.setattr(eagle, "GIVE_UP_AFTER", 100)

    def drafts_by_length(start: int) -> dict[int, tuple[int, ...]]:
        drafting = make_drafting(quantized("llama"))
        monkeypatch.setattr(EagerPacer, "choose_starts", _starting(lambda sequence: sequence.num_tokens >= start))
        propose, found = drafting.speculation.propose, {}

        def observe(sequences: Sequence[EngineSequence]) -> dict[RequestId, tuple[int, ...]]:
            proposed = propose(sequences)
            if sequences and proposed:
                found[sequences[0].num_tokens] = proposed[sequences[0].request_id]
            return proposed

        monkeypatch.setattr(drafting.speculation, "propose", observe)
        drafting.engine.add(make_request(1, range(5, 14), max_tokens=70, ignore_eos=True))
        run_to_end(drafting.engine)
        return found

    always, later = drafts_by_length(0), drafts_by_length(first_draft_at)
    assert min(always) < min(later) == first_draft_at
    common = always.keys() & later.keys()
    assert len(common) > 10
    # How many are drafted is a matter of what was learned by then.
    shared = {length: min(len(always[length]), len(later[length])) for length in common}
    assert all(always[length][:count] == later[length][:count] for length, count in shared.items())


@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_sequence_that_is_not_drafted_for_is_given_up(
    quantized: FolderOf, monkeypatch: pytest.MonkeyPatch, has_neighbour: bool
) -> None:
    monkeypatch.setattr(eagle, "GIVE_UP_AFTER", 32)
    drafting = make_drafting(quantized("llama"))
    wanted = [make_request(1, range(5, 14), max_tokens=90, ignore_eos=True)]
    if has_neighbour:  # begins when the other was given up: steps with a prompt, and steps of both
        wanted.append(make_request(2, range(30, 70), max_tokens=20, ignore_eos=True))
    expected = run_alone(make_plain(quantized("llama")), wanted)
    monkeypatch.setattr(EagerPacer, "choose_starts", _starting(lambda sequence: sequence.request_id == 2))
    drafting.engine.add(wanted[0])
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for step in range(200):
        for output in drafting.engine.step():
            tokens[output.request_id] += output.token_ids
        if not drafting.engine.has_work:
            break
        assert drafting.follower.can_draft(RequestId(1)) == (step < eagle.GIVE_UP_AFTER or len(tokens[1]) == 90)
        if step == eagle.GIVE_UP_AFTER + 6:
            assert not drafting.follower._waiting
            assert not drafting.follower._newest
            for request in wanted[1:]:
                drafting.engine.add(request)
    assert {request.request_id: tokens[request.request_id] for request in wanted} == expected
    assert (drafting.speculation.num_draft_tokens > 0) == has_neighbour


def test_a_cached_prefix_is_drafted_for_too(tiny_folder: FolderOf) -> None:
    drafting = make_drafting(tiny_folder("llama"))
    request = make_request(1, range(5, 55), max_tokens=20, ignore_eos=True)
    expected = run_alone(make_plain(tiny_folder("llama")), [request])[1]
    for request_id in (1, 2):
        drafting.engine.add(make_request(request_id, request.token_ids, max_tokens=20, ignore_eos=True))
        before = drafting.speculation.num_draft_tokens
        assert run_to_end(drafting.engine)[request_id] == expected
        assert drafting.speculation.num_draft_tokens > before
    assert drafting.engine.scheduler.num_cache_hit_tokens == 48


def test_what_is_kept_of_a_sequence_goes_with_it(tiny_folder: FolderOf) -> None:
    drafting = make_drafting(tiny_folder("llama"))
    engine = drafting.engine
    for request in requests_of({"temperature": 0.0, "ignore_eos": True}):
        engine.add(request)
    for _ in range(4):
        engine.step()
    assert drafting.follower.export(engine.scheduler.decodes()[0].request_id)
    engine.remove([engine.scheduler.decodes()[0].request_id])
    while engine.has_work:
        engine.step()
    assert all(drafting.follower.export(request.request_id) == b"" for request in requests_of({}))


def test_looking_ahead_leaves_each_running_sequence_a_block(tiny_folder: FolderOf) -> None:
    drafting = make_drafting(tiny_folder("llama"), max_draft_tokens=20, num_blocks=8)
    engine = drafting.engine
    for index in (1, 2):
        engine.add(make_request(index, range(4, 20), max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.pool.num_free_blocks >= 2
    while engine.has_work:
        engine.step()
    assert engine.scheduler.num_preemptions == 0
