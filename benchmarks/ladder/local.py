"""The lower rungs: one engine in this process, plain PyTorch in fp32.

Naive means what it says: for each token the whole text is computed anew. That costs seconds a token, so only some of a
request's tokens are measured, spread evenly over its length; each must be the token that the cached run gave.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.ladder.work import Work
from decode_service.settings import DecodeSettings
from engine.engine import Engine
from engine.types import EngineRequest, RequestId, SamplingParams
from worker.compute.bootstrap import build_engine

KV_MARGIN_TOKENS = 64
"""Room for each sequence beyond prompt and answer: its last block."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one rung did in one round."""

    num_tokens: int
    seconds: float
    is_same: bool
    """Whether the tokens are those of the reference."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens in the whole time, prefill included."""
        return self.num_tokens / self.seconds


class LocalRungs:
    """Runs the work on an engine in this process. Blocks its caller: call it in a thread of its own."""

    def __init__(self, model: str, work: Work) -> None:
        longest = max(len(prompt) for prompt in work.prompts) + work.output_tokens
        num_blocks = len(work.prompts) * -(-(longest + KV_MARGIN_TOKENS) // 16)
        flags = ["--model", model, "--compute", "torch", "--speculation", "none", "--no-prefix-cache"]
        flags += ["--num-blocks", str(num_blocks), "--max-num-seqs", str(len(work.prompts))]
        # A whole prompt is one step, as it is without chunked prefill.
        flags += ["--max-num-batched-tokens", str(longest)]
        self._engine: Engine = build_engine(DecodeSettings.parse(flags, "kvrelay bench ladder"))
        self._work = work
        self._ids = itertools.count(1)
        self.reference = self._generate([work.prompts[0]], work.output_tokens)[0]
        """The first request's answer."""

    def naive(self, num_tokens: int) -> Measured:
        """Recompute everything for each token."""
        prompt, answer = self._work.prompts[0], self.reference
        num_tokens = min(num_tokens, len(answer))
        places = [index * len(answer) // num_tokens for index in range(num_tokens)]
        started = time.perf_counter()
        tokens = [self._generate([(*prompt, *answer[:place])], 1)[0][0] for place in places]
        seconds = time.perf_counter() - started
        return Measured(num_tokens, seconds, is_same=tokens == [answer[place] for place in places])

    def cached(self, num_requests: int) -> Measured:
        """Serve requests one after the other, each with a KV cache."""
        return self._measure([[prompt] for prompt in self._work.prompts[:num_requests]])

    def batched(self) -> Measured:
        """Serve all requests at once."""
        return self._measure([list(self._work.prompts)])

    def _measure(self, batches: Sequence[Sequence[tuple[int, ...]]]) -> Measured:
        started = time.perf_counter()
        answers = [answer for batch in batches for answer in self._generate(batch, self._work.output_tokens)]
        seconds = time.perf_counter() - started
        return Measured(sum(map(len, answers)), seconds, is_same=answers[0] == self.reference)

    def _generate(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        answers: dict[RequestId, list[int]] = {}
        for prompt in prompts:
            request_id = RequestId(next(self._ids))
            answers[request_id] = []
            self._engine.add(EngineRequest(request_id, prompt, params, len(prompt)))
        while self._engine.has_work:
            for output in self._engine.step():
                answers[output.request_id] += output.token_ids
        return [tuple(answer) for answer in answers.values()]
