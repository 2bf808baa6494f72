"""Under any arrivals every sequence taken in ends within a number of steps that later arrivals cannot raise."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.scheduler.plan import SampledTokens, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.sequence import Sequence
from engine.types import EngineRequest, RequestId, SamplingParams
from kvrelay.errors import CapacityError

BLOCK = 4
MAX_PROMPT, MAX_TOKENS, MAX_DELAY = 16, 8, 3
MAX_SEQS, MAX_WAITING = 3, 2
NUM_BLOCKS = -(-(MAX_PROMPT + MAX_TOKENS) // BLOCK)


@dataclass(frozen=True)
class Arrival:
    """What comes, again and again."""

    kind: str
    num_prompt: int
    max_tokens: int
    delay: int
    """Steps until a reservation's KV is there, or it is prefilled here."""
    priority: int = 0


def _cost(num_prompt: int, max_tokens: int) -> int:
    """Most steps that one sequence runs or waits for blocks while nobody has a better claim.

    Once preempted it is not preempted for another's sake again; when reservations hold all other blocks it goes back
    itself, and each time it has a block's tokens more. It then waits for the others to end or give way.
    """
    rounds = -(-max_tokens // BLOCK) + 2
    return rounds * (num_prompt + max_tokens + MAX_PROMPT + MAX_TOKENS + MAX_DELAY)


class Traffic:
    """A scheduler under arrivals that never cease, and the step by which each sequence must have ended."""

    def __init__(self, num_blocks: int, budget: int, max_num_seqs: int, num_drafts: int = 0) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        config = SchedulerConfig(min(max_num_seqs, budget), budget, MAX_WAITING)
        self.scheduler = Scheduler(config, self.pool, max_position=64, eos_token_ids=frozenset())
        self.num_drafts = num_drafts
        self.now = 0
        self.num_ended = 0
        self.live: dict[RequestId, Sequence] = {}
        self.due: dict[RequestId, int] = {}
        self.parked: dict[RequestId, tuple[int, str]] = {}
        self._next_id = 0

    def arrive(self, arrival: Arrival) -> RequestId | None:
        """Bring one request; None when it is not taken in."""
        self._next_id += 1
        request_id = RequestId(self._next_id)
        prompt = tuple(self._next_id * 100 + i for i in range(arrival.num_prompt))
        params = SamplingParams(max_tokens=arrival.max_tokens)
        request = EngineRequest(request_id, prompt, params, len(prompt), priority=arrival.priority)
        sequence = Sequence(request)
        if arrival.kind == "add":
            try:
                self.scheduler.add(sequence)
            except CapacityError:
                return None
        elif self.scheduler.reserve(sequence):
            self.parked[request_id] = (self.now + arrival.delay, arrival.kind)
        else:
            return None
        self.live[request_id] = sequence
        claims = [s for s in self.live.values() if s.request.priority <= arrival.priority]
        self.due[request_id] = self.now + sum(_cost(s.num_prompt_tokens, s.sampling_params.max_tokens) for s in claims)
        return request_id

    def step(self) -> None:
        """Bring what is due for reservations, and run one step."""
        self.now += 1
        for request_id, (ready, kind) in list(self.parked.items()):
            if ready < self.now:
                del self.parked[request_id]
                sequence = self.live[request_id]
                if kind == "local":
                    self.scheduler.queue_reserved(sequence)
                else:
                    self._take(self.scheduler.activate(sequence, 7, 0))
        drafts = {s.request_id: (5,) * self.num_drafts for s in self.scheduler.decodes()}
        self.scheduler.look_ahead(self.num_drafts)
        plan = self.scheduler.plan(0, drafts)
        result = [SampledTokens(c.sequence.request_id, (7,)) for c in plan.chunks if c.samples]
        for output in self.scheduler.apply(plan, StepResult(tuple(result)), 0):
            self._take(output)
        self.scheduler.check_invariants()

    def remove(self, request_id: RequestId) -> None:
        """Abort a request at whatever phase."""
        self.scheduler.remove(request_id)
        self._forget(request_id)

    def check(self) -> None:
        """Raise unless everybody who is most urgent is still in time."""
        late = [r for r, step in self.due.items() if step < self.now and not self.live[r].request.priority]
        assert not late, f"step {self.now}: {[(r, self.live[r].num_output_tokens) for r in late]} did not end"

    def _take(self, output: Any) -> None:
        if output.finish_reason is not None:
            self.num_ended += 1
            self._forget(output.request_id)

    def _forget(self, request_id: RequestId) -> None:
        del self.live[request_id], self.due[request_id]
        self.parked.pop(request_id, None)


arrivals = st.builds(
    Arrival,
    kind=st.sampled_from(["reserve", "reserve", "local", "add"]),
    num_prompt=st.integers(1, MAX_PROMPT),
    max_tokens=st.integers(1, MAX_TOKENS),
    delay=st.integers(0, MAX_DELAY),
    priority=st.sampled_from([0, 0, 0, 1]),
)

#: Beyond the latest step by which anybody could have to end who came in the first half.
NUM_STEPS = 2 * (MAX_SEQS + MAX_WAITING + 1) * _cost(MAX_PROMPT, MAX_TOKENS)


@settings(max_examples=15, deadline=None)
@given(
    num_blocks=st.integers(NUM_BLOCKS, NUM_BLOCKS + 4),
    budget=st.integers(1, 12),
    max_num_seqs=st.integers(1, MAX_SEQS),
    num_drafts=st.integers(0, 6),
    flood=st.lists(arrivals, min_size=1, max_size=5),
    first=st.lists(arrivals, max_size=3),
    remove_every=st.integers(5, 60),
)
def test_every_sequence_ends_in_time_under_any_arrivals(
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    num_drafts: int,
    flood: list[Arrival],
    first: list[Arrival],
    remove_every: int,
) -> None:
    traffic = Traffic(num_blocks, budget, max_num_seqs, num_drafts)
    for arrival in first:
        traffic.arrive(arrival)
    for step in range(NUM_STEPS):
        for offset in range(2):
            traffic.arrive(flood[(step + offset) % len(flood)])
        traffic.step()
        traffic.check()
        if step % remove_every == 0 and traffic.live:
            traffic.remove(max(traffic.live))


@pytest.mark.parametrize("kind", ["reserve", "local", "add"])
def test_a_preempted_sequence_is_not_overtaken_by_small_ones_for_ever(kind: str) -> None:
    traffic = Traffic(NUM_BLOCKS, budget=8, max_num_seqs=3)
    large = traffic.arrive(Arrival(kind, MAX_PROMPT, MAX_TOKENS, delay=0))
    assert large is not None
    for _ in range(300):
        for _ in range(2):
            traffic.arrive(Arrival("reserve", 2, MAX_TOKENS, delay=1))
        traffic.step()
    assert traffic.num_ended > 20
    assert large not in traffic.live
