// One layer of the paged KV cache: where a token's K and V lie, and writing them in the cache's element type.
//
// A block is [2 (K, V), num_kv_heads, block_size, head_dim] elements; int8 caches have fp32 scales
// [2, num_kv_heads, block_size] behind them. The layout is that of engine/cache/layout.py.
#pragma once

#include "simd.h"

enum CacheType { KV_FP32 = 0, KV_BF16 = 1, KV_FP16 = 2, KV_INT8 = 3 };

static const int MAX_HEAD_DIM = 512;

struct LayerCache {
    uint8_t* data;
    int64_t block_bytes;
    int type;
    int num_kv_heads;
    int block_size;  // a power of two from 8 up
    int head_dim;
};

static constexpr int element_bytes(int type) { return type == KV_FP32 ? 4 : type == KV_INT8 ? 1 : 2; }

// `part` is 0 for K, 1 for V.
static inline uint8_t* cached_token(const LayerCache& c, int64_t block, int part, int head, int offset) {
    const int64_t row = ((int64_t)part * c.num_kv_heads + head) * c.block_size + offset;
    return c.data + block * c.block_bytes + row * c.head_dim * element_bytes(c.type);
}
static inline float* cached_scale(const LayerCache& c, int64_t block, int part, int head, int offset) {
    const int64_t elements = (int64_t)2 * c.num_kv_heads * c.block_size * c.head_dim;
    const int64_t row = ((int64_t)part * c.num_kv_heads + head) * c.block_size + offset;
    return (float*)(c.data + block * c.block_bytes + elements) + row;
}

// The scale of a token's values, and the values as int8: symmetric, the largest magnitude is 127.
static inline float quantize_token(const float* values, int n, int8_t* out) {
    F largest_lanes = f_zero();
    for (int i = 0; i < n; i += 16) largest_lanes = f_max(largest_lanes, f_abs(load_up_to(values, i, n)));
    const float scale = f_fold_max(largest_lanes) / 127.0f;
    const F step = f_set(scale > 0.0f ? scale : 1.0f);
    int8_t quants[32];
    for (int i = 0; i < n; i += 32) {
        quantize_32(load_up_to(values, i, n) / step, load_up_to(values, i + 16, n) / step, quants);
        memcpy(out + i, quants, (size_t)(n - i < 32 ? n - i : 32));
    }
    return scale;
}

static inline void write_token(const LayerCache& c, int64_t slot, int part, int head, const float* values) {
    const int64_t block = slot / c.block_size;
    const int offset = (int)(slot % c.block_size);
    uint8_t* to = cached_token(c, block, part, head, offset);
    if (c.type == KV_FP32) {
        memcpy(to, values, (size_t)c.head_dim * 4);
    } else if (c.type == KV_BF16) {
        for (int i = 0; i < c.head_dim; i++) ((uint16_t*)to)[i] = f32_to_bf16(values[i]);
    } else if (c.type == KV_FP16) {
        for (int i = 0; i < c.head_dim; i++) ((uint16_t*)to)[i] = f32_to_f16(values[i]);
    } else {
        *cached_scale(c, block, part, head, offset) = quantize_token(values, c.head_dim, (int8_t*)to);
    }
}

template <int TYPE>
static inline F load_elements(const uint8_t* from, int first) {
    if (TYPE == KV_FP32) return f_load((const float*)from + first);
    if (TYPE == KV_BF16) return f_load_bf16((const uint16_t*)from + first);
    return f_load_f16((const uint16_t*)from + first);
}

// Tokens' elements as fp32, each with zeros up to a multiple of 16.
template <int TYPE>
static void widen_tokens(const uint8_t* from, int num_tokens, int head_dim, float* to) {
    const int bytes = head_dim * element_bytes(TYPE), padded = (head_dim + 15) / 16 * 16;
    for (int token = 0; token < num_tokens; token++, from += bytes, to += padded) {
        int i = 0;
        for (; i + 16 <= head_dim; i += 16) f_store(to + i, load_elements<TYPE>(from, i));
        if (i == head_dim) continue;
        uint8_t rest[64] = {0};
        memcpy(rest, from + i * element_bytes(TYPE), (size_t)((head_dim - i) * element_bytes(TYPE)));
        f_store(to + i, load_elements<TYPE>(rest, 0));
    }
}

static inline void widen_tokens(int type, const uint8_t* from, int num_tokens, int head_dim, float* to) {
    if (type == KV_FP32) widen_tokens<KV_FP32>(from, num_tokens, head_dim, to);
    else if (type == KV_BF16) widen_tokens<KV_BF16>(from, num_tokens, head_dim, to);
    else widen_tokens<KV_FP16>(from, num_tokens, head_dim, to);
}
