"""Where the bytes of a verified frame land in the reserved blocks.

Pure placement for `import_table.py`: which target blocks, whole or converted, and what to do where the first source
block begins before the first wanted token. It checks nothing; the hand-off has.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from engine.cache.layout import KvLayout
from engine.types import BlockId
from kv_transfer.blocks import BlockSink
from kv_transfer.handoff_receiver import WriteTokens


def write_layer(
    sink: BlockSink,
    layer: int,
    block_ids: Sequence[BlockId],
    start_token: int,
    write: WriteTokens,
    payload: memoryview,
) -> None:
    """Write one layer of a frame.

    Args:
        sink: The target cache.
        layer: 0-based layer index.
        block_ids: The reservation's blocks; the first holds `start_token`.
        start_token: First token of the hand-off, a multiple of the target's block size.
        write: What to write; `write.blocks` says which source blocks `payload` holds.
        payload: The layer's whole source blocks.
    """
    target, source = sink.layout, write.source
    num_cached_blocks = start_token // target.block_size
    if source == target:
        first = write.token_start // target.block_size - num_cached_blocks
        end = target.num_blocks(write.token_start + write.num_tokens) - num_cached_blocks
        sink.write_blocks(layer, block_ids[first:end], payload)
        return
    # Sinks take a block table from token 0 on. The blocks of the cached prefix are not ours to name, so their places
    # are filled with a block of this reservation; no token that is written lies there.
    table = (block_ids[0],) * num_cached_blocks + tuple(block_ids)
    token_start, token_end = write.token_start, write.token_start + write.num_tokens
    skipped = token_start % source.block_size
    if skipped:
        # Source blocks are larger than target blocks and the cached prefix ends inside one: its rest travels on as
        # blocks of the target's size, which the start is a multiple of.
        stop = min(token_start + source.block_size - skipped, token_end)
        head = slice_block(payload[: source.block_bytes], source, skipped, target.block_size)
        head_layout = replace(source, block_size=target.block_size)
        num_head_blocks = head_layout.num_blocks(stop - token_start)
        head = head[: num_head_blocks * head_layout.block_bytes]
        sink.write_converted(layer, token_start, stop - token_start, table, head, head_layout)
        payload = payload[source.block_bytes :]
        token_start = stop
    if token_start < token_end:
        sink.write_converted(layer, token_start, token_end - token_start, table, payload, source)


def slice_block(block: memoryview, layout: KvLayout, first_token: int, block_size: int) -> memoryview:
    """Cut tokens `[first_token, layout.block_size)` out of one block, as blocks of `block_size` tokens.

    Args:
        block: Bytes of one layer's block.
        layout: Its layout.
        first_token: Slot of the first token wanted.
        block_size: Tokens per resulting block; divides the number of tokens wanted.
    """
    data = np.frombuffer(block, np.uint8)
    rows = 2 * layout.num_kv_heads
    token_bytes = layout.head_dim * layout.dtype.itemsize
    num_element_bytes = rows * layout.block_size * token_bytes
    parts = [data[:num_element_bytes].reshape(rows, layout.block_size, token_bytes)]
    if len(data) > num_element_bytes:  # scales, one per row and token, behind the elements
        parts.append(data[num_element_bytes:].reshape(rows, layout.block_size, -1))
    blocks = [
        part[:, start : start + block_size].reshape(-1)
        for start in range(first_token, layout.block_size, block_size)
        for part in parts
    ]
    return np.concatenate(blocks).data
