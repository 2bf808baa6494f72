"""Blocks in and out of the cache as bytes, and conversions on the way in."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.model.kv_cache import KvCache
from engine.model.kv_convert import element_dtype, quantize
from kvrelay.errors import InvalidRequest, LayoutMismatch

CPU = torch.device("cpu")
NUM_BLOCKS = 12
FLOAT_DTYPES = (KvDtype.FP32, KvDtype.BF16, KvDtype.FP16)
NARROW_DTYPES = (KvDtype.INT8, KvDtype.FP8)
DTYPES = tuple(KvDtype)


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
    generator = torch.Generator().manual_seed(seed)
    if cache.scales is None:
        cache.elements.copy_(torch.randn(cache.elements.shape, generator=generator))
    else:
        largest = 127 if cache.layout.dtype is KvDtype.INT8 else 448
        cache.elements.copy_(torch.randint(-largest, largest + 1, cache.elements.shape, generator=generator))
        cache.scales.copy_(torch.rand(cache.scales.shape, generator=generator))
    return cache


def read(cache: KvCache, layer: int, block_ids: Sequence[int]) -> bytearray:
    out = bytearray(len(block_ids) * cache.layout.block_bytes)
    cache.read_blocks(layer, block_ids, memoryview(out))
    return out


def sequence_kv(cache: KvCache, layer: int, block_ids: Sequence[int]) -> Tensor:
    """K and V of a sequence token by token: [tokens, 2, heads, dim], as values."""
    values = cache.elements[layer, list(block_ids)]
    if cache.scales is not None:
        values = values.float() * cache.scales[layer, list(block_ids)][..., None]
    return values.permute(0, 3, 1, 2, 4).flatten(0, 1)


def raw(blocks: Tensor) -> bytes:
    return blocks.contiguous().view(torch.uint8).numpy().tobytes()


def covering(block_size: int, token_start: int, num_tokens: int) -> int:
    """Blocks that hold the tokens, when block boundaries are counted from token 0."""
    return (token_start + num_tokens - 1) // block_size - token_start // block_size + 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_ids", [[5], [3, 4, 5, 6], [7, 2, 3, 11, 0], list(range(NUM_BLOCKS)), []])
def test_read_blocks_gathers_whole_blocks_in_order(block_ids: list[int], dtype: KvDtype) -> None:
    cache = random_cache(dtype=dtype)
    assert bytes(read(cache, 1, block_ids)) == raw(cache.bytes[1, block_ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_ids", [[5], [3, 4, 5, 6], [7, 2, 3, 11, 0], []])
def test_written_blocks_are_read_back_and_others_untouched(block_ids: list[int], dtype: KvDtype) -> None:
    source, target = random_cache(1, dtype=dtype), random_cache(2, dtype=dtype)
    expected = target.bytes.clone()
    expected[0, block_ids] = source.bytes[1, block_ids]
    target.write_blocks(0, block_ids, memoryview(bytes(read(source, 1, block_ids))))
    assert torch.equal(target.bytes, expected)


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


def test_an_int8_block_is_its_elements_and_then_their_scales() -> None:
    cache = KvCache(layout(dtype=KvDtype.INT8), NUM_BLOCKS, CPU)
    assert cache.scales is not None
    num_elements, num_scales = 2 * 3 * 16 * 4, 2 * 3 * 16
    elements = (torch.arange(num_elements) % 255 - 127).to(torch.int8)
    scales = torch.arange(num_scales, dtype=torch.float32)
    cache.write_blocks(1, [4], memoryview(raw(elements) + raw(scales)))
    assert torch.equal(cache.elements[1, 4].flatten(), elements)
    assert torch.equal(cache.scales[1, 4].flatten(), scales)
    assert cache.scales[1, 4, 1, 2, 15] == num_scales - 1
    assert not cache.bytes[0].any()
    assert not cache.bytes[1, :4].any()
    assert not cache.bytes[1, 5:].any()


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_kernels_without_scales_are_refused_an_8_bit_cache_by_name(dtype: KvDtype) -> None:
    with pytest.raises(InvalidRequest, match=dtype) as caught:
        _ = KvCache(layout(dtype=dtype), NUM_BLOCKS, CPU).tensor
    assert caught.value.field == "kv_dtype"


def test_cache_beyond_memory_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest) as caught:
        KvCache(layout(), 2**44, CPU)
    assert caught.value.field == "num_blocks"


@pytest.mark.parametrize(("source_dtype", "dtype"), list(itertools.product(FLOAT_DTYPES, FLOAT_DTYPES)))
@pytest.mark.parametrize(("source_block_size", "block_size"), [(16, 16), (8, 32), (64, 16)])
@pytest.mark.parametrize(("token_start", "num_tokens"), [(0, 70), (16, 16), (13, 40), (63, 2), (95, 1)])
def test_converted_tokens_arrive_in_place(
    source_dtype: KvDtype,
    dtype: KvDtype,
    source_block_size: int,
    block_size: int,
    token_start: int,
    num_tokens: int,
) -> None:
    source = random_cache(1, block_size=source_block_size, dtype=source_dtype)
    target = random_cache(2, block_size=block_size, dtype=dtype)
    source_ids = [6, 3, 8, 1, 2, 0, 9, 4, 5, 11, 7, 10][: covering(source_block_size, token_start, num_tokens)]
    target_ids = [9, 1, 4, 2, 7, 0, 11, 3, 5, 8, 6, 10][: covering(block_size, token_start, num_tokens)]
    expected = target.elements.clone()
    sent = sequence_kv(source, 0, source_ids)
    for index in range(num_tokens):
        token = token_start + index
        block = target_ids[token // block_size - token_start // block_size]
        value = sent[token - token_start // source_block_size * source_block_size]
        expected[1, block, :, :, token % block_size] = value.to(element_dtype(dtype))

    payload = memoryview(bytes(read(source, 0, source_ids)))
    target.write_converted(1, token_start, num_tokens, target_ids, payload, source.layout)

    assert torch.equal(target.elements, expected), "every other slot stays as it was"


@pytest.mark.parametrize("narrow", NARROW_DTYPES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_8_bit_blocks_are_scaled_back(dtype: KvDtype, narrow: KvDtype) -> None:
    source, target = random_cache(1, dtype=narrow), random_cache(2, block_size=8, dtype=dtype)
    payload = memoryview(bytes(read(source, 0, [4, 6])))
    target.write_converted(0, 5, 22, [1, 3, 5, 7], payload, source.layout)
    sent = sequence_kv(source, 0, [4, 6])[5:27]
    assert torch.equal(sequence_kv(target, 0, [1, 3, 5, 7])[5:27], sent.to(element_dtype(dtype)))


@pytest.mark.parametrize("narrow", NARROW_DTYPES)
@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_tokens_are_quantized_for_an_8_bit_cache(dtype: KvDtype, narrow: KvDtype) -> None:
    source, target = random_cache(1, block_size=8, dtype=dtype), random_cache(2, dtype=narrow)
    # Half a step of int8 is the same for all elements; fp8 keeps 3 bits of each element's own mantissa.
    largest, share = (127, 0.5 / 127) if narrow is KvDtype.INT8 else (448, 2.0**-4)
    before = target.bytes.clone()
    target.write_converted(1, 9, 20, [2, 0], memoryview(bytes(read(source, 0, [3, 1, 4]))), source.layout)
    sent = sequence_kv(source, 0, [3, 1, 4])[1:21].float()
    found = sequence_kv(target, 1, [2, 0])
    error = (found[9:29] - sent).abs()
    assert bool((error <= sent.abs().amax(-1, keepdim=True) * share + 1e-6).all())
    assert bool((error > 0).any())
    assert target.scales is not None
    token_scales = target.scales[1, [2, 0]].permute(0, 3, 1, 2).flatten(0, 1)
    torch.testing.assert_close(token_scales[9:29], sent.abs().amax(-1) / largest)
    restored = KvCache(target.layout, NUM_BLOCKS, CPU)
    restored.bytes.copy_(before)
    untouched = [*range(9), *range(29, 32)]
    assert torch.equal(found[untouched], sequence_kv(restored, 1, [2, 0])[untouched])
    assert torch.equal(target.bytes[0], before[0])


@pytest.mark.parametrize("dtype", NARROW_DTYPES)
def test_8_bit_tokens_move_between_block_sizes_bit_for_bit(dtype: KvDtype) -> None:
    source, target = random_cache(1, dtype=dtype), random_cache(2, block_size=8, dtype=dtype)
    target.write_converted(0, 3, 25, [5, 1, 7, 2], memoryview(bytes(read(source, 1, [8, 0]))), source.layout)
    assert source.scales is not None
    assert target.scales is not None
    for token in range(3, 28):
        there, here = ([8, 0][token // 16], token % 16), ([5, 1, 7, 2][token // 8], token % 8)
        assert torch.equal(target.elements[0, here[0], :, :, here[1]], source.elements[1, there[0], :, :, there[1]])
        assert torch.equal(target.scales[0, here[0], :, :, here[1]], source.scales[1, there[0], :, :, there[1]])


def test_int8_keeps_rows_of_zeros_and_the_largest_element() -> None:
    values = torch.zeros(2, 2, 3, 4)
    values[0, 1, 2] = torch.tensor([-2.54, 0.02, 1.28, 0.0])
    tokens = quantize(values, KvDtype.INT8)
    assert tokens.elements[0, 1, 2].tolist() == [-127, 1, 64, 0]
    torch.testing.assert_close(tokens.as_dtype(KvDtype.FP32).elements, values, atol=1e-6, rtol=1e-6)


def test_fp8_keeps_rows_of_zeros_and_scales_the_largest_element_to_448() -> None:
    values = torch.zeros(2, 2, 3, 4)
    values[0, 1, 2] = torch.tensor([-8.96, 0.02, 5.0, 0.0])
    tokens = quantize(values, KvDtype.FP8)
    assert tokens.elements[0, 1, 2].float().tolist() == [-448.0, 1.0, 256.0, 0.0]
    torch.testing.assert_close(tokens.as_dtype(KvDtype.FP32).elements, values, atol=0, rtol=2.0**-4)
    assert not tokens.elements[1].float().any()


@pytest.mark.parametrize(
    ("token_start", "num_tokens", "num_bytes", "what"),
    [
        (-16, 8, 1536, "tokens from -16"),
        (0, -1, 0, "-1 tokens"),
        (0, 0, 0, "0 tokens"),
        (16, 33, 4608, "2 blocks are not those"),
        (16, 16, 1536, "2 blocks are not those"),
        (8, 33, 4608, "2 blocks are not those of 33 tokens from 8"),
        (0, 17, 1536, "are not the blocks of tokens 0..17"),
        (8, 9, 1536, "are not the blocks of tokens 8..17"),
        (0, 17, 4608, "are not the blocks of tokens 0..17"),
        (0, 17, 3071, "are not the blocks of tokens 0..17"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(token_start: int, num_tokens: int, num_bytes: int, what: str) -> None:
    cache = random_cache()
    before = cache.bytes.clone()
    with pytest.raises(LayoutMismatch, match=what):
        cache.write_converted(0, token_start, num_tokens, [0, 1], memoryview(bytes(num_bytes)), layout())
    assert torch.equal(cache.bytes, before)


@pytest.mark.parametrize(
    "change", [{"model_fingerprint": "g"}, {"num_layers": 3}, {"num_kv_heads": 1}, {"head_dim": 8}]
)
def test_blocks_of_another_geometry_are_refused(change: dict[str, int | str]) -> None:
    name = next(iter(change)).replace("num_layers", "num_model_layers")
    with pytest.raises(LayoutMismatch, match=name):
        random_cache().write_converted(0, 0, 1, [0], memoryview(b""), layout(**change))  # type: ignore[arg-type]  # keywords passed through
