"""On a real checkpoint in the default CPU path: questions of Spec-Bench get the tokens of plain decoding.

The engine is a decode worker's. Greedy and sampled requests share each batch; the plain run is the same requests with
no drafts asked for. That a batch changes no token is shown elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.clusters import setting_choices
from benchmarks.common.data import Question, spec_bench_questions
from decode_service.settings import DecodeSettings
from engine.engine import Engine
from engine.model.cpu.model import NativeModel
from engine.sequence import Sequence as EngineSequence
from engine.spec.drafter import Proposal
from engine.spec.pace.pacer import DraftPacer
from engine.types import EngineRequest, RequestId, SamplingParams
from kvrelay.text.tokenizer import Tokenizer, load_tokenizer
from tests.drafting import EagerPacer
from worker.compute.bootstrap import build_engine

GROUP = 8
"""Questions in a batch, each greedy and sampled."""
NUM_BLOCKS = 1000
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, min_p=0.05, repetition_penalty=1.1)
DRAFTERS = [name for name in setting_choices("speculation") if name not in ("none", "draft")]
"""`draft` has its own test below: with the target as draft model it is right always, and slow."""


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(smollm2_gguf)


def make_engine(drafter: str, *flags: str) -> Engine:
    limits = [
        "--threads",
        "1",
        "--num-blocks",
        str(NUM_BLOCKS),
        "--max-num-seqs",
        str(2 * GROUP),
        "--max-num-batched-tokens",
        "256",
    ]
    engine = build_engine(DecodeSettings.parse(["--speculation", drafter, *limits, *flags], "decode"))
    assert isinstance(engine.model, NativeModel)
    return engine


def spread(count: int) -> list[Question]:
    """Questions of all kinds, evenly spread over the 480."""
    questions = spec_bench_questions()
    return [questions[index * len(questions) // count] for index in range(count)]


def batches_of(
    questions: Sequence[Question], tokenizer: Tokenizer, max_tokens: int = 64
) -> Iterator[list[EngineRequest]]:
    """Batches of requests, each question once greedy and once sampled."""
    for start in range(0, len(questions), GROUP):
        batch: list[EngineRequest] = []
        for place, question in enumerate(questions[start : start + GROUP]):
            token_ids = tuple(tokenizer.encode_chat([("user", question.turns[0])]))
            for params in (GREEDY, SAMPLED):
                params = replace(params, seed=start + place, max_tokens=max_tokens)
                batch.append(EngineRequest(RequestId(len(batch) + 1), token_ids, params, len(token_ids)))
        yield batch


def run(
    engine: Engine, batch: Sequence[EngineRequest], num_draft_tokens: int | None
) -> tuple[dict[int, list[int]], int, int]:
    """Tokens by request, and how many were drafted and accepted."""
    for request in batch:
        params = replace(request.sampling_params, num_draft_tokens=num_draft_tokens)
        engine.add(replace(request, sampling_params=params))
    tokens: dict[int, list[int]] = {}
    num_drafted = num_accepted = 0
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            num_drafted += output.num_draft_tokens
            num_accepted += output.num_accepted_tokens
    engine.scheduler.check_invariants()
    return tokens, num_drafted, num_accepted


def check_same_tokens(engine: Engine, batches: Iterator[list[EngineRequest]]) -> tuple[int, int]:
    """Compare with plain decoding; returns how many tokens were drafted and accepted."""
    drafted = accepted = 0
    for batch in batches:
        engine.pool.flush()
        expected, num_drafted, _ = run(engine, batch, num_draft_tokens=0)
        assert num_drafted == 0
        found, num_drafted, num_accepted = run(engine, batch, num_draft_tokens=None)
        assert found == expected
        drafted += num_drafted
        accepted += num_accepted
    assert engine.pool.num_free_blocks == NUM_BLOCKS
    return drafted, accepted


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is drafted and verified than pays: rows are what could change a token."""

    def choose(_: DraftPacer, sequences: Sequence[EngineSequence], proposals: Sequence[Proposal]) -> list[int]:
        return [min(len(proposal.token_ids), 7) for proposal in proposals]

    monkeypatch.setattr(DraftPacer, "choose", choose)
    monkeypatch.setattr(DraftPacer, "choose_starts", EagerPacer.choose_starts)
    monkeypatch.setattr(DraftPacer, "is_worth_a_pass", lambda *_, **__: True)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "drafter", [pytest.param(name, marks=() if name == "auto" else pytest.mark.soak) for name in DRAFTERS]
)
def test_sixteen_questions_get_the_tokens_of_plain_decoding(drafter: str, tokenizer: Tokenizer) -> None:
    drafted, accepted = check_same_tokens(
        make_engine(drafter, "--max-draft-tokens", "7"), batches_of(spread(16), tokenizer)
    )
    assert accepted > 100
    assert drafted > accepted


@pytest.mark.usefixtures("eager")
def test_target_as_its_own_drafter_is_accepted_always(tokenizer: Tokenizer) -> None:
    engine = make_engine("draft", "--draft-model", "smollm2", "--max-draft-tokens", "4")
    questions = sorted(spread(48), key=lambda question: len(question.turns[0]))[:4]
    drafted, accepted = check_same_tokens(engine, batches_of(questions, tokenizer, max_tokens=24))
    assert drafted == accepted > 50


@pytest.mark.soak
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_hundred_questions_get_the_tokens_of_plain_decoding(
    drafter: str, tokenizer: Tokenizer, request: pytest.FixtureRequest
) -> None:
    if drafter == "eagle":  # in batches of 16 its drafts do not pay, so it would make none
        request.getfixturevalue("eager")
    drafted, accepted = check_same_tokens(make_engine(drafter), batches_of(spread(200), tokenizer))
    assert accepted > 100  # by the others little is drafted; what counts is that some was
    assert drafted > accepted
