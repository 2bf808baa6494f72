"""Blocks of a sequence by number, and the two ports through which KV bytes leave and enter a worker's cache.

`engine.model.kv_cache` satisfies both ports by shape. Nothing here knows where the blocks live (host or device memory)
or who owns them; ownership is stated per method. Next: `kv_transfer/handoff/exporter.py` reads,
`kv_transfer/handoff/import_table.py` writes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.cache.layout import KvLayout
from engine.types import BlockId


@dataclass(frozen=True, slots=True, order=True)
class BlockRange:
    """Blocks `[first_block, first_block + num_blocks)` of layers `[layer_start, layer_start + num_layers)`.

    Block indexes count from the start of the sequence, in the sender's block size.
    """

    first_block: int
    num_blocks: int
    layer_start: int
    num_layers: int

    @property
    def layers(self) -> range:
        """The layer indexes."""
        return range(self.layer_start, self.layer_start + self.num_layers)

    @property
    def num_cells(self) -> int:
        """Layers times blocks."""
        return self.num_layers * self.num_blocks


class BlockSource(Protocol):
    """Where the exporter reads finished blocks from."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks that `read_blocks` returns."""
        ...

    def read_blocks(self, layer: int, block_ids: Sequence[BlockId], out: memoryview) -> None:
        """Copy one layer's blocks, in the order of `block_ids`, into `out`.

        Called on the event loop, once or more per layer of a frame, while the caller of `Export.layer_ready` still
        holds references on the blocks. Blocks are only read after they were reported as final.

        Args:
            layer: 0-based layer index.
            block_ids: Blocks to read; the same block is never named twice.
            out: Writable bytes of exactly `len(block_ids) * layout.block_bytes`. Not kept after the call.
        """
        ...


class BlockSink(Protocol):
    """Where the importer writes verified blocks to.

    Positions are tokens of the sequence. The named blocks belong to a live reservation for the whole call; a sink never
    writes outside them.
    """

    @property
    def layout(self) -> KvLayout:
        """Layout of the blocks that are written."""
        ...

    def write_blocks(self, layer: int, block_ids: Sequence[BlockId], payload: memoryview) -> None:
        """Copy whole blocks that have this sink's own layout.

        Args:
            layer: 0-based layer index.
            block_ids: Blocks to fill, in payload order.
            payload: Exactly `len(block_ids) * layout.block_bytes` bytes; not kept after the call.
        """
        ...

    def write_converted(
        self,
        layer: int,
        token_start: int,
        num_tokens: int,
        block_ids: Sequence[BlockId],
        payload: memoryview,
        source: KvLayout,
    ) -> None:
        """Write the tokens `[token_start, token_start + num_tokens)` from blocks of another block size or dtype.

        Both block grids start at token 0 of the sequence, so the offsets follow from `token_start` alone::

            payload:    | source block  token_start // source.block_size ... | whole blocks
            block_ids:  | target block  token_start // layout.block_size ... |

        The first token to write is at slot `token_start % source.block_size` of the payload's first block and goes to
        slot `token_start % layout.block_size` of `block_ids[0]`. Slots of other tokens are left as they are.

        Args:
            layer: 0-based layer index.
            token_start: Position in the sequence of the first token to write.
            num_tokens: Tokens to write, >= 1.
            block_ids: The target blocks that hold the tokens, in order, and no others.
            payload: The source blocks that hold the tokens, whole; not kept after the call.
            source: Layout of the payload, already checked with `layout.check_convertible`.
        """
        ...
