"""Speculation is invisible: tokens are those of plain decoding for every drafter, field and batch mix."""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest

from engine.config import SchedulerConfig
from engine.sequence import Sequence
from engine.spec.drafter import Drafter, Evidence, Proposal
from engine.spec.ngram import NgramDrafter
from engine.spec.pace.pacer import DraftPacer
from engine.spec.speculation import Speculation
from engine.types import EngineRequest, RequestId
from tests.engine_driver import arriving, make_engine, make_request, run_alone, run_to_end

FolderOf = Callable[[str], Path]
KNOWN = Evidence("known", 0, 0.5)


class KnowingDrafter:
    """Knows what will come and is wrong at random: acceptance is neither 0 nor 1."""

    name = "knowing"

    def __init__(self, truth: dict[int, list[int]], error_rate: float) -> None:
        self._truth = truth
        self._error_rate = error_rate
        self._rng = random.Random(0)

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        found = []
        for sequence, limit in zip(sequences, max_tokens, strict=True):
            truth = self._truth.get(sequence.request_id, [])[sequence.num_output_tokens :][: max(limit, 0)]
            drafts = [token if self._rng.random() >= self._error_rate else max(token - 1, 0) for token in truth]
            found.append(Proposal(tuple(drafts), (KNOWN,) * len(drafts)))
        return found

    def forget(self, request_id: RequestId) -> None:
        pass


class Eager(DraftPacer):
    """Always verifies all that is proposed."""

    def choose(self, sequences: SequenceOf[Sequence], proposals: SequenceOf[Proposal]) -> list[int]:
        return [min(len(proposal.token_ids), self.max_draft_tokens) for proposal in proposals]


FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "presence_frequency": {"temperature": 0.7, "presence_penalty": 1.0, "frequency_penalty": 0.4},
    "logit_bias": {"temperature": 0.8, "logit_bias": {7: 3.0, 9: -50.0}},
    "allowed": {"temperature": 1.0, "allowed_token_ids": frozenset(range(4, 40))},
    "bad_words": {"temperature": 1.0, "bad_words": ((5,), (6, 7), (8, 9, 10))},
    "min_tokens": {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": frozenset(range(4, 120))},
    "stop_tokens": {"temperature": 1.0, "stop_token_ids": frozenset(range(4, 30))},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "all": {
        "temperature": 0.8,
        "top_p": 0.95,
        "min_p": 0.05,
        "top_k": 40,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {7: 1.0},
        "bad_words": ((6, 7),),
        "min_tokens": 3,
    },
}


def speculation_requests(fields: dict[str, Any], count: int = 5) -> list[EngineRequest]:
    rng = random.Random(4)
    requests = []
    for index in range(1, count + 1):
        period = [rng.randrange(4, 250) for _ in range(rng.choice([3, 8]))]
        prompt = (period * 20)[: rng.choice([6, 17, 40])]
        requests.append(make_request(index, prompt, **{"max_tokens": 24, "seed": index} | fields))
    return requests


def _drafters(truth: dict[int, list[int]]) -> dict[str, Drafter]:
    return {"ngram": NgramDrafter(DraftPacer(6)), "good": KnowingDrafter(truth, 0.1), "bad": KnowingDrafter(truth, 0.6)}


@pytest.mark.parametrize("name", sorted(FIELDS))
@pytest.mark.parametrize("drafter", ["ngram", "good", "bad"])
def test_speculative_equals_plain(tiny_folder: FolderOf, name: str, drafter: str) -> None:
    requests = speculation_requests(FIELDS[name])
    expected = run_alone(make_engine(tiny_folder("llama")), requests)
    speculation = Speculation(_drafters(expected)[drafter], Eager(6))
    engine = make_engine(tiny_folder("llama"), speculation=speculation)
    for request in requests:
        engine.add(request)
    assert run_to_end(engine) == expected
    assert engine.pool.num_free_blocks == 256
    if drafter == "good":
        assert speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("family", ["qwen2", "mistral", "llama3"])
def test_speculation_goes_with_chunks_preemption_and_arrivals(tiny_folder: FolderOf, family: str) -> None:
    requests = speculation_requests(FIELDS["all"] | {"ignore_eos": True, "max_tokens": 40}, count=10)
    expected = run_alone(make_engine(tiny_folder(family)), requests)
    speculation = Speculation(KnowingDrafter(expected, 0.2), Eager(5))
    engine = make_engine(
        tiny_folder(family),
        num_blocks=14,
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=6),
        speculation=speculation,
    )
    assert run_to_end(engine, arriving(engine, requests)) == expected
    assert engine.scheduler.num_preemptions > 0
    assert speculation.num_accepted_tokens > 0


def test_sequences_with_and_without_drafts_share_a_step(tiny_folder: FolderOf) -> None:
    requests = speculation_requests({"temperature": 0.0, "ignore_eos": True})
    requests[1] = make_request(2, requests[1].token_ids, max_tokens=24, ignore_eos=True, num_draft_tokens=0)
    expected = run_alone(make_engine(tiny_folder("llama")), requests)
    engine = make_engine(tiny_folder("llama"), speculation=Speculation(KnowingDrafter(expected, 0.0), Eager(4)))
    for request in requests:
        engine.add(request)
    drafted: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            drafted[output.request_id] = drafted.get(output.request_id, 0) + output.num_draft_tokens
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == expected
    assert drafted[2] == 0
    assert min(count for request_id, count in drafted.items() if request_id != 2) > 0


def test_rejected_drafts_never_reach_the_prefix_cache(tiny_folder: FolderOf) -> None:
    request = make_request(1, range(5, 20), max_tokens=60, ignore_eos=True)
    expected = run_alone(make_engine(tiny_folder("llama")), [request])[1]
    engine = make_engine(tiny_folder("llama"), speculation=Speculation(KnowingDrafter({1: expected}, 0.5), Eager(8)))
    engine.add(request)
    run_to_end(engine)
    full = [*request.token_ids, *expected]
    for block in engine.pool.cached_blocks():
        assert any(tuple(full[i : i + 16]) == block.token_ids for i in range(0, len(full), 16))
    follow_up = make_request(2, [*full, 9], max_tokens=10, ignore_eos=True)
    plain = run_alone(make_engine(tiny_folder("llama")), [follow_up])[2]
    engine.add(follow_up)
    assert run_to_end(engine)[2] == plain
