"""Payloads that stay in device memory on their way: what transports that send it and caches that fill it share.

Protocols only; nothing here knows a device. A frame then carries `Frame.device` instead of a payload, and its digest is
taken over the fingerprint of the memory, so that the bytes need not come to the host. Used by
`kv_transfer/transports/ucx/connection.py`.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from engine.types import BlockId
from kv_transfer.blocks import BlockRange, BlockSource
from kvrelay.errors import TransferError


class DeviceBytes(Protocol):
    """A run of bytes in device memory."""

    @property
    def array(self) -> object:
        """What UCX sends from or receives into: an object with `__cuda_array_interface__`, or host memory in tests."""
        ...

    def __len__(self) -> int:
        """Its bytes."""
        ...

    def part(self, start: int, end: int) -> "DeviceBytes":
        """The bytes [start, end), without a copy."""
        ...

    def fingerprint(self) -> bytes:
        """A few bytes that differ, almost surely, where any byte does. Waits until what was written is there."""
        ...

    def to_host(self) -> memoryview:
        """A copy on the host."""
        ...

    def release(self) -> None:
        """Give lent memory back; nobody may look at it any more. Safe to call twice."""
        ...


class DeviceMemory(Protocol):
    """Lends memory of one device. Belongs to one event loop."""

    def take(self, num_bytes: int) -> DeviceBytes:
        """Lend memory; its content is whatever was there before."""
        ...


@runtime_checkable
class DeviceSource(Protocol):
    """A `BlockSource` whose blocks can stay on the device."""

    def read_device_blocks(self, layer: int, block_ids: Sequence[BlockId], out: DeviceBytes) -> None:
        """As `BlockSource.read_blocks`, into device memory. The copy may still run; `fingerprint` waits for it."""
        ...


@runtime_checkable
class DeviceSink(Protocol):
    """A `BlockSink` that takes blocks from device memory."""

    def write_device_blocks(self, layer: int, block_ids: Sequence[BlockId], payload: DeviceBytes) -> None:
        """As `BlockSink.write_blocks`, from device memory. The blocks are written when it returns."""
        ...


def gather_on_device(
    source: BlockSource, blocks: BlockRange, block_ids: Sequence[BlockId], out: DeviceBytes
) -> Iterator[memoryview]:
    """Fill `out` as `gather.gather` fills host memory; yields its fingerprint, the one piece to be digested.

    Raises:
        TransferError: The source keeps no blocks on a device.
    """
    if not isinstance(source, DeviceSource):
        raise TransferError("a payload in device memory needs a KV cache on a device")
    ids = block_ids[blocks.first_block : blocks.first_block + blocks.num_blocks]
    layer_bytes = len(ids) * source.layout.block_bytes
    for index, layer in enumerate(blocks.layers):
        source.read_device_blocks(layer, ids, out.part(index * layer_bytes, (index + 1) * layer_bytes))
    yield memoryview(out.fingerprint())
