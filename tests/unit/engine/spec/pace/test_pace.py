"""Draft lengths follow acceptance and cost."""

from collections.abc import Mapping

import pytest

from engine.scheduler.plan import ScheduledChunk, StepPlan
from engine.sequence import Sequence
from engine.spec.drafter import NO_PROPOSAL, Evidence, Proposal
from engine.spec.pace.cost import CostShape, StepLoad
from engine.spec.pace.pacer import EXPLORE_EVERY, TRIAL_SHARE, TRIAL_STEPS, DraftPacer
from engine.types import EngineRequest, RequestId, SamplingParams

GOOD, POOR = Evidence("ngram", 8, 0.9), Evidence("ngram", 1, 0.3)
NATIVE = {1: 1.0, 2: 1.05, 4: 1.3, 8: 1.9, 9: 2.3, 16: 3.6}
FREE = {1: 1.0, 32: 1.0}


def _sequence(request_id: int = 1, num_tokens: int = 10) -> Sequence:
    return Sequence(EngineRequest(RequestId(request_id), (7,) * num_tokens, SamplingParams(), num_tokens))


def _proposal(evidence: Evidence, count: int = 16) -> Proposal:
    return Proposal((5,) * count, (evidence,) * count)


def _pacer(costs: Mapping[int, float], max_draft_tokens: int = 16) -> DraftPacer:
    return DraftPacer(max_draft_tokens, CostShape(costs))


def _choose(pacer: DraftPacer, *evidence: Evidence) -> list[int]:
    sequences = [_sequence(index) for index in range(1, len(evidence) + 1)]
    return pacer.choose(sequences, [_proposal(each) for each in evidence])


def test_free_rows_are_used_up_to_the_limit() -> None:
    assert _choose(_pacer(FREE, 8), GOOD) == [8]


def test_rows_that_cost_more_than_they_bring_are_not_drafted() -> None:
    assert _choose(_pacer({1: 1.0, 2: 2.0}), GOOD) == [0]


def test_worse_chances_give_shorter_drafts() -> None:
    lengths = [
        _choose(_pacer(NATIVE), Evidence("ngram", grade, prior))[0]
        for grade, prior in enumerate((0.98, 0.8, 0.5, 0.02))
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 7
    assert lengths[-1] == 0


def test_a_costly_row_is_passed_when_those_behind_it_pay() -> None:
    # Kernels compute rows in tiles: the first row of a tile costs, the others are nearly free.
    assert _choose(_pacer({1: 1.0, 2: 2.05, 8: 2.1, 9: 9.0}), Evidence("ngram", 32, 0.95)) == [7]


def test_nothing_proposed_means_nothing_drafted() -> None:
    assert _pacer(FREE).choose([_sequence(1), _sequence(2)], [NO_PROPOSAL, _proposal(GOOD)])[0] == 0
    assert _pacer(FREE).choose([], []) == []


def test_rows_go_to_the_sequence_whose_guesses_are_better() -> None:
    lengths = _choose(_pacer({1: 1.0, 2: 1.0, 16: 3.6}), POOR, GOOD)
    assert lengths[1] > 2
    assert lengths[0] == 0


def test_drafting_fades_out_as_the_batch_fills_up() -> None:
    shape = {1: 1.0, 2: 1.05, 4: 1.3, 8: 1.9, 16: 3.6, 32: 7.5, 64: 15.0}
    means = [sum(_choose(_pacer(shape), *[POOR] * count)) / count for count in (1, 4, 16)]
    assert means[0] >= means[1] >= means[2] == 0


def test_acceptance_decides_after_the_prior() -> None:
    pacer = _pacer(NATIVE)
    before = _choose(pacer, POOR)[0]
    for _ in range(60):
        pacer.choose([_sequence()], [_proposal(POOR)])
        pacer.observe(RequestId(1), 4, 4)
    assert _choose(pacer, POOR)[0] > before


def test_what_one_sequence_taught_serves_the_next() -> None:
    pacer = _pacer(NATIVE)
    for step in range(60):
        request_id = RequestId(100 + step)
        pacer.choose([_sequence(request_id)], [_proposal(GOOD)])
        pacer.observe(request_id, 1, 0)
        pacer.forget(request_id)
    assert _choose(pacer, GOOD)[0] <= 1 < _choose(_pacer(NATIVE), GOOD)[0]


def test_longer_context_makes_rows_dearer() -> None:
    pacer = DraftPacer(16, CostShape(NATIVE, context_token=0.0005, extra_pair=0.0003))
    short, long = (pacer.choose([_sequence(num_tokens=count)], [_proposal(GOOD)])[0] for count in (10, 2000))
    assert long < short


def test_best_guess_is_tried_now_and_then_when_none_pays() -> None:
    pacer = _pacer({1: 1.0, 2: 2.0, 3: 4.0})
    lengths = [_choose(pacer, POOR, GOOD) for _ in range(2 * EXPLORE_EVERY)]
    assert [sum(column) for column in zip(*lengths, strict=True)] == [0, 2]


def test_forgotten_sequence_leaves_nothing_behind() -> None:
    pacer = _pacer({1: 1.0, 2: 2.0})
    _choose(pacer, GOOD)
    pacer.observe(RequestId(1), 1, 0)
    pacer.forget(RequestId(1))
    assert not pacer._chosen
    assert not pacer.acceptance._factors


def test_drafts_that_the_scheduler_cut_teach_only_what_was_verified() -> None:
    pacer = _pacer(FREE)
    other = Evidence("ngram", 3, 0.5)
    pacer.choose([_sequence()], [Proposal((1, 2), (GOOD, other))])
    pacer.observe(RequestId(1), 1, 1)
    assert other not in pacer.acceptance._classes
    assert pacer.acceptance.chance(RequestId(2), GOOD) > GOOD.prior


def test_promise_is_the_expected_number_accepted() -> None:
    proposal = Proposal((1, 2, 3), (GOOD, GOOD, POOR))
    assert _pacer(FREE).promise(RequestId(1), proposal) == pytest.approx(0.9 + 0.81 + 0.243)


def test_steps_with_prefill_chunks_say_nothing_about_rows() -> None:
    pacer = _pacer(NATIVE)
    chunk = ScheduledChunk(_sequence(), 0, 9, samples=True)
    pacer.observe_step(StepPlan((chunk,)), 5.0, 1)
    assert not pacer.cost._buckets
    pacer.observe_step(StepPlan((ScheduledChunk(_sequence(), 9, 1, samples=True),)), 5.0, 1)
    assert pacer.cost._buckets


# --- drafters with a model of their own -------------------------------------------------------------------------------


def test_drafting_pass_must_bring_more_than_it_takes() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    pacer.choose([sequence], [NO_PROPOSAL])
    pacer.observe_pass(0.1, is_first=True)
    assert pacer.is_worth_a_pass("draft", [(sequence, 1.0)])
    assert not pacer.is_worth_a_pass("draft", [(sequence, 0.1)])
    for _ in range(20):
        pacer.observe_pass(1.0, is_first=True)
    assert not pacer.is_worth_a_pass("draft", [(sequence, 1.0)])


def test_first_pass_and_further_ones_have_their_own_cost() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    pacer.observe_pass(0.5, is_first=True)
    assert not pacer.is_worth_a_pass("draft", [(sequence, 0.5)])
    assert not pacer.is_worth_a_pass("draft", [(sequence, 0.5)], num_drafted=1)  # nothing else is known yet
    pacer.observe_pass(0.3, num_passes=3)
    assert not pacer.is_worth_a_pass("draft", [(sequence, 0.5)])
    assert pacer.is_worth_a_pass("draft", [(sequence, 0.5)], num_drafted=1)


def test_token_is_worth_what_one_takes_with_speculation() -> None:
    pacer = _pacer({1: 1.0, 2: 1.2})
    poor = Evidence("ngram", 1, 0.25)
    assert _choose(pacer, poor) == [1]  # 0.25 of a plain step for 0.2
    chunk = ScheduledChunk(_sequence(), 9, 1, samples=True, draft_token_ids=(5,) * 8)
    for _ in range(50):  # a step that takes as long as a plain one gives four tokens
        pacer.observe_step(StepPlan((chunk,)), 1.0, 4)
    assert _choose(pacer, poor) == [0]


def test_what_drafting_took_counts_in_what_a_token_takes() -> None:
    cheap, dear = _pacer(FREE), _pacer(FREE)
    chunk = ScheduledChunk(_sequence(), 9, 1, samples=True, draft_token_ids=(5,))
    for _ in range(50):
        dear.observe_pass(1.0, is_first=True)
        for pacer in (cheap, dear):
            pacer.observe_step(StepPlan((chunk,)), 1.0, 2)
    load = StepLoad(1, 10)
    assert cheap._worth_of_token(load) == pytest.approx(0.5, rel=0.1)
    assert dear._worth_of_token(load) == pytest.approx(1.0, rel=0.1)


def test_pass_is_weighed_with_the_row_that_its_token_takes() -> None:
    pacer = _pacer({1: 1.0, 8: 1.1, 9: 3.0})
    sequence = _sequence()
    pacer.choose([sequence], [NO_PROPOSAL])
    assert pacer.is_worth_a_pass("draft", [(sequence, 0.8)], num_drafted=3)
    assert not pacer.is_worth_a_pass("draft", [(sequence, 0.8)], num_drafted=7)


def test_tries_of_a_drafter_that_never_pays_take_a_small_share_of_the_time() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    plan = StepPlan((ScheduledChunk(sequence, 9, 1, samples=True),))
    pacer.observe_pass(2.0, is_first=True)
    tries: list[int] = []
    for step in range(2000):
        if pacer.choose_starts("draft", [sequence]).is_try:
            tries.append(step)
            pacer.observe_pass(2.0, is_first=True)
        pacer.observe_step(plan, 1.0, 1)
    assert 0 < len(tries) * 2.0 <= TRIAL_SHARE * 2000
    # In runs, as the first step after a pause says little of the next.
    runs = [tries[start : start + TRIAL_STEPS] for start in range(0, len(tries), TRIAL_STEPS)]
    assert all(run == list(range(run[0], run[0] + TRIAL_STEPS)) for run in runs)


def _start(pacer: DraftPacer, sequence: Sequence, num_drafted: int, num_accepted: int) -> bool:
    """One step of a sequence that drafts where it is told to; returns whether it was."""
    has_started = bool(pacer.choose_starts("draft", [sequence]).sequences)
    if has_started:
        pacer.begin("draft", [sequence])
        pacer.observe_pass(0.3, is_first=True)
        pacer.observe_pass(0.03, num_passes=3)
        proposal = Proposal((5,) * num_drafted, (Evidence("draft", 1, 0.5),) * num_drafted)
        pacer._chosen[sequence.request_id] = proposal.evidence
        pacer.observe(sequence.request_id, num_drafted, num_accepted)
    chunk = ScheduledChunk(sequence, 9, 1, samples=True)
    pacer.observe_step(StepPlan((chunk,)), 1.0, 1 + num_accepted if has_started else 1)
    return has_started


def test_start_is_weighed_by_all_that_starts_bring() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    # One start in four brings four tokens, the others none: one token is worth less than a pass, a start is not.
    num_started = sum(_start(pacer, sequence, 4, 4 if step % 4 == 0 else 0) for step in range(60))
    assert num_started > 50
    assert pacer.acceptance.typical(sequence.request_id, "draft") < 0.65


def test_sequence_that_becomes_easy_is_noticed() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    hard = [_start(pacer, sequence, 2, 0) for _ in range(200)]
    easy = [_start(pacer, sequence, 4, 4) for _ in range(300)]
    assert not any(hard[10:20]), "it stops where nothing is accepted"
    assert all(easy[-100:]), "tries showed that it pays now"


def test_what_another_source_brought_says_nothing_of_a_start() -> None:
    pacer = _pacer(FREE)
    sequence = _sequence()
    before = pacer.starts.expected(sequence.request_id, "draft")
    assert pacer.choose_starts("draft", [sequence]).sequences == (sequence,)
    pacer.begin("draft", [sequence])
    pacer._chosen[sequence.request_id] = (Evidence("ngram", 1, 0.5),) * 3
    pacer.observe(sequence.request_id, 3, 0)
    assert pacer.starts.expected(sequence.request_id, "draft") == before


def test_only_sequences_that_pay_are_begun_for() -> None:
    pacer = _pacer({1: 1.0, 2: 1.1, 16: 2.5})
    easy, hard = _sequence(), _sequence(request_id=2)
    for _ in range(40):
        _start(pacer, easy, 4, 4)
        _start(pacer, hard, 4, 0)
    choice = pacer.choose_starts("draft", [hard, easy])
    assert (choice.sequences, choice.is_try) == ((easy,), False)
