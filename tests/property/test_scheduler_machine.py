"""Scheduler and block pool under random traffic: nothing leaks, nothing is lost, tokens are those of an idle engine."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.plan import SampledTokens, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.types import EngineRequest, RequestId, SamplingParams
from kvrelay.errors import CapacityError, ContextTooLong

EOS = 2
BLOCK = 8


def next_token(token_ids: list[int]) -> int:
    """A deterministic model: the next token depends on every token before it."""
    return sum((i + 1) * t for i, t in enumerate(token_ids)) % 17


def complete(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What an idle engine would generate."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def verified(chunk: Any) -> tuple[int, ...]:
    """The accepted drafts and one more."""
    tokens = list(chunk.sequence.token_ids)
    new = []
    for draft in (*chunk.draft_token_ids, None):
        new.append(next_token(tokens))
        tokens.append(new[-1])
        if new[-1] != draft:
            break
    return tuple(new)


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, reservations, commits, removals and steps against `complete`."""

    @initialize(num_blocks=st.integers(4, 24), budget=st.integers(1, 40), max_num_seqs=st.integers(1, 6))
    def start(self, num_blocks: int, budget: int, max_num_seqs: int) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        config = SchedulerConfig(max_num_seqs=min(max_num_seqs, budget), max_num_batched_tokens=budget, max_waiting=5)
        self.scheduler = Scheduler(config, self.pool, max_position=150, eos_token_ids=frozenset({EOS}))
        self.expected: dict[int, list[int]] = {}
        self.received: dict[int, list[int]] = {}
        self.reserved: dict[int, Sequence] = {}
        self.next_id = 1

    def _sequence(self, prompt: Any, max_tokens: int, salt: str, *, is_handoff: bool = False) -> Any:
        request_id = RequestId(self.next_id)
        self.next_id += 1
        params = SamplingParams(max_tokens=max_tokens)
        return Sequence(EngineRequest(request_id, prompt, params, len(prompt), cache_salt=salt), is_handoff=is_handoff)

    prompts = st.one_of(
        st.integers(1, 60).map(lambda n: tuple(i % 7 for i in range(n))),
        st.lists(st.integers(0, 16), min_size=1, max_size=40).map(tuple),
    )

    @rule(prompt=prompts, max_tokens=st.integers(1, 30), salt=st.sampled_from(["", "x"]))
    def add(self, prompt: Any, max_tokens: int, salt: str) -> None:
        sequence = self._sequence(prompt, max_tokens, salt)
        try:
            self.scheduler.add(sequence)
        except (CapacityError, ContextTooLong):
            return
        self.expected[sequence.request_id] = complete(prompt, max_tokens)
        self.received[sequence.request_id] = []

    @rule(prompt=prompts, max_tokens=st.integers(1, 30))
    def reserve(self, prompt: Any, max_tokens: int) -> None:
        sequence = self._sequence(prompt, max_tokens, "")
        try:
            granted = self.scheduler.reserve(sequence)
        except ContextTooLong:
            return
        if granted:
            self.expected[sequence.request_id] = complete(prompt, max_tokens)
            self.received[sequence.request_id] = []
            self.reserved[sequence.request_id] = sequence

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        sequence = self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved))))
        self._take([self.scheduler.activate(sequence, next_token(sequence.token_ids), now_ns=0)])

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def prefill_locally(self, data: Any) -> None:
        self.scheduler.queue_reserved(self.reserved.pop(data.draw(st.sampled_from(sorted(self.reserved)))))

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.scheduler.remove(RequestId(request_id)) is not None
        del self.expected[request_id]
        self.reserved.pop(request_id, None)

    @rule(count=st.integers(1, 5), num_right=st.integers(0, 6), num_wrong=st.integers(0, 3))
    def step(self, count: int, num_right: int = 0, num_wrong: int = 0) -> None:
        for _ in range(count):
            drafts = {
                sequence.request_id: (*complete(tuple(sequence.token_ids), num_right), *[EOS] * num_wrong)
                for sequence in self.scheduler.decodes()
            }
            plan = self.scheduler.plan(now_ns=0, drafts=drafts)
            for chunk in plan.chunks:
                assert chunk.start + chunk.num_rows <= len(chunk.sequence.block_table) * BLOCK
                assert chunk.sequence.status is SequenceStatus.RUNNING
            result = [
                SampledTokens(c.sequence.request_id, (next_token(c.sequence.token_ids),))
                for c in plan.chunks
                if c.samples
            ]
            self._take(self.scheduler.apply(plan, StepResult(tuple(result)), now_ns=0))

    def _take(self, outputs: Any) -> None:
        for output in outputs:
            received = self.received[output.request_id]
            assert output.token_index == len(received)
            received += output.token_ids
            assert received == self.expected[output.request_id][: len(received)]
            if output.finish_reason is not None:
                assert received == self.expected.pop(output.request_id)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for request_id in list(self.reserved):
            self.scheduler.remove(RequestId(request_id))
            del self.expected[request_id]
        self.reserved.clear()
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.step(1, 2, 1)
        assert not self.expected, "some request never ended"
        assert self.pool.num_free_blocks == self.pool.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
