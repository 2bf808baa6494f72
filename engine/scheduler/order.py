"""Who goes first and who gives way. Pure decisions over sequences; `scheduler.py` acts on them.

One order holds for all that want blocks, whether new, preempted or reserved for a hand-off: more urgent ones first,
then by arrival. Whoever gives way loses least by it, but is not made to give way again and again: under any arrivals
the first in the order gets to its end, and then the next one is the first.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from engine.sequence import Sequence


def goes_first(waiting: Iterable[Sequence], newcomer: Sequence) -> bool:
    """Whether a newcomer may have blocks and a seat now, or somebody who waits for them has the better claim.

    Args:
        waiting: The waiting line. Who holds blocks already waits for neither.
        newcomer: Not in line yet; arrives last.
    """
    return all(s.block_table or s.request.priority > newcomer.request.priority for s in waiting)


def victim_of(running: SequenceOf[Sequence], growing: Sequence) -> Sequence:
    """Return the sequence whose blocks are taken back so that `growing` can grow; it may be that one itself.

    Least urgent first, then least computed, then last to arrive: recomputing it costs least. Left out is the first in
    the order among those that were preempted before, unless it is less urgent than `growing`: what is recomputed is
    behind by its nature, so newcomers could take its blocks each time before it has caught up.

    Args:
        running: Every running sequence, `growing` among them.
        growing: The one that needs a block.
    """
    returned = [s for s in running if s.num_preemptions and s.request.priority <= growing.request.priority]
    protected = min(returned, key=lambda s: s.rank, default=None)
    candidates = [s for s in running if s is not protected] or [growing]
    return min(candidates, key=lambda s: (-s.request.priority, s.num_computed_tokens, -s.arrival))
