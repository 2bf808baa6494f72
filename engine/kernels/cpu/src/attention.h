// Paged attention of a few rows of one sequence over one KV head: the same order of operations for a decoded token, a
// draft to verify and a row of a prefill chunk, so a row's bits do not depend on which of these it is.
//
// Keys go in splits of SPLIT positions counted from 0. In a split, a row takes its largest score m, the weights
// e^(score - m), their sum and the weighted sum of V; splits are then joined in order (online softmax, arXiv
// 2205.14135).
//
//              cache of floats (attention_float.h)                       int8 cache (attention_int8.h)
//     score    head_dim products in 16 lanes, lanes folded in halves     an exact integer, scaled
//     sum      weights in 16 lanes by position, lanes folded in halves   the same
//     output   fma over the keys in order                                an exact integer, scaled
//
// What a row does not see has weight 0 and adds exactly nothing, so rows of different ranges share the loops.
#pragma once

#include "attention_float.h"
#include "attention_int8.h"

// Join what the rows found in a split to what they found before.
static inline void join_split(const AttentionRows& rows, int group, int dim, const AttentionState* states,
                              const AttentionScratch& s) {
    for (int q = 0; q < rows.num_rows * group; q++) {
        const Range seen = s.seen[q / group];
        if (seen.first >= seen.end) continue;
        if (*states[q].total == 0.0f) {  // the first split in which the row sees anything
            *states[q].largest = s.split_largest[q];
            *states[q].total = s.split_total[q];
            memcpy(states[q].sums, s.split_sums + q * dim, (size_t)dim * sizeof(float));
        } else {
            join_states(states[q], s.split_largest[q], s.split_total[q], s.split_sums + q * dim, dim);
        }
    }
}

static inline KeysAhead keys_from(const LayerCache& c, const AttentionShape& shape, const AttentionRows& rows,
                                  int first_split, int end_split) {
    const int first = first_split * SPLIT + seen_in_split(rows.first_position, shape.window, first_split).first;
    return {c, rows, first / RUN * RUN, std::min(end_split * SPLIT, rows.first_position + rows.num_rows)};
}

// Ask for the first keys that `attend` is going to read.
static ALWAYS_INLINED void attend_soon(const LayerCache& c, const AttentionShape& shape, const AttentionRows& rows,
                                       int first_split, int end_split) {
    if (c.type != KV_INT8) return;  // caches of floats are asked for split by split
    KeysAhead ahead = keys_from(c, shape, rows, first_split, end_split);
    ahead.reach(ahead.next + KEYS_AHEAD);
}

// Attend over splits first_split..end_split-1. states[row * group_size + head] receive the result; total is 0 where a
// row sees nothing there.
static void attend(const LayerCache& c, const AttentionShape& shape, const AttentionRows& rows, int first_split,
                   int end_split, const AttentionState* states, AttentionScratch& s) {
    const int dim = shape.padded_dim, queries = rows.num_rows * shape.group_size;
    const bool is_whole = c.head_dim == dim, is_few = queries <= WEIGHED_AT_ONCE;
    const bool is_widened = !is_whole || (c.type != KV_FP32 && !is_few);
    const int type = is_widened && c.type != KV_INT8 ? KV_FP32 : c.type;
    for (int q = 0; q < queries; q++) *states[q].total = 0.0f;
    KeysAhead ahead = keys_from(c, shape, rows, first_split, end_split);
    if (type == KV_INT8) {
        ahead.reach(ahead.next + KEYS_AHEAD);
        quantize_queries(shape, rows, s);
    }
    for (int split = first_split; split < end_split; split++) {
        for (int row = 0; row < rows.num_rows; row++)
            s.seen[row] = seen_in_split(rows.first_position + row, shape.window, split);
        const int first = s.seen[0].first, end = s.seen[rows.num_rows - 1].end;
        if (first >= end) continue;
        if (type == KV_INT8) load_lines(c, rows, dim, split, first, end, ahead, s);
        else load_split(c, rows, dim, split, first, end, is_widened, s);
        if (type == KV_FP32) attend_split<KV_FP32>(shape, rows, first, end, s);
        else if (type == KV_BF16) attend_split<KV_BF16>(shape, rows, first, end, s);
        else if (type == KV_FP16) attend_split<KV_FP16>(shape, rows, first, end, s);
        else attend_split_int8(shape, rows, ahead, s);
        join_split(rows, shape.group_size, dim, states, s);
    }
}
