"""Blocks in and out of the cache as bytes, and conversions on the way in."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.errors import InvalidRequest, LayoutMismatch
from engine.model.kv_cache import KvCache
from engine.model.kv_convert import cache_dtype, decode_blocks, encode_int8_blocks

CPU = torch.device("cpu")
NUM_BLOCKS = 12
FLOAT_DTYPES = (KvDtype.FP32, KvDtype.BF16, KvDtype.FP16)


def layout(block_size: int = 16, dtype: KvDtype = KvDtype.FP32, **changes: int | str) -> KvLayout:
    fields: dict[str, int | str] = {"model_fingerprint": "f", "num_layers": 2, "num_kv_heads": 3, "head_dim": 4}
    fields |= changes
    return KvLayout(
        str(fields["model_fingerprint"]),
        int(fields["num_layers"]),
        int(fields["num_kv_heads"]),
        int(fields["head_dim"]),
        block_size,
        dtype,
    )


def random_cache(seed: int = 0, **form: int | KvDtype) -> KvCache:
    cache = KvCache(layout(**form), NUM_BLOCKS, CPU)  # type: ignore[arg-type]  # keywords passed through
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def read(cache: KvCache, layer: int, block_ids: Sequence[int]) -> bytearray:
    out = bytearray(len(block_ids) * cache.layout.block_bytes)
    cache.read_blocks(layer, block_ids, memoryview(out))
    return out


def sequence_kv(cache: KvCache, layer: int, block_ids: Sequence[int]) -> Tensor:
    """K and V of a sequence token by token: [tokens, 2, heads, dim]."""
    return cache.tensor[layer, list(block_ids)].permute(0, 3, 1, 2, 4).flatten(0, 1)


def raw(blocks: Tensor) -> bytes:
    return blocks.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("block_ids", [[5], [3, 4, 5, 6], [7, 2, 3, 11, 0], list(range(NUM_BLOCKS)), []])
def test_read_blocks_gathers_whole_blocks_in_order(block_ids: list[int], dtype: KvDtype) -> None:
    cache = random_cache(dtype=dtype)
    assert bytes(read(cache, 1, block_ids)) == raw(cache.tensor[1, block_ids])


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
@pytest.mark.parametrize("block_ids", [[5], [3, 4, 5, 6], [7, 2, 3, 11, 0], []])
def test_written_blocks_are_read_back_and_others_untouched(block_ids: list[int], dtype: KvDtype) -> None:
    source, target = random_cache(1, dtype=dtype), random_cache(2, dtype=dtype)
    expected = target.tensor.clone()
    expected[0, block_ids] = source.tensor[1, block_ids]
    target.write_blocks(0, block_ids, memoryview(bytes(read(source, 1, block_ids))))
    assert torch.equal(target.tensor, expected)


def test_a_block_is_k_then_v_by_head_and_token() -> None:
    cache = KvCache(layout(), NUM_BLOCKS, CPU)
    values = torch.arange(2 * 3 * 16 * 4, dtype=torch.float32)
    cache.write_blocks(0, [4], memoryview(raw(values)))
    assert cache.tensor[0, 4, 1, 2, 15, 3] == values[-1]
    assert torch.equal(cache.tensor[0, 4, 1, 0, 0], values[3 * 16 * 4 : 3 * 16 * 4 + 4])


@pytest.mark.parametrize("num_bytes", [0, 1, 2 * 1536 - 1, 2 * 1536 + 1, 3 * 1536])
def test_buffers_of_another_size_are_refused(num_bytes: int) -> None:
    cache = KvCache(layout(), NUM_BLOCKS, CPU)
    assert cache.layout.block_bytes == 1536
    with pytest.raises(LayoutMismatch, match="2 blocks"):
        cache.write_blocks(0, [0, 1], memoryview(bytes(num_bytes)))
    with pytest.raises(LayoutMismatch, match="2 blocks"):
        cache.read_blocks(0, [0, 1], memoryview(bytearray(num_bytes)))


@pytest.mark.parametrize(("layer", "block_id"), [(0, -1), (0, NUM_BLOCKS), (-1, 0), (2, 0)])
def test_ids_outside_the_cache_are_refused(layer: int, block_id: int) -> None:
    cache = KvCache(layout(), NUM_BLOCKS, CPU)
    block = memoryview(bytearray(cache.layout.block_bytes))
    with pytest.raises(IndexError):
        cache.write_blocks(layer, [block_id], block)
    with pytest.raises(IndexError):
        cache.read_blocks(layer, [block_id], block)
    with pytest.raises(IndexError):
        cache.write_converted(layer, 0, 16, [block_id], block, cache.layout)


def test_int8_cache_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        KvCache(layout(dtype=KvDtype.INT8), NUM_BLOCKS, CPU)
    assert caught.value.field == "kv_dtype"


def test_cache_beyond_memory_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        KvCache(layout(), 2**44, CPU)
    assert caught.value.field == "num_blocks"


@pytest.mark.parametrize(("source_dtype", "dtype"), list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES)))
@pytest.mark.parametrize(("source_block_size", "block_size"), [(16, 16), (8, 32), (64, 16)])
def test_converted_tokens_arrive_in_place(
    source_dtype: KvDtype, dtype: KvDtype, source_block_size: int, block_size: int
) -> None:
    source = random_cache(1, block_size=source_block_size, dtype=source_dtype)
    target = random_cache(2, block_size=block_size, dtype=dtype)
    num_tokens, table = 70, [9, 1, 4, 2, 7, 0, 11, 3, 5][: -(-128 // block_size)]
    source_ids = [6, 3, 8, 1, 2, 0, 9, 4, 5][: source.layout.num_blocks(num_tokens)]
    before = sequence_kv(target, 1, table).clone()

    target.write_converted(1, 0, num_tokens, table, memoryview(bytes(read(source, 0, source_ids))), source.layout)

    after, sent = sequence_kv(target, 1, table), sequence_kv(source, 0, source_ids)
    assert torch.equal(after[:num_tokens], sent[:num_tokens].to(cache_dtype(dtype)))
    assert torch.equal(after[num_tokens:], before[num_tokens:]), "the rest of the last source block is not copied"


@pytest.mark.parametrize("token_start", [8, 16, 24, 40])
def test_converted_tokens_may_begin_inside_a_target_block(token_start: int) -> None:
    source, target = random_cache(1, block_size=8), random_cache(2, block_size=16)
    expected = sequence_kv(target, 0, [3, 0, 8, 5]).clone()
    expected[token_start : token_start + 11] = sequence_kv(source, 0, [2, 7])[:11]
    payload = memoryview(bytes(read(source, 0, [2, 7])))
    target.write_converted(0, token_start, 11, [3, 0, 8, 5], payload, source.layout)
    assert torch.equal(sequence_kv(target, 0, [3, 0, 8, 5]), expected)


def test_int8_blocks_are_scaled_back() -> None:
    source, target = random_cache(1), random_cache(2, block_size=8, dtype=KvDtype.BF16)
    wire = layout(dtype=KvDtype.INT8)
    payload = encode_int8_blocks(source.tensor[0, [4, 6]])
    assert payload.shape == (2, wire.block_bytes)
    target.write_converted(0, 0, 32, [1, 3, 5, 7], memoryview(payload.numpy().tobytes()), wire)
    sent = sequence_kv(source, 0, [4, 6])
    error = (sequence_kv(target, 0, [1, 3, 5, 7]).float() - sent).abs()
    bound = sent.abs().amax(-1, keepdim=True) * (0.5 / 127 + 2**-8) + 1e-6
    assert bool((error <= bound).all())


def test_int8_keeps_rows_of_zeros_and_the_largest_element() -> None:
    blocks = torch.zeros(1, 2, 3, 16, 4)
    blocks[0, 0, 0, 0] = torch.tensor([-2.54, 0.02, 1.28, 0.0])
    wire = layout(dtype=KvDtype.INT8)
    decoded = decode_blocks(memoryview(encode_int8_blocks(blocks).numpy().tobytes()), wire)
    torch.testing.assert_close(decoded, blocks, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("token_start", "num_tokens", "num_bytes", "what"),
    [
        (4, 8, 1536, "does not begin a block"),
        (-16, 8, 1536, "does not begin a block"),
        (16, 17, 3072, "no room"),
        (0, -1, 0, "no room"),
        (0, 17, 1536, "are not the blocks of 17 tokens"),
        (0, 16, 3072, "are not the blocks of 16 tokens"),
        (0, 16, 1535, "are not the blocks of 16 tokens"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(token_start: int, num_tokens: int, num_bytes: int, what: str) -> None:
    cache = random_cache()
    before = cache.tensor.clone()
    with pytest.raises(LayoutMismatch, match=what):
        cache.write_converted(0, token_start, num_tokens, [0, 1], memoryview(bytes(num_bytes)), layout())
    assert torch.equal(cache.tensor, before)


@pytest.mark.parametrize(
    "change", [{"model_fingerprint": "g"}, {"num_layers": 3}, {"num_kv_heads": 1}, {"head_dim": 8}]
)
def test_blocks_of_another_geometry_are_refused(change: dict[str, int | str]) -> None:
    with pytest.raises(LayoutMismatch, match=next(iter(change))):
        random_cache().write_converted(0, 0, 0, [0], memoryview(b""), layout(**change))  # type: ignore[arg-type]  # keywords passed through
