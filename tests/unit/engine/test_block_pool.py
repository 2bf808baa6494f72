"""The block pool: sharing, eviction order, verification of hits."""

import pytest

from engine.cache import block_pool
from engine.cache.block_pool import BlockPool
from engine.cache.prefix_index import hash_block
from engine.types import ROOT_HASH, BlockId

BLOCK = 4


def _allocate(pool: BlockPool, count: int, prefix: list[BlockId] | None = None) -> list[BlockId]:
    """Allocate blocks that must be there."""
    blocks = pool.allocate(count, prefix or [])
    assert blocks is not None
    return blocks


def _cache(pool: BlockPool, tokens: list[int], salt: str = "") -> list[BlockId]:
    """Allocate, publish and free the full blocks of a prompt."""
    blocks = _allocate(pool, len(tokens) // BLOCK)
    parent = ROOT_HASH
    for index, block_id in enumerate(blocks):
        parent = pool.publish(block_id, parent, tokens[index * BLOCK : (index + 1) * BLOCK], salt)
    pool.free(blocks)
    return blocks


def test_prefix_is_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8, BLOCK)
    blocks = _cache(pool, list(range(12)))
    assert pool.match_prefix([*range(8), 99, 99, 99, 99, 1]) == blocks[:2]
    assert pool.match_prefix([99, *range(1, 12)]) == []


def test_last_token_is_always_left_to_compute() -> None:
    pool = BlockPool(8, BLOCK)
    blocks = _cache(pool, list(range(8)))
    assert pool.match_prefix(list(range(8))) == blocks[:1]
    assert pool.match_prefix(list(range(9))) == blocks


def test_prefixes_of_other_salts_are_not_found() -> None:
    pool = BlockPool(8, BLOCK)
    _cache(pool, list(range(8)), salt="a")
    assert pool.match_prefix(list(range(9)), "b") == []
    assert pool.match_prefix(list(range(9))) == []
    assert len(pool.match_prefix(list(range(9)), "a")) == 2


def test_same_block_after_another_parent_is_not_found() -> None:
    pool = BlockPool(8, BLOCK)
    _cache(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert pool.match_prefix([2, 2, 2, 2, 9]) == []


def test_colliding_hash_is_caught_by_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "hash_block", lambda parent, tokens, salt="": hash_block(ROOT_HASH, [0]))
    pool = BlockPool(8, BLOCK)
    blocks = _cache(pool, [1, 2, 3, 4])
    assert pool.match_prefix([1, 2, 3, 4, 5]) == blocks
    assert pool.match_prefix([1, 2, 3, 9, 5]) == []


def test_least_recently_used_tail_is_evicted_first() -> None:
    pool = BlockPool(4, BLOCK)
    old = _cache(pool, list(range(8)))
    new = _cache(pool, list(range(100, 108)))
    assert pool.allocate(1) == [old[1]]
    assert pool.match_prefix(list(range(9))) == old[:1]
    assert pool.match_prefix([*range(100, 108), 1]) == new


def test_uncached_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4, BLOCK)
    cached = _cache(pool, list(range(8)))
    plain = _allocate(pool, 2)
    pool.free(plain)
    assert set(_allocate(pool, 2)) == set(plain)
    assert pool.match_prefix(list(range(9))) == cached


def test_allocation_is_all_or_nothing_and_counts_the_prefix() -> None:
    pool = BlockPool(4, BLOCK)
    prefix = _cache(pool, list(range(8)))
    assert pool.allocate(3, prefix) is None
    assert pool.num_free_blocks == 4
    assert len(_allocate(pool, 2, prefix)) == 2
    assert pool.num_free_blocks == 0
    pool.check_invariants()


def test_shared_block_stays_until_its_last_holder_frees_it() -> None:
    pool = BlockPool(4, BLOCK)
    prefix = _cache(pool, list(range(8)))
    pool.allocate(0, prefix)
    pool.allocate(0, prefix)
    pool.free(prefix)
    assert pool.num_free_blocks == 2
    pool.free(prefix)
    assert pool.num_free_blocks == 4


def test_freeing_a_free_block_is_an_error() -> None:
    pool = BlockPool(2, BLOCK)
    blocks = _allocate(pool, 1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="free already"):
        pool.free(blocks)


def test_flush_forgets_only_what_nobody_uses() -> None:
    pool = BlockPool(8, BLOCK)
    used = _cache(pool, list(range(8)))
    _cache(pool, list(range(100, 108)))
    pool.allocate(0, used)
    assert pool.flush() == 2
    assert pool.match_prefix(list(range(9))) == used
    assert pool.match_prefix([*range(100, 108), 1]) == []


def test_events_tell_what_entered_and_left_the_cache() -> None:
    pool = BlockPool(2, BLOCK)
    pool.record_events(is_on=True)
    _cache(pool, list(range(8)))
    assert len(pool.take_events().stored) == 2
    pool.allocate(1)
    events = pool.take_events()
    assert events.stored == []
    assert events.removed == [hash_block(hash_block(ROOT_HASH, [0, 1, 2, 3]), [4, 5, 6, 7])]


def test_switched_off_cache_finds_nothing() -> None:
    pool = BlockPool(4, BLOCK, enable_prefix_cache=False)
    _cache(pool, list(range(8)))
    assert pool.match_prefix(list(range(9))) == []
