"""Where the bytes of a verified frame land in the reserved blocks.

Pure placement for `import_table.py`: which target blocks, and whether they come as they are or are converted. It checks
nothing; the hand-off has.
"""

from collections.abc import Sequence

from engine.types import BlockId
from kv_transfer.blocks import BlockSink
from kv_transfer.device import DeviceBytes, DeviceSink
from kv_transfer.handoff.receiver import WriteTokens


def write_layer(
    sink: BlockSink,
    layer: int,
    block_ids: Sequence[BlockId],
    start_token: int,
    write: WriteTokens,
    payload: memoryview | DeviceBytes,
) -> None:
    """Write one layer of a frame.

    Args:
        sink: The target cache.
        layer: 0-based layer index.
        block_ids: The reservation's blocks; the first holds `start_token`.
        start_token: First token of the hand-off, a multiple of the target's block size.
        write: What to write; `write.blocks` says which source blocks `payload` holds.
        payload: The layer's whole source blocks. Those in device memory stay there where sink and layout allow it.
    """
    target = sink.layout
    num_cached_blocks = start_token // target.block_size
    first = write.token_start // target.block_size - num_cached_blocks
    end = target.num_blocks(write.token_start + write.num_tokens) - num_cached_blocks
    is_own_layout = write.source == target.shared_with(write.source)
    if not isinstance(payload, memoryview):
        if is_own_layout and isinstance(sink, DeviceSink):
            sink.write_device_blocks(layer, block_ids[first:end], payload)
            return
        payload = payload.to_host()
    if is_own_layout:
        sink.write_blocks(layer, block_ids[first:end], payload)
    else:
        sink.write_converted(layer, write.token_start, write.num_tokens, block_ids[first:end], payload, write.source)


def part_of(payload: memoryview | DeviceBytes, start: int, end: int) -> memoryview | DeviceBytes:
    """The bytes [start, end) of a payload, without a copy."""
    return payload[start:end] if isinstance(payload, memoryview) else payload.part(start, end)
