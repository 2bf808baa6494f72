// Attention over a cache of floats: scores of a few queries, and the weighted sum of values.
//
// Keys and values are widened in registers as they are read if few queries read them, else once for all, into the
// scratch. attention.h says in which order sums are taken; how many queries and lanes are in registers at once changes
// none of it.
#pragma once

#include "attention_state.h"

static const int RUNS_AHEAD = 4;  // asked for before their use, where little is computed on each

#if defined(__AVX512F__)
static const int SCORED_AT_ONCE = 3, WEIGHED_AT_ONCE = 6, LANES_AT_ONCE = 4;
#else
static const int SCORED_AT_ONCE = 1, WEIGHED_AT_ONCE = 3, LANES_AT_ONCE = 2;
#endif

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

// Find the runs that hold keys first..end-1 (offsets in the split); copy them as fp32 if `is_widened`.
static void load_split(const LayerCache& c, const AttentionRows& rows, int padded_dim, int split, int first, int end,
                       bool is_widened, AttentionScratch& s) {
    const int first_run = first / 16 * 2, end_run = (end + 15) / 16 * 2;
    for (int run = first_run; run < end_run; run++) {
        // The last run may only fill a vector of scores: its keys are not seen, any will do.
        const int position = split * SPLIT + (run * RUN < end ? run : run - 1) * RUN;
        const int64_t block = rows.block_table[position / c.block_size];
        const int offset = position % c.block_size;
        s.key_runs[run] = cached_token(c, block, 0, rows.kv_head, offset);
        s.value_runs[run] = cached_token(c, block, 1, rows.kv_head, offset);
        if (is_widened) {
            float *keys = s.keys + run * RUN * padded_dim, *values = s.values + run * RUN * padded_dim;
            widen_tokens(c.type, s.key_runs[run], RUN, c.head_dim, keys);
            widen_tokens(c.type, s.value_runs[run], RUN, c.head_dim, values);
            s.key_runs[run] = (const uint8_t*)keys;
            s.value_runs[run] = (const uint8_t*)values;
        }
    }
}

// One split of `attend`, of which the rows see keys first..end-1; TYPE is that of the runs.
template <int TYPE>
static NOT_INLINED void attend_split(const AttentionShape& shape, const AttentionRows& rows, int first, int end,
                                     AttentionScratch& s) {
    const int dim = shape.padded_dim, group = shape.group_size, queries = rows.num_rows * group;
    const int run_bytes = RUN * dim * element_bytes(TYPE), end_run = (end + RUN - 1) / RUN;
    const bool is_few = queries <= WEIGHED_AT_ONCE;
    for (int run = first / RUN; is_few && run < std::min(end_run, first / RUN + RUNS_AHEAD); run++)
        prefetch(s.key_runs[run], run_bytes);
    for (int k = first / 16 * 16; k < end; k += 16) {
        for (int run = k / RUN; is_few && run < k / RUN + 2; run++) {
            if (run + RUNS_AHEAD < end_run) prefetch(s.key_runs[run + RUNS_AHEAD], run_bytes);
            if (run < end_run) prefetch(s.value_runs[run], run_bytes);
        }
        for (int row = 0; row < rows.num_rows; row++) {
            if (s.seen[row].first >= k + 16 || s.seen[row].end <= k) continue;
            const float* query = rows.query + row * shape.row_stride;
            for (int head = 0; head < group; head += SCORED_AT_ONCE)
                score_16<TYPE>(std::min(SCORED_AT_ONCE, group - head), query + head * dim, dim, s.key_runs + k / RUN,
                               s.weights + (row * group + head) * SPLIT + k);
        }
    }
    for (int row = 0, q = 0; row < rows.num_rows; row++)
        for (int head = 0; head < group; head++, q++)
            soft_max(s.weights + q * SPLIT, s.seen[row], first, end, s.split_largest + q, s.split_total + q,
                     [&](int k, F weights, int, int) { f_store(s.weights + q * SPLIT + k, weights); });
    for (int q = 0; q < queries; q += WEIGHED_AT_ONCE) {
        const int count = std::min(WEIGHED_AT_ONCE, queries - q);
        const int from = s.seen[q / group].first, to = s.seen[(q + count - 1) / group].end;
        weigh_values<TYPE>(count, s.weights + q * SPLIT, s.value_runs, dim, from, to, s.split_sums + q * dim);
    }
}
