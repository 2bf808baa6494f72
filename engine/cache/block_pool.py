"""The owner of all KV blocks: reference counts, the free queue and the prefix index.

It counts blocks and never touches their bytes. It lives on the engine's thread; nobody else may call it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.prefix_index import CachedBlock, PrefixIndex, hash_block
from engine.types import ROOT_HASH, BlockHash, BlockId

MAX_KEPT_EVENTS = 65_536
"""Changes kept for whoever takes them; more means that nobody does."""


@dataclass(slots=True)
class CacheEvents:
    """What changed in the prefix cache since the last `take_events`."""

    stored: list[CachedBlock] = field(default_factory=list)
    removed: list[BlockHash] = field(default_factory=list)
    are_lost: bool = False
    """Whether more changed than is kept: what is here is not all, and only a look at the whole cache helps."""

    def __len__(self) -> int:
        return len(self.stored) + len(self.removed)


class BlockPool:
    """Allocates blocks, shares cached ones and evicts the least recently used.

    Invariants:
        - A block is in the free queue exactly when its reference count is 0.
        - free + held = total, where held counts blocks with a positive reference count.
        - A free block may be published in the prefix index; it is evicted from it when it is allocated anew.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_cache: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_cache = enable_prefix_cache
        self._ref_counts = [0] * num_blocks
        # Ordered from the first to be reused to the last.
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(i), None) for i in range(num_blocks))
        self._index = PrefixIndex()
        self._events = CacheEvents()
        self._records_events = False

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones that nobody uses included."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks published in the prefix index."""
        return len(self._index)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, token_ids: Sequence[int], cache_salt: str = "") -> list[BlockId]:
        """Return the published blocks that hold the longest prefix of `token_ids`, first block first. Changes nothing.

        The last token is never matched: at least one must be computed, or there are no logits to sample from.
        """
        matched: list[BlockId] = []
        if not self.enable_prefix_cache:
            return matched
        parent = ROOT_HASH
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            tokens = token_ids[start : start + self.block_size]
            block_hash = hash_block(parent, tokens, cache_salt)
            block_id = self._index.find(block_hash, parent, tokens)
            if block_id is None:
                break
            matched.append(block_id)
            parent = block_hash
        return matched

    def allocate(self, num_blocks: int, prefix: Sequence[BlockId] = ()) -> list[BlockId] | None:
        """Take a reference on the `prefix` blocks and `num_blocks` fresh ones; returns the fresh ones, None = not now.

        All or nothing. The caller owns one reference on each block, to be returned with `free`.
        """
        num_free_in_prefix = sum(1 for block_id in prefix if self._ref_counts[block_id] == 0)
        if num_blocks > len(self._free) - num_free_in_prefix:
            return None
        for block_id in prefix:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1
        fresh: list[BlockId] = []
        for _ in range(num_blocks):
            block_id, _none = self._free.popitem(last=False)
            self._evict(block_id)
            self._ref_counts[block_id] = 1
            fresh.append(block_id)
        return fresh

    def free(self, block_ids: Iterable[BlockId]) -> None:
        """Return one reference on each block of a block table.

        The table's tail becomes reusable first: its blocks are less likely to be another request's prefix.

        Raises:
            ValueError: A block has no reference to return.
        """
        for block_id in reversed(list(block_ids)):
            if self._ref_counts[block_id] == 0:
                raise ValueError(f"block {block_id} is free already")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._index:
                    # A block without reusable content goes before every cached one.
                    self._free.move_to_end(block_id, last=False)

    def publish(
        self, block_id: BlockId, parent: BlockHash, token_ids: Sequence[int], cache_salt: str = ""
    ) -> BlockHash:
        """Make a complete, verified block findable by its prefix; returns its hash.

        The caller holds a reference. When another block is published for the same prefix, that one stays.
        """
        block_hash = hash_block(parent, token_ids, cache_salt)
        if self.enable_prefix_cache:
            cached = CachedBlock(block_id, block_hash, parent, tuple(token_ids))
            if self._index.add(cached) and self._has_room_for_events():
                self._events.stored.append(cached)
        return block_hash

    def flush(self) -> int:
        """Forget every cached block that nobody uses; returns how many."""
        idle = [block_id for block_id in self._free if block_id in self._index]
        for block_id in idle:
            self._evict(block_id)
        return len(idle)

    def record_events(self, *, is_on: bool) -> None:
        """Start or stop recording changes of the prefix cache; off at first, so that nothing piles up unread."""
        if not is_on:
            self._events = CacheEvents()
        self._records_events = is_on

    def take_events(self) -> CacheEvents:
        """Return what changed in the prefix cache since the last call, while recording."""
        events, self._events = self._events, CacheEvents()
        return events

    def cached_blocks(self) -> list[CachedBlock]:
        """Return every published block."""
        return self._index.blocks()

    def check_invariants(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        free = {block_id for block_id, count in enumerate(self._ref_counts) if count == 0}
        if free != set(self._free):
            raise AssertionError("block pool: the free queue and the reference counts disagree")
        if any(count < 0 for count in self._ref_counts):
            raise AssertionError("block pool: a reference count is negative")
        self._index.check_invariants()

    def _evict(self, block_id: BlockId) -> None:
        block_hash = self._index.remove(block_id)
        if block_hash is not None and self._has_room_for_events():
            self._events.removed.append(block_hash)

    def _has_room_for_events(self) -> bool:
        """Whether a change is to be recorded; nobody may have taken any for a long time."""
        if not self._records_events or self._events.are_lost:
            return False
        if len(self._events) >= MAX_KEPT_EVENTS:
            self._events = CacheEvents(are_lost=True)
            return False
        return True
