"""Draft: one sequence's draft while a drafter with a model of its own makes it, token by token."""

from dataclasses import dataclass, field

from engine.sampling.distribution import TokenHistory
from engine.sequence import Sequence
from engine.spec.drafter import Evidence, Proposal
from engine.spec.pace.acceptance import Acceptance


@dataclass(slots=True)
class Draft:
    """See the module."""

    index: int
    """Place of the sequence among those that are proposed for."""
    sequence: Sequence
    limit: int
    """Most tokens; 0 once nothing may follow."""
    token_ids: list[int] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    reach: float = 1.0
    """Chance that all of `token_ids` is accepted."""

    def history(self) -> TokenHistory:
        """Return what stands before the next token."""
        tokens = [*self.sequence.token_ids, *self.token_ids] if self.token_ids else self.sequence.token_ids
        return TokenHistory(tokens, self.sequence.num_prompt_tokens)

    def add(self, token_id: int, evidence: Evidence, acceptance: Acceptance) -> None:
        """Add a token."""
        self.token_ids.append(token_id)
        self.evidence.append(evidence)
        self.reach *= acceptance.chance(self.sequence.request_id, evidence)

    def proposal(self) -> Proposal:
        """Return what is proposed."""
        return Proposal(tuple(self.token_ids), tuple(self.evidence))
