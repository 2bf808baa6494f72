"""`python -m benchmarks.peers.openvino_peer MODEL.gguf`: OpenVINO GenAI, in an environment that has it.

One prompt at a time goes to its `LLMPipeline`, many at once to its `ContinuousBatchingPipeline`: each as its own
documentation recommends.
"""

import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.loop import RunAll, RunOne, Times, serve

CACHE_GIB = 2
MAX_BATCHED_TOKENS = 1024


def load(path: str) -> tuple[RunOne, RunAll]:
    """Load the model twice, once for each pipeline."""
    genai: Any = importlib.import_module("openvino_genai")
    openvino: Any = importlib.import_module("openvino")
    numpy: Any = importlib.import_module("numpy")
    single = genai.LLMPipeline(path, "CPU")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
    batching = genai.ContinuousBatchingPipeline(path, scheduler, "CPU")

    class Clock(genai.StreamerBase):  # type: ignore[misc]  # the base class exists only in the peer's environment
        """Notes when tokens come."""

        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def write(self, token: object) -> Any:
            """Take one token or several."""
            self.times.append(time.perf_counter())
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    def config(max_tokens: int) -> Any:
        found = genai.GenerationConfig()
        found.max_new_tokens = max_tokens
        found.ignore_eos = True
        found.do_sample = False
        return found

    def tensor(prompt: Sequence[int]) -> Any:
        return openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))

    def run_one(prompt: Sequence[int], max_tokens: int) -> Times:
        clock = Clock()
        ids = tensor(prompt)
        mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
        single.generate(genai.TokenizedInputs(ids, mask), config(max_tokens), clock)
        return clock.times[0], clock.times[-1]

    next_id = iter(range(1 << 40))

    def run_all(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Times]:
        handles = [batching.add_request(next(next_id), tensor(prompt), config(max_tokens)) for prompt in prompts]
        times: list[list[float]] = [[] for _ in handles]
        while batching.has_non_finished_requests():
            batching.step()
            now = time.perf_counter()
            for seen, handle in zip(times, handles, strict=True):
                if handle.can_read():
                    handle.read()
                    seen.append(now)
        return [(seen[0], seen[-1]) for seen in times]

    return run_one, run_all


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))
