"""Which block holds which prefix.

A block's hash is SHA-256 over its parent's hash, the cache salt (first block only) and its token ids, so equal hashes
mean equal prefixes; a cryptographic hash because cached KV crosses tenants and a crafted collision would leak one's
answer to another. The tokens are compared on a hit all the same. Owned by `BlockPool`; nobody else changes it.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import ROOT_HASH, BlockHash, BlockId


def hash_block(parent: BlockHash, token_ids: Sequence[int], cache_salt: str = "") -> BlockHash:
    """Return the chained hash of one full block.

    Args:
        parent: Hash of the block before it, or `ROOT_HASH`.
        token_ids: The block's `block_size` token ids.
        cache_salt: Goes into the first block only; every later hash inherits it through the chain.
    """
    digest = hashlib.sha256(parent)
    if parent == ROOT_HASH:
        digest.update(cache_salt.encode())
        digest.update(b"\0")
    digest.update(array("I", token_ids).tobytes())
    return BlockHash(digest.digest())


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A published block's identity."""

    block_id: BlockId
    block_hash: BlockHash
    parent: BlockHash
    token_ids: tuple[int, ...]


class PrefixIndex:
    """Maps block hashes to published blocks.

    Invariants: a block is published under at most one hash, and a hash names at most one block.
    """

    def __init__(self) -> None:
        self._by_hash: dict[BlockHash, CachedBlock] = {}
        self._by_block: dict[BlockId, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._by_hash)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._by_block

    def find(self, block_hash: BlockHash, parent: BlockHash, token_ids: Sequence[int]) -> BlockId | None:
        """Return the block with this hash if it also holds these tokens after this parent, else None."""
        cached = self._by_hash.get(block_hash)
        if cached is None or cached.parent != parent or cached.token_ids != tuple(token_ids):
            return None
        return cached.block_id

    def add(self, block: CachedBlock) -> bool:
        """Publish a block; returns False (and changes nothing) when its hash or its id is published already."""
        if block.block_hash in self._by_hash or block.block_id in self._by_block:
            return False
        self._by_hash[block.block_hash] = block
        self._by_block[block.block_id] = block.block_hash
        return True

    def remove(self, block_id: BlockId) -> BlockHash | None:
        """Forget a block; returns its hash, or None when it was not published."""
        block_hash = self._by_block.pop(block_id, None)
        if block_hash is not None:
            del self._by_hash[block_hash]
        return block_hash

    def blocks(self) -> list[CachedBlock]:
        """Return every published block, oldest first."""
        return list(self._by_hash.values())

    def check_invariants(self) -> None:
        """Raise AssertionError when the two maps disagree."""
        if {b.block_id: h for h, b in self._by_hash.items()} != self._by_block:
            raise AssertionError("prefix index: the maps by hash and by block disagree")
