"""Trials: a sequence that was in a broken step takes its next sampled step alone. A pure decision over a plan.

If that step breaks too, it is the only one to blame; if not, it is as good as any other. Without this, whoever was
beside the cause twice would be refused with it. Used by `scheduler.py`; who is a suspect is for the gateway to say.
"""

from collections.abc import Sequence

from engine.scheduler.plan import ScheduledChunk


def tried_alone(chunks: Sequence[ScheduledChunk]) -> tuple[ScheduledChunk, ...]:
    """Return the chunks that run in this step: all, or the first of a sequence on trial that would sample.

    The others lose nothing but the step: they keep their blocks and are planned again.
    """
    on_trial = (chunk for chunk in chunks if chunk.samples and chunk.sequence.is_on_trial)
    alone = next(on_trial, None)
    return tuple(chunks) if alone is None else (alone,)
