// Paged attention of a few rows of one sequence over one KV head: the same order of operations for a decoded token, a
// draft to verify and a row of a prefill chunk, so a row's bits do not depend on which of these it is.
//
// Keys go in splits of SPLIT positions counted from 0. In a split, a row takes its largest score m, the weights
// e^(score - m), their sum and the weighted sum of V; splits are then joined in order (online softmax, arXiv
// 2205.14135).
//
//     score    head_dim products in 16 lanes, lanes folded in halves            (any number of keys at once)
//     sum      weights in 16 lanes by position, lanes folded in halves
//     output   fma over the keys in order
//
// What a row does not see has weight 0 and adds exactly nothing, so rows of different ranges share the loops. The loops
// over keys are in attention_kernels.h.
#pragma once

#include "attention_kernels.h"

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

struct AttentionScratch {
    float* weights;     // [queries, SPLIT] scores, then weights
    float* split_sums;  // [queries, padded_dim]
    float* split_largest;
    float* split_total;
    float* keys;  // [SPLIT, padded_dim] where they must be widened
    float* values;
    float key_scales[SPLIT], value_scales[SPLIT];  // of int8
    const uint8_t* key_runs[NUM_RUNS];             // where RUN keys lie
    const uint8_t* value_runs[NUM_RUNS];
    Range* seen;  // [rows]
};

static inline int64_t attention_scratch_floats(int queries, int padded_dim) {
    return (int64_t)queries * (SPLIT + padded_dim + 4) + (int64_t)2 * SPLIT * padded_dim;
}

static inline void attention_scratch_in(AttentionScratch* s, float* memory, int queries, int padded_dim) {
    s->keys = memory;
    s->values = s->keys + SPLIT * padded_dim;
    s->weights = s->values + SPLIT * padded_dim;
    s->split_sums = s->weights + queries * SPLIT;
    s->split_largest = s->split_sums + queries * padded_dim;
    s->split_total = s->split_largest + queries;
    s->seen = (Range*)(s->split_total + queries);
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
        if (c.type == KV_INT8) {
            memcpy(s.key_scales + run * RUN, cached_scale(c, block, 0, rows.kv_head, offset), RUN * sizeof(float));
            memcpy(s.value_scales + run * RUN, cached_scale(c, block, 1, rows.kv_head, offset), RUN * sizeof(float));
        }
    }
}

static inline Range seen_in_split(int position, int window, int split) {
    const int start = split * SPLIT, oldest = window && position >= window ? position - window + 1 : 0;
    int first = oldest > start ? oldest - start : 0;
    first = first < SPLIT ? first : SPLIT;
    const int end = position + 1 - start < SPLIT ? position + 1 - start : SPLIT;
    return {first, end > first ? end : first};
}

// Turn a query's scores into weights; keys outside `seen` up to the bounds get 0.
static inline void soft_max(float* scores, Range seen, int first, int end, const AttentionScratch& s, bool has_scales,
                            float* largest, float* total) {
    const int first_tile = first / 16 * 16;
    F most = f_set(-INFINITY);
    for (int k = first_tile; k < end; k += 16) {
        const int lo = seen.first - k < 0 ? 0 : seen.first - k, hi = seen.end - k < 16 ? seen.end - k : 16;
        if (lo >= hi) continue;
        F x = f_load(scores + k);
        if (has_scales) x = x * f_load(s.key_scales + k);
        x = f_keep_lanes(x, lo, hi, -INFINITY);
        f_store(scores + k, x);
        most = f_max(most, x);
    }
    *largest = f_fold_max(most);
    const F m = f_set(*largest);
    F sum = f_zero();
    for (int k = first_tile; k < end; k += 16) {
        if (seen.first >= k + 16 || seen.end <= k || seen.first >= seen.end) {
            f_store(scores + k, f_zero());
            continue;
        }
        const F e = f_exp(f_load(scores + k) - m);
        sum = sum + e;
        f_store(scores + k, has_scales ? e * f_load(s.value_scales + k) : e);
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

// One split of `attend`, of which the rows see keys first..end-1; TYPE is that of the runs.
template <int TYPE>
static NOT_INLINED void attend_split(const AttentionShape& shape, const AttentionRows& rows, int first, int end,
                                     bool has_scales, const AttentionState* states, AttentionScratch& s) {
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
            soft_max(s.weights + q * SPLIT, s.seen[row], first, end, s, has_scales, s.split_largest + q,
                     s.split_total + q);
    for (int q = 0; q < queries; q += WEIGHED_AT_ONCE) {
        const int count = std::min(WEIGHED_AT_ONCE, queries - q);
        const int from = s.seen[q / group].first, to = s.seen[(q + count - 1) / group].end;
        weigh_values<TYPE>(count, s.weights + q * SPLIT, s.value_runs, dim, from, to, s.split_sums + q * dim);
    }
    for (int row = 0, q = 0; row < rows.num_rows; row++) {
        for (int head = 0; head < group; head++, q++) {
            if (s.seen[row].first >= s.seen[row].end) continue;
            if (*states[q].total == 0.0f) {  // the first split in which the row sees anything
                *states[q].largest = s.split_largest[q];
                *states[q].total = s.split_total[q];
                memcpy(states[q].sums, s.split_sums + q * dim, (size_t)dim * sizeof(float));
            } else {
                join_states(states[q], s.split_largest[q], s.split_total[q], s.split_sums + q * dim, dim);
            }
        }
    }
}

// Attend over splits first_split..end_split-1. states[row * group_size + head] receive the result; total is 0 where a
// row sees nothing there.
static void attend(const LayerCache& c, const AttentionShape& shape, const AttentionRows& rows, int first_split,
                   int end_split, const AttentionState* states, AttentionScratch& s) {
    const int queries = rows.num_rows * shape.group_size;
    // Elements are converted as they are read if few queries read them, else once, into the scratch.
    const bool is_whole = c.head_dim == shape.padded_dim, is_few = queries <= WEIGHED_AT_ONCE;
    const bool is_widened = !is_whole || (c.type != KV_FP32 && !is_few), has_scales = c.type == KV_INT8;
    const int type = is_widened ? KV_FP32 : c.type;
    for (int q = 0; q < queries; q++) *states[q].total = 0.0f;
    for (int split = first_split; split < end_split; split++) {
        for (int row = 0; row < rows.num_rows; row++)
            s.seen[row] = seen_in_split(rows.first_position + row, shape.window, split);
        const int first = s.seen[0].first, end = s.seen[rows.num_rows - 1].end;
        if (first >= end) continue;
        load_split(c, rows, shape.padded_dim, split, first, end, is_widened, s);
        if (type == KV_FP32) attend_split<KV_FP32>(shape, rows, first, end, has_scales, states, s);
        else if (type == KV_BF16) attend_split<KV_BF16>(shape, rows, first, end, has_scales, states, s);
        else if (type == KV_FP16) attend_split<KV_FP16>(shape, rows, first, end, has_scales, states, s);
        else attend_split<KV_INT8>(shape, rows, first, end, has_scales, states, s);
    }
}
