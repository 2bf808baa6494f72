"""AutoDrafter: the better proposal for each sequence, and no pass of the head where it cannot be the better one."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.spec.auto import AutoDrafter
from engine.spec.drafter import NO_PROPOSAL, Evidence, Proposal
from engine.spec.pace.pacer import DraftPacer
from engine.types import EngineRequest, RequestId, SamplingParams


@dataclass(slots=True)
class Fixed:
    """Proposes what it is told, up to the limit."""

    proposals: list[Proposal]
    name: str = "fixed"
    limits: list[int] = field(default_factory=list)
    forgotten: list[RequestId] = field(default_factory=list)

    def propose(self, sequences: SequenceOf[Sequence], max_tokens: SequenceOf[int]) -> list[Proposal]:
        self.limits = list(max_tokens)
        return [
            Proposal(proposal.token_ids[:limit], proposal.evidence[:limit]) if limit > 0 else NO_PROPOSAL
            for proposal, limit in zip(self.proposals, max_tokens, strict=True)
        ]

    def forget(self, request_id: RequestId) -> None:
        self.forgotten.append(request_id)


def _proposal(source: str, prior: float, count: int) -> Proposal:
    return Proposal(tuple(range(count)), (Evidence(source, 0, prior),) * count)


def _sequences(count: int) -> list[Sequence]:
    return [
        Sequence(EngineRequest(RequestId(index), (1, 2, 3), SamplingParams(max_tokens=50), 3)) for index in range(count)
    ]


def test_each_sequence_gets_what_promises_more() -> None:
    weak, strong = _proposal("ngram", 0.2, 6), _proposal("ngram", 0.97, 6)
    lookup, head = Fixed([weak, strong, NO_PROPOSAL]), Fixed([_proposal("head", 0.7, 4)] * 3)
    found = AutoDrafter(lookup, head, "head", DraftPacer(8)).propose(_sequences(3), [6, 6, 6])
    assert found == [head.proposals[0], strong, head.proposals[2]]
    assert head.limits == [6, 0, 6], "what looks sure already needs no pass"


def test_a_head_that_is_never_right_is_asked_less_and_less() -> None:
    pacer = DraftPacer(8)
    lookup, head = Fixed([_proposal("ngram", 0.5, 6)]), Fixed([_proposal("head", 0.9, 4)])
    auto = AutoDrafter(lookup, head, "head", pacer)
    sequences = _sequences(1)
    assert auto.propose(sequences, [6]) == head.proposals
    for _ in range(40):
        pacer.acceptance.observe(sequences[0].request_id, head.proposals[0].evidence, 0)
        pacer.starts.observe(sequences[0].request_id, "head", 4, 0)
    fresh = Sequence(EngineRequest(RequestId(9), (1, 2, 3), SamplingParams(max_tokens=50), 3))
    head.limits = []
    assert auto.propose([fresh], [6]) == lookup.proposals
    assert head.limits == [], "not asked"


def test_no_drafts_where_none_may_be() -> None:
    lookup, head = Fixed([_proposal("ngram", 0.5, 6)]), Fixed([_proposal("head", 0.9, 4)])
    assert AutoDrafter(lookup, head, "head", DraftPacer(8)).propose(_sequences(1), [0]) == [NO_PROPOSAL]
    assert head.limits == []


def test_both_forget() -> None:
    lookup, head = Fixed([]), Fixed([])
    AutoDrafter(lookup, head, "head", DraftPacer(8)).forget(RequestId(3))
    assert lookup.forgotten == head.forgotten == [RequestId(3)]
