"""`python -m benchmarks.peers.transformers_peer FOLDER`: Hugging Face transformers in bf16, with its KV cache.

Many prompts at once are one static batch; they have the same length, so that nothing is padded.
"""

import importlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.loop import RunAll, RunOne, Times, serve


def load(folder: str) -> tuple[RunOne, RunAll]:
    """Load a Hugging Face folder."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    network.eval()

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc]  # the base class has no types here
        """Called after each token; never stops."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: object) -> Any:
            """Note the time."""
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def run_all(prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Times]:
        clock = Clock()
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            network.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        return [(clock.times[0], clock.times[-1])] * len(prompts)

    def run_one(prompt: Sequence[int], max_tokens: int) -> Times:
        return run_all([prompt], max_tokens)[0]

    return run_one, run_all


if __name__ == "__main__":
    serve(lambda: load(sys.argv[1]))
