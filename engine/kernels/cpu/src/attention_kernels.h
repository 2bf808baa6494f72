// The two loops of attention over the keys of a split: scores of a few queries, and the weighted sum of values.
//
// Keys and values are read as they are cached and widened in registers. attention.h says in which order sums are taken;
// how many queries and lanes are in registers at once changes none of it.
#pragma once

#include <algorithm>

#include "kv_cache.h"

static const int SPLIT = 256;
static const int RUN = 8;  // keys that surely lie together: the smallest block
static const int NUM_RUNS = SPLIT / RUN;

static const int RUNS_AHEAD = 4;  // asked for before their use, where little is computed on each

#if defined(__AVX512F__)
static const int SCORED_AT_ONCE = 3, WEIGHED_AT_ONCE = 6, LANES_AT_ONCE = 4;
#else
static const int SCORED_AT_ONCE = 1, WEIGHED_AT_ONCE = 3, LANES_AT_ONCE = 2;
#endif

static inline void prefetch(const uint8_t* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// CHUNKS is dim / 16, or 0 for any.
template <int TYPE, int CHUNKS, int QUERIES>
static inline void score_queries(const float* queries, int dim, const uint8_t* const* runs, float* scores) {
    const int chunks = CHUNKS ? CHUNKS : dim / 16, bytes = chunks * 16 * element_bytes(TYPE);
    F folded[QUERIES][4];
    for (int j = 0; j < 4; j++) {  // keys j, 4 + j, 8 + j, 12 + j: see f_fold_four
        const uint8_t *early = runs[0] + j * bytes, *late = runs[1] + j * bytes;
        F sum[QUERIES][4];
        for (int q = 0; q < QUERIES; q++)
            for (int k = 0; k < 4; k++) sum[q][k] = f_zero();
#pragma GCC unroll 8
        for (int c = 0; c < chunks; c++) {
            const F keys[4] = {load_elements<TYPE>(early, c * 16), load_elements<TYPE>(early + 4 * bytes, c * 16),
                               load_elements<TYPE>(late, c * 16), load_elements<TYPE>(late + 4 * bytes, c * 16)};
            for (int q = 0; q < QUERIES; q++) {
                const F query = f_load(queries + q * chunks * 16 + c * 16);
                for (int k = 0; k < 4; k++) sum[q][k] = f_fma(query, keys[k], sum[q][k]);
            }
        }
        for (int q = 0; q < QUERIES; q++) folded[q][j] = f_fold_four(sum[q][0], sum[q][1], sum[q][2], sum[q][3]);
    }
    for (int q = 0; q < QUERIES; q++) f_store(scores + q * SPLIT, f_join_four(folded[q]));
}

template <int TYPE, int CHUNKS>
static inline void score_chunks(int count, const float* queries, int dim, const uint8_t* const* runs, float* scores) {
    if (count == 1) score_queries<TYPE, CHUNKS, 1>(queries, dim, runs, scores);
    else if (count == 2) score_queries<TYPE, CHUNKS, (SCORED_AT_ONCE >= 2 ? 2 : 1)>(queries, dim, runs, scores);
    else score_queries<TYPE, CHUNKS, (SCORED_AT_ONCE >= 3 ? 3 : 1)>(queries, dim, runs, scores);
}

// Scores of `count` queries, `dim` floats each, against the 16 keys of two runs; `SPLIT` floats from query to query.
template <int TYPE>
static inline void score_16(int count, const float* queries, int dim, const uint8_t* const* runs, float* scores) {
    if (dim == 64) score_chunks<TYPE, 4>(count, queries, dim, runs, scores);
    else if (dim == 128) score_chunks<TYPE, 8>(count, queries, dim, runs, scores);
    else score_chunks<TYPE, 0>(count, queries, dim, runs, scores);
}

template <int TYPE, int QUERIES, int LANES>
static inline void weigh_lanes(const float* weights, const uint8_t* const* runs, int dim, int lane, int first, int end,
                               float* out) {
    const int bytes = dim * element_bytes(TYPE);
    F sum[QUERIES][LANES];
    for (int q = 0; q < QUERIES; q++)
        for (int l = 0; l < LANES; l++) sum[q][l] = f_zero();
    for (int run = first / RUN; run * RUN < end; run++) {
        const int from = std::max(first, run * RUN), to = std::min(end, run * RUN + RUN);
        for (int key = from; key < to; key++) {
            const uint8_t* value = runs[run] + key % RUN * bytes;
            F v[LANES];
            for (int l = 0; l < LANES; l++) v[l] = load_elements<TYPE>(value, lane + l * 16);
            for (int q = 0; q < QUERIES; q++) {
                const F w = f_set(weights[q * SPLIT + key]);
                for (int l = 0; l < LANES; l++) sum[q][l] = f_fma(w, v[l], sum[q][l]);
            }
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int l = 0; l < LANES; l++) f_store(out + q * dim + lane + l * 16, sum[q][l]);
}

template <int TYPE, int QUERIES>
static inline void weigh_all(const float* weights, const uint8_t* const* runs, int dim, int first, int end,
                             float* out) {
    int lane = 0;
    for (; lane + LANES_AT_ONCE * 16 <= dim; lane += LANES_AT_ONCE * 16)
        weigh_lanes<TYPE, QUERIES, LANES_AT_ONCE>(weights, runs, dim, lane, first, end, out);
    for (; lane < dim; lane += 16) weigh_lanes<TYPE, QUERIES, 1>(weights, runs, dim, lane, first, end, out);
}

// out[query, dim] = sum over keys first..end-1 of weight[query, key] * value[key, dim], for `count` queries.
template <int TYPE>
static inline void weigh_values(int count, const float* weights, const uint8_t* const* runs, int dim, int first,
                                int end, float* out) {
    switch (count) {
#define CASE(Q) \
    case Q: return weigh_all<TYPE, (Q <= WEIGHED_AT_ONCE ? Q : 1)>(weights, runs, dim, first, end, out);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}
