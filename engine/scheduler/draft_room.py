"""DraftRoom: blocks for drafted tokens, given while nobody misses them and taken back when somebody does.

Nobody waits or is preempted for a guess. Lives on the engine's thread, beside the scheduler, whose pool it shares.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.cache.block_pool import BlockPool
from engine.scheduler.plan import ScheduledChunk
from engine.sequence import Sequence
from engine.types import RequestId


class DraftRoom:
    """Room behind running sequences' own tokens. Keeps no state: spare blocks are in their sequence's table."""

    def __init__(self, pool: BlockPool, max_position: int) -> None:
        self._pool = pool
        self._max_position = max_position

    def make(self, sequence: Sequence, num_drafts: int, num_left: int) -> int:
        """Give a sequence the blocks for drafts behind its tokens, as far as nobody misses them.

        Args:
            sequence: A decode.
            num_drafts: Drafts wanted.
            num_left: Free blocks to be left to others, such as those that running sequences' next tokens may need.

        Returns:
            How many drafts count and have room.
        """
        # One step yields one token more than it has drafts, so the last token allowed needs none.
        remaining = sequence.sampling_params.max_tokens - sequence.num_output_tokens
        count = max(0, min(num_drafts, remaining - 1, self._max_position - sequence.num_tokens - 1))
        missing = self._pool.blocks_for(sequence.num_tokens + count) - len(sequence.block_table)
        if 0 < missing <= self._pool.num_free_blocks - num_left:
            sequence.block_table.extend(self._pool.allocate(missing) or ())
        return min(count, len(sequence.block_table) * self._pool.block_size - sequence.num_tokens)

    def fill(
        self,
        chunks: Iterable[ScheduledChunk],
        drafts: Mapping[RequestId, tuple[int, ...]],
        budget: int,
        num_left: int,
    ) -> list[ScheduledChunk]:
        """Return decodes' chunks with drafts behind them, cut to what can be used and has room.

        Args:
            chunks: One of each decode.
            drafts: Proposed tokens by sequence.
            budget: Most drafts of all together.
            num_left: As for `make`.
        """
        filled = []
        for chunk in chunks:
            proposed = drafts.get(chunk.sequence.request_id, ())[:budget]
            count = self.make(chunk.sequence, len(proposed), num_left) if proposed else 0
            filled.append(replace(chunk, draft_token_ids=proposed[:count]))
            budget -= count
        return filled

    def take_back(self, running: Iterable[Sequence]) -> bool:
        """Free one sequence's blocks behind those of its own tokens; False when nobody has any."""
        for sequence in running:
            own = self._pool.blocks_for(sequence.num_tokens)
            if len(sequence.block_table) > own:
                self._pool.free(sequence.block_table[own:])
                del sequence.block_table[own:]
                return True
        return False
