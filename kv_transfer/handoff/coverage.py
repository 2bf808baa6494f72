"""Which blocks of which layers have been sent or received, and one digest over all of them.

Pure bookkeeping, the same on both sides: the receiver's copy decides whether a commit holds, the sender's copy makes
the digest that COMMIT names. It holds digests and bit masks, never payloads.
"""

import struct

import xxhash

from kv_transfer.blocks import BlockRange
from kvrelay.errors import TransferError

_ENTRY = struct.Struct("<IIIIQ")


class Coverage:
    """The ranges of one hand-off that have been accounted for.

    Invariants: accepted ranges lie inside the expected one and are disjoint; `num_cells` is their total.
    """

    def __init__(self, num_layers: int, first_block: int, num_blocks: int) -> None:
        self._expected = BlockRange(first_block, num_blocks, 0, num_layers)
        self._masks = [0] * num_layers
        self._digests: dict[BlockRange, int] = {}
        self.num_cells = 0

    @property
    def num_frames(self) -> int:
        """Ranges accounted for."""
        return len(self._digests)

    @property
    def is_complete(self) -> bool:
        """Whether every block of every layer is accounted for."""
        return self.num_cells == self._expected.num_cells

    @property
    def num_missing(self) -> int:
        """Blocks not accounted for, counted per layer."""
        return self._expected.num_cells - self.num_cells

    def check(self, blocks: BlockRange, digest: int) -> bool:
        """Return whether `blocks` are new; False = exactly this frame was already added. Changes nothing.

        Raises:
            TransferError: The range leaves the hand-off, or overlaps different content.
        """
        expected = self._expected
        end, expected_end = blocks.first_block + blocks.num_blocks, expected.first_block + expected.num_blocks
        if blocks.first_block < expected.first_block or end > expected_end or blocks.layers.stop > expected.num_layers:
            raise TransferError(
                f"blocks [{blocks.first_block}, {end}) of layers [{blocks.layer_start}, {blocks.layers.stop}) are "
                f"outside the hand-off's [{expected.first_block}, {expected_end}) of {expected.num_layers} layers"
            )
        known = self._digests.get(blocks)
        if known is not None:
            if known != digest:
                raise TransferError(f"the blocks from {blocks.first_block} arrived twice with different content")
            return False
        mask = self._mask(blocks)
        if any(self._masks[layer] & mask for layer in blocks.layers):
            raise TransferError(f"the blocks from {blocks.first_block} overlap blocks of another frame")
        return True

    def add(self, blocks: BlockRange, digest: int) -> bool:
        """Account for a range; returns and raises like `check`."""
        if not self.check(blocks, digest):
            return False
        mask = self._mask(blocks)
        for layer in blocks.layers:
            self._masks[layer] |= mask
        self._digests[blocks] = digest
        self.num_cells += blocks.num_cells
        return True

    def digest(self) -> int:
        """Return one 64-bit digest over all ranges and their frames' digests, in whatever order they came."""
        state = xxhash.xxh3_64()
        for blocks, digest in sorted(self._digests.items()):
            entry = (blocks.first_block, blocks.num_blocks, blocks.layer_start, blocks.num_layers, digest)
            state.update(_ENTRY.pack(*entry))
        return state.intdigest()

    def check_invariants(self) -> None:
        """Raise `RuntimeError` if masks and ranges disagree."""
        cells = sum(mask.bit_count() for mask in self._masks)
        if not cells == self.num_cells == sum(blocks.num_cells for blocks in self._digests):
            raise RuntimeError("coverage does not add up")

    def _mask(self, blocks: BlockRange) -> int:
        return ((1 << blocks.num_blocks) - 1) << (blocks.first_block - self._expected.first_block)
