"""Trials: a sequence that was in a broken step takes its next sampled step alone. A pure decision over a plan.

If that step breaks too, it is the only one to blame; if not, it is as good as any other. Until then no other suspect
stands beside it either: whoever was beside the cause twice would be refused with it. Used by `scheduler.py`; who is a
suspect is for the gateway to say.
"""

from collections.abc import Sequence

from engine.scheduler.plan import ScheduledChunk


def without_suspects_together(chunks: Sequence[ScheduledChunk]) -> tuple[ScheduledChunk, ...]:
    """Return the chunks that run in this step: all, unless a sequence is on trial.

    One on trial that would sample runs alone; one that only computes, beside those that nobody suspects. The others
    lose nothing but the step: they keep their blocks and are planned again.
    """
    on_trial = [chunk for chunk in chunks if chunk.sequence.is_on_trial]
    if not on_trial:
        return tuple(chunks)
    alone = next((chunk for chunk in on_trial if chunk.samples), None)
    if alone is not None:
        return (alone,)
    return tuple(chunk for chunk in chunks if chunk is on_trial[0] or not chunk.sequence.request.is_suspect)
