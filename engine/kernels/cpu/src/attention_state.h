// What attention works on: rows of queries, the splits of their keys, and the online softmax that joins the splits.
#pragma once

#include <algorithm>

#include "kv_cache.h"

static const int SPLIT = 256;
static const int RUN = 8;  // keys that surely lie together: the smallest block
static const int NUM_RUNS = SPLIT / RUN;
static const int QUERY_BLOCK = 3;  // queries of an int8 cache that are attended together

// Always inlined: GCC takes a function that only prefetches for one without effect, and drops calls of it. Into the
// second-level cache, as weights are (gemm_avx512.h).
static ALWAYS_INLINED void prefetch(const uint8_t* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

struct AttentionShape {
    int group_size;      // query heads that share the KV head
    int padded_dim;      // head_dim up to a multiple of 16; rows of `query` and `out` are that long
    int window;          // positions looked back at, the own included; 0 = all
    int64_t row_stride;  // floats from a row's heads to the next row's
};

struct AttentionRows {
    const float* query;  // first row, first head of the group: scaled
    int num_rows;
    int first_position;  // of the first row
    const int32_t* block_table;
    int kv_head;
};

// A state of the online softmax for one query head: `largest` score, `total` weight, and padded_dim weighted sums of V.
struct AttentionState {
    float* largest;
    float* total;
    float* sums;
};

struct Range {
    int first, end;
};

// A query head in integers: see attention_int8.h.
struct Int8Query {
    float scale;
    int32_t start_of_high, start_of_low;  // see i_dot_offset
};

struct AttentionScratch {
    float* weights;     // [queries, SPLIT] scores, then weights; of an int8 cache only a block's at a time
    float* split_sums;  // [queries, padded_dim]
    float* split_largest;
    float* split_total;
    Range* seen;  // [rows]
    // Of caches of floats.
    float* keys;  // [SPLIT, padded_dim] where they must be widened
    float* values;
    const uint8_t* key_runs[NUM_RUNS];  // where RUN keys lie
    const uint8_t* value_runs[NUM_RUNS];
    // Of int8 caches.
    uint8_t* key_lines;   // [SPLIT / 16, padded_dim / 4, 64]
    int8_t* value_lines;  // [SPLIT / 4, padded_dim / 16, 64]
    float key_scales[SPLIT], value_scales[SPLIT];
    int8_t* query_digits;  // [queries / QUERY_BLOCK, padded_dim / 4, QUERY_BLOCK, 2, 4]
    Int8Query* int8_queries;
    int8_t* weight_digits;  // [QUERY_BLOCK, 2, SPLIT]
    float weight_steps[QUERY_BLOCK];
};

static inline int64_t attention_scratch_floats(int queries, int padded_dim) {
    const int64_t in_blocks = round_up(queries, QUERY_BLOCK), words_of_query = sizeof(Int8Query) / 4;
    return in_blocks * (padded_dim / 2) + queries * (SPLIT + padded_dim + 4 + words_of_query) +
           QUERY_BLOCK * (SPLIT + SPLIT / 2) + (int64_t)2 * SPLIT * padded_dim;
}

static inline void attention_scratch_in(AttentionScratch* s, float* memory, int queries, int padded_dim) {
    s->keys = memory;
    s->values = s->keys + SPLIT * padded_dim;
    s->key_lines = (uint8_t*)s->keys;  // a cache is of either type
    s->value_lines = (int8_t*)s->values;
    s->weights = s->values + SPLIT * padded_dim;
    s->weight_digits = (int8_t*)(s->weights + std::max(queries, QUERY_BLOCK) * SPLIT);
    s->split_sums = (float*)s->weight_digits + QUERY_BLOCK * (SPLIT / 2);
    s->query_digits = (int8_t*)(s->split_sums + queries * padded_dim);
    s->split_largest = (float*)s->query_digits + round_up(queries, QUERY_BLOCK) * (padded_dim / 2);
    s->split_total = s->split_largest + queries;
    s->int8_queries = (Int8Query*)(s->split_total + queries);
    s->seen = (Range*)(s->int8_queries + queries);
}

static inline Range seen_in_split(int position, int window, int split) {
    const int start = split * SPLIT, oldest = window && position >= window ? position - window + 1 : 0;
    int first = oldest > start ? oldest - start : 0;
    first = first < SPLIT ? first : SPLIT;
    const int end = position + 1 - start < SPLIT ? position + 1 - start : SPLIT;
    return {first, end > first ? end : first};
}

// Turn a query's scores into weights. `keep(k, weights, lo, hi)` takes those of keys k..k+15, of which lo..hi-1 are seen
// and the others 0; keys outside `seen` up to the bounds get 0.
template <class KEEP>
static inline void soft_max(float* scores, Range seen, int first, int end, float* largest, float* total, KEEP keep) {
    const int first_tile = first / 16 * 16;
    F most = f_set(-INFINITY);
    for (int k = std::max(first_tile, seen.first / 16 * 16); k < seen.end; k += 16) {
        const int lo = std::max(seen.first - k, 0), hi = std::min(seen.end - k, 16);
        F x = f_load(scores + k);
        if (hi - lo < 16) {
            x = f_keep_lanes(x, lo, hi, -INFINITY);
            f_store(scores + k, x);
        }
        most = f_max(most, x);
    }
    *largest = f_fold_max(most);
    const F m = f_set(*largest);
    F sum = f_zero();
    for (int k = first_tile; k < end; k += 16) {
        const int lo = std::max(seen.first - k, 0), hi = std::min(seen.end - k, 16);
        if (lo >= hi) {
            keep(k, f_zero(), 0, 0);
            continue;
        }
        const F e = f_exp(f_load(scores + k) - m);
        sum = sum + e;
        keep(k, e, lo, hi);
    }
    *total = f_fold_sum(sum);
}

// Add a later split's state to an earlier one.
static inline void join_states(const AttentionState& state, float largest, float total, const float* sums,
                               int padded_dim) {
    const float most = *state.largest > largest ? *state.largest : largest;
    const float keep = exp_one(*state.largest - most), add = exp_one(largest - most);
    *state.total = *state.total * keep + total * add;
    *state.largest = most;
    const F k = f_set(keep), a = f_set(add);
    for (int i = 0; i < padded_dim; i += 16)
        f_store(state.sums + i, f_fma(f_load(state.sums + i), k, f_load(sums + i) * a));
}
