"""Device functions that `sampling.py` is made of: weights, noise, and passes over one row of the vocabulary.

The order of tokens is by larger weight, then by smaller id. A bound is a place in it, (weight, id).
"""

import triton.language as tl

from engine.kernels.triton.launch import jit

_NO_LIMIT = tl.constexpr(0x7FFFFFFF)


@jit
def weights_of(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    row: tl.tensor,
    ids: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    HAS_MASK: tl.constexpr,
) -> tl.tensor:
    """Logits after temperature (0 = as they are) of token ids, fp32; -inf for what is banned or no token.

    NaN counts as +inf, so that a row which holds one is known by its largest weight.
    """
    is_token = ids < vocab_size
    logits = tl.load(logits_ptr + row.to(tl.int64) * vocab_size + ids, mask=is_token, other=float("-inf"))
    if HAS_MASK:
        words = tl.load(allowed_ptr + row * tl.cdiv(vocab_size, 32) + ids // 32, mask=is_token, other=0)
        logits = tl.where(((words >> (ids % 32)) & 1) != 0, logits, float("-inf"))
    # The same rounding as on the CPU; adding 0 makes -0 the 0 that it compares equal to.
    weights = tl.div_rn(logits, tl.where(temperature > 0, temperature, 1.0)) + 0.0
    return tl.where(weights != weights, float("inf"), weights)


@jit
def gumbel_noise(seed: tl.tensor, position: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Gumbel noise of token ids, fp64; see `engine/sampling/noise.py`."""
    zeros = tl.zeros_like(ids)
    word, _, _, _ = tl.philox(seed, ids, zeros + position, zeros, zeros)
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return -tl.log(-tl.log(uniform))


@jit
def is_before(weights: tl.tensor, ids: tl.tensor, bound_weight: tl.tensor, bound_id: tl.tensor) -> tl.tensor:
    """Whether tokens come before a bound."""
    return (weights > bound_weight) | ((weights == bound_weight) & (ids < bound_id))


@jit
def is_within(weights: tl.tensor, ids: tl.tensor, bound_weight: tl.tensor, bound_id: tl.tensor) -> tl.tensor:
    """Whether tokens come before a bound or are it."""
    return (weights > bound_weight) | ((weights == bound_weight) & (ids <= bound_id))


@jit
def mass(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    bound_weight: tl.tensor,
    bound_id: tl.tensor,
    HAS_MASK: tl.constexpr,
    IS_INCLUSIVE: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Sum of exp(weight - peak) over the tokens before a bound, or up to it; fp64."""
    total = tl.full([], 0.0, tl.float64)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        weights = weights_of(logits_ptr, allowed_ptr, row, ids, vocab_size, temperature, HAS_MASK)
        if IS_INCLUSIVE:
            counts = is_within(weights, ids, bound_weight, bound_id)
        else:
            counts = is_before(weights, ids, bound_weight, bound_id)
        # Few tiles hold any token of a narrow bound; the others cost no exponential.
        if tl.max(counts.to(tl.int32), 0) > 0:
            # The difference is taken in fp32, as on the CPU.
            shares = tl.exp((weights - peak).to(tl.float64))
            total += tl.sum(tl.where(counts, shares, 0.0), 0)
    return total


@jit
def kth_best(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    k: tl.tensor,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The place of the k-th token in the order, k >= 1; the last place if there are fewer.

    Radix selection: 8 bits of the weights' order at a time, a histogram of the tokens that share the bits before.

    Returns:
        (weight, id).
    """
    prefix = tl.full([], 0, tl.uint32)
    left = tl.minimum(k, vocab_size)
    num_equal = left
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for first in range(0, vocab_size, TILE):
            ids = first + tl.arange(0, TILE)
            weights = weights_of(logits_ptr, allowed_ptr, row, ids, vocab_size, temperature, HAS_MASK)
            keys = _ordered(weights)
            shares_prefix = ids < vocab_size
            if shift < 24:
                shares_prefix = shares_prefix & ((keys >> (shift + 8)) == prefix)
            digits = ((keys >> shift) & 255).to(tl.int32)
            counts += tl.histogram(digits, 256, mask=shares_prefix)
        buckets = tl.arange(0, 256)
        # Tokens in larger buckets come first; the k-th lies in the one where their number passes `left`.
        larger = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        is_bucket = (larger < left) & (larger + counts >= left)
        bucket = tl.sum(tl.where(is_bucket, buckets, 0), 0)
        num_equal = tl.sum(tl.where(is_bucket, counts, 0), 0)
        left -= tl.sum(tl.where(is_bucket, larger, 0), 0)
        prefix = (prefix << 8) | bucket.to(tl.uint32)
    weight = _from_ordered(prefix)
    last_id = tl.full([], _NO_LIMIT, tl.int32)
    if num_equal > left:
        # Of the tokens with just this weight only the first `left` belong.
        num_before = tl.full([], 0, tl.int32)
        for first in range(0, vocab_size, TILE):
            ids = first + tl.arange(0, TILE)
            weights = weights_of(logits_ptr, allowed_ptr, row, ids, vocab_size, temperature, HAS_MASK)
            is_equal = ((weights == weight) & (ids < vocab_size)).to(tl.int32)
            places = num_before + tl.cumsum(is_equal, 0)
            last_id = tl.minimum(last_id, tl.min(tl.where((is_equal > 0) & (places == left), ids, _NO_LIMIT), 0))
            num_before += tl.sum(is_equal, 0)
    return weight, last_id


@jit
def search(
    logits_ptr: tl.tensor,
    allowed_ptr: tl.tensor,
    row: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    floor_weight: tl.tensor,
    floor_id: tl.tensor,
    ceiling_weight: tl.tensor,
    ceiling_id: tl.tensor,
    HAS_MASK: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Id of the token with the largest noisy weight among those up to the floor and before the ceiling."""
    best = tl.full([], float("-inf"), tl.float64)
    token = tl.full([], 0, tl.int32)
    for first in range(0, vocab_size, TILE):
        ids = first + tl.arange(0, TILE)
        weights = weights_of(logits_ptr, allowed_ptr, row, ids, vocab_size, temperature, HAS_MASK)
        is_left = is_within(weights, ids, floor_weight, floor_id) & is_before(weights, ids, ceiling_weight, ceiling_id)
        if tl.max(is_left.to(tl.int32), 0) > 0:
            noisy = tl.where(is_left, weights.to(tl.float64) + gumbel_noise(seed, position, ids), float("-inf"))
            largest, index = tl.max(noisy, 0, return_indices=True, return_indices_tie_break_left=True)
            token = tl.where(largest > best, first + index, token)
            best = tl.maximum(best, largest)
    return token


@jit
def first_of_chunks(
    best_ptr: tl.tensor, ids_ptr: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, BLOCK_CHUNKS: tl.constexpr
) -> tl.tensor:
    """The largest of a row's chunks, the first one of equals, and its token id."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    best = tl.load(best_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))
    largest, index = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    return largest, tl.load(ids_ptr + row * num_chunks + index)


@jit
def _ordered(weights: tl.tensor) -> tl.tensor:
    """fp32 as uint32 that compare alike: flip the sign bit of positive numbers, all bits of negative ones."""
    bits = weights.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@jit
def _from_ordered(keys: tl.tensor) -> tl.tensor:
    """The fp32 of `_ordered`."""
    bits = keys.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)
