"""The peer's side of the pipe: one JSON job a line in, one JSON result a line out. Standard library only."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence

Times = tuple[float, float]
"""Moments of the first and the last token, on `time.perf_counter`."""
RunOne = Callable[[Sequence[int], int], Times]
"""Generates for one prompt."""
RunAll = Callable[[Sequence[Sequence[int]], int], list[Times]]
"""Generates for all prompts at once."""


def serve(load: Callable[[], tuple[RunOne, RunAll]]) -> None:
    """Load the system, say so, and serve jobs until standard input ends.

    Args:
        load: Returns the two ways to run prompts.
    """
    # Libraries print to standard output as they like; the protocol keeps the real one for itself.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    run_one, run_all = load()
    _answer(out.write, out.flush, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        _answer(out.write, out.flush, _run(job["prompts"], job["max_tokens"], job["together"], run_one, run_all))


def _answer(write: Callable[[str], object], flush: Callable[[], object], value: object) -> None:
    write(json.dumps(value) + "\n")
    flush()


def _run(
    prompts: Sequence[Sequence[int]], max_tokens: int, together: bool, run_one: RunOne, run_all: RunAll
) -> dict[str, object]:
    started = time.perf_counter()
    answers = []
    if together:
        answers = [(first - started, last - started) for first, last in run_all(prompts, max_tokens)]
    else:
        for prompt in prompts:
            began = time.perf_counter()
            first, last = run_one(prompt, max_tokens)
            answers.append((first - began, last - began))
    return {"answers": answers, "num_tokens": max_tokens, "seconds": time.perf_counter() - started}
