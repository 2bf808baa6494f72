"""Payloads are filled piece by piece, and digested as they are."""

import numpy as np
import pytest

from engine.types import BlockId
from kv_transfer.blocks import BlockRange
from kv_transfer.frame import FrameKind, seal, verify
from kv_transfer.handoff import gather as gather_module
from kv_transfer.handoff.gather import gather
from tests.fakes_transport import ArrayCache, tiny_layout

LAYOUT = tiny_layout(num_layers=4)
TABLE = [BlockId(block) for block in (9, 2, 3, 4, 11, 0, 7)]
"""Of a sequence: blocks 2 to 4 lie side by side."""


def filled_cache() -> ArrayCache:
    cache = ArrayCache(LAYOUT, 12)
    cache.bytes[:] = np.random.default_rng(1).integers(0, 256, cache.bytes.shape, dtype=np.uint8)
    return cache


@pytest.mark.parametrize("num_piece_blocks", [1, 2, 3, 100])
def test_pieces_fill_the_payload_from_front_to_back(monkeypatch: pytest.MonkeyPatch, num_piece_blocks: int) -> None:
    monkeypatch.setattr(gather_module, "PIECE_BYTES", num_piece_blocks * LAYOUT.block_bytes)
    cache, blocks = filled_cache(), BlockRange(1, 5, 1, 2)
    payload = bytearray(blocks.num_cells * LAYOUT.block_bytes)
    pieces = [bytes(piece) for piece in gather(cache, blocks, TABLE, memoryview(payload))]
    assert payload == cache.bytes[1:3, TABLE[1:6]].tobytes()
    assert b"".join(pieces) == payload
    assert max(map(len, pieces)) <= num_piece_blocks * LAYOUT.block_bytes


def test_a_block_larger_than_a_piece_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather_module, "PIECE_BYTES", 1)
    payload = bytearray(2 * LAYOUT.block_bytes)
    pieces = list(gather(filled_cache(), BlockRange(0, 2, 0, 1), TABLE, memoryview(payload)))
    assert [len(piece) for piece in pieces] == [LAYOUT.block_bytes] * 2


def test_a_frame_sealed_in_pieces_has_the_digest_of_the_whole() -> None:
    cache, blocks = filled_cache(), BlockRange(0, 7, 0, 4)
    payload = memoryview(bytearray(blocks.num_cells * LAYOUT.block_bytes))
    pieces = gather(cache, blocks, TABLE, payload)
    frame = seal(FrameKind.KV, payload=payload, pieces=pieces, num_layers=4, num_blocks=7)
    verify(frame)
    assert frame.header.digest == seal(FrameKind.KV, payload=bytes(payload), num_layers=4, num_blocks=7).header.digest
