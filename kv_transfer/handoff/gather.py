"""Fills a frame's payload from a worker's blocks, in pieces small enough to be digested while they are still cached.

Copying decides nothing: which blocks go into a frame is `sender.py`'s choice, and `export.py` sees to it that
they are final and still held.
"""

from collections.abc import Iterator, Sequence

from engine.types import BlockId
from kv_transfer.blocks import BlockRange, BlockSource

PIECE_BYTES = 512 << 10
"""A piece and its source fit a core's second-level cache together, and the cost of a call is small beside the copy."""


def gather(
    source: BlockSource, blocks: BlockRange, block_ids: Sequence[BlockId], out: memoryview
) -> Iterator[memoryview]:
    """Fill `out` from front to back and yield each piece of it as soon as it is filled.

    Args:
        source: The cache.
        blocks: What the payload holds: layer after layer, each layer's blocks in order.
        block_ids: The sequence's block table, from its first block on.
        out: Writable bytes of exactly the payload's size.
    """
    block_bytes = source.layout.block_bytes
    step = max(PIECE_BYTES // block_bytes, 1)
    end = blocks.first_block + blocks.num_blocks
    position = 0
    for layer in blocks.layers:
        for first in range(blocks.first_block, end, step):
            ids = block_ids[first : min(first + step, end)]
            piece = out[position : position + len(ids) * block_bytes]
            source.read_blocks(layer, ids, piece)
            position += len(piece)
            yield piece
