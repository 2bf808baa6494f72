"""Speculation: a drafter and a pacer, as one engine uses them around each step."""

from collections.abc import Sequence as SequenceOf

from engine.scheduler.plan import StepPlan
from engine.sequence import Sequence
from engine.spec.drafter import Drafter
from engine.spec.pace.pacer import DraftPacer
from engine.types import RequestId, SequenceOutput


class Speculation:
    """Proposes drafts before a step and learns from it afterwards. Lives on the engine's thread."""

    def __init__(self, drafter: Drafter, pacer: DraftPacer) -> None:
        self._drafter = drafter
        self._pacer = pacer
        self.num_draft_tokens = 0
        """Draft tokens verified since start."""
        self.num_accepted_tokens = 0
        """Draft tokens accepted since start."""

    @property
    def max_draft_tokens(self) -> int:
        """Most tokens drafted for one sequence in a step."""
        return self._pacer.max_draft_tokens

    def propose(self, sequences: SequenceOf[Sequence]) -> dict[RequestId, tuple[int, ...]]:
        """Return the drafts worth verifying, by sequence."""
        limits = [self._limit(sequence) for sequence in sequences]
        proposals = self._drafter.propose(sequences, limits)
        lengths = self._pacer.choose(sequences, proposals)
        return {
            sequence.request_id: proposal.token_ids[:length]
            for sequence, proposal, length in zip(sequences, proposals, lengths, strict=True)
            if length
        }

    def observe(self, plan: StepPlan, outputs: SequenceOf[SequenceOutput], seconds: float) -> None:
        """Learn from a step: what was accepted, and what the step cost."""
        self._pacer.observe_step(plan, seconds, sum(len(output.token_ids) for output in outputs))
        for output in outputs:
            self.num_draft_tokens += output.num_draft_tokens
            self.num_accepted_tokens += output.num_accepted_tokens
            self._pacer.observe(output.request_id, output.num_draft_tokens, output.num_accepted_tokens)
            if output.has_ended:
                self.forget(output.request_id)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a sequence that has ended."""
        self._drafter.forget(request_id)
        self._pacer.forget(request_id)

    def _limit(self, sequence: Sequence) -> int:
        params = sequence.sampling_params
        most = self._pacer.max_draft_tokens if params.num_draft_tokens is None else params.num_draft_tokens
        return min(most, self._pacer.max_draft_tokens, params.max_tokens - sequence.num_output_tokens - 1)
