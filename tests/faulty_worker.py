"""A worker as in production, in a process of its own, whose engine can be told to break or to hang.

    python -m tests.faulty_worker PARENT_PID ROLE [ARGS]

SIGUSR1: the next step that has work raises. SIGUSR2: it sleeps for `SLEEP_S`. A prompt that begins with `POISON`
makes every step raise that it takes part in; one that begins with `LATE_POISON` does so once it has some tokens. Only
the engine's step is touched, so all that answers a broken step is the real thing.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence as SequenceOf
from types import FrameType

from engine.runner import ModelRunner
from engine.scheduler.plan import StepPlan, StepResult
from engine.sequence import Sequence
from kvrelay.cluster import child

POISON = (17_017, 23_023, 29_029)
LATE_POISON = (17_017, 23_023, 31_031)
LATE_AFTER = 4
SLEEP_S = 30.0
MARK = "fault.struck"
"""In the log once a step was struck, with the number of sequences in it."""


def command(role: str, arguments: SequenceOf[str]) -> list[str]:
    """Return the command line of a role of a `LocalCluster` whose workers can be told to fail."""
    return [sys.executable, "-m", "tests.faulty_worker", str(os.getpid()), role, *arguments]


def is_poisoned(sequence: Sequence) -> bool:
    """Whether no step with the sequence in it may succeed."""
    start = tuple(sequence.token_ids[: len(POISON)])
    return start == POISON or (start == LATE_POISON and sequence.num_output_tokens >= LATE_AFTER)


def main(argv: SequenceOf[str]) -> None:
    """Arm the faults, then become the role."""
    pending: list[int] = []

    def arm(number: int, _frame: FrameType | None) -> None:
        pending.append(number)

    signal.signal(signal.SIGUSR1, arm)
    signal.signal(signal.SIGUSR2, arm)
    run = ModelRunner.run

    def run_or_fail(self: ModelRunner, plan: StepPlan, on_layer: object = None) -> StepResult:
        if any(is_poisoned(chunk.sequence) for chunk in plan.chunks):
            sys.stderr.write(f"{MARK} {len(plan.chunks)}\n")
            raise RuntimeError("poisoned step")
        if pending:
            number = pending.pop()
            sys.stderr.write(f"{MARK} {len(plan.chunks)}\n")
            if number == signal.SIGUSR1:
                raise RuntimeError("broken step")
            time.sleep(SLEEP_S)
        return run(self, plan, on_layer)  # type: ignore[arg-type]  # passed on as it came

    ModelRunner.run = run_or_fail  # type: ignore[method-assign]  # the fault
    child.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
