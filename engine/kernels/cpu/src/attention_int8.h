// Attention over an int8 cache in integers: exact sums, so their order is free, and half the work of fp32.
//
// Queries and weights are split into two digits of 7 bits for it, relative to the largest of the query head and of the
// split: an error of 2^-15 of that, far below the cache's own. The V scale of a key goes into its weight.
//
//     score    (128 * high digits . key + low digits . key) * query scale * key scale
//     output   (128 * high digits . values + low digits . values) * step of the weights
//
// Keys and values of a split are first brought into lines (simd.h): sixteen keys, or four values, to a product.
#pragma once

#include "attention_state.h"

static const float QUERY_STEPS = 16256.0f;   // 127 * 128
static const float WEIGHT_STEPS = 16383.0f;  // 127 * 128 + 127

static const int KEYS_AHEAD = 64;  // at least so many are asked for before their use
static const int ASKED_WHILE_SCORING = 16;  // of the next split, for every two tiles of this one

#if defined(__AVX512F__)
static const int SCORED_TILES_AT_ONCE = 2, VALUE_LINES_AT_ONCE = 4;
#else
static const int SCORED_TILES_AT_ONCE = 1, VALUE_LINES_AT_ONCE = 1;
#endif

// Where RUN keys and their values lie, and their scales.
struct Int8Run {
    const int8_t *keys, *values;
    const float *key_scales, *value_scales;
};

static inline Int8Run int8_run(const LayerCache& c, const AttentionRows& rows, int position) {
    const int64_t block = rows.block_table[position / c.block_size];
    const int offset = position % c.block_size, head = rows.kv_head;
    return {(const int8_t*)cached_token(c, block, 0, head, offset),
            (const int8_t*)cached_token(c, block, 1, head, offset),
            cached_scale(c, block, 0, head, offset),
            cached_scale(c, block, 1, head, offset)};
}

// Asks for keys ahead of their use: a step that computes little on each would wait for them one by one.
struct KeysAhead {
    const LayerCache& c;
    const AttentionRows& rows;
    int next;       // position of the next to be asked for
    const int end;  // nothing behind is wanted

    ALWAYS_INLINED void reach(int position) {
        for (const int until = std::min(position, end); next < until; next += RUN) {
            const Int8Run run = int8_run(c, rows, next);
            prefetch((const uint8_t*)run.keys, RUN * c.head_dim);
            prefetch((const uint8_t*)run.values, RUN * c.head_dim);
            prefetch((const uint8_t*)run.key_scales, 1);
            prefetch((const uint8_t*)run.value_scales, 1);
        }
    }
};

// Bring a query head into digits: every four of high ones, the four low ones behind, a block's queries side by side.
static inline void quantize_query(const float* query, int padded_dim, int8_t* block, int index, Int8Query* out) {
    float padded[MAX_HEAD_DIM];  // to whole 64s
    int8_t high[MAX_HEAD_DIM], low[MAX_HEAD_DIM];
    F lanes = f_zero();
    for (int i = 0; i < padded_dim; i += 16) lanes = f_max(lanes, f_abs(f_load(query + i)));
    const float largest = f_fold_max(lanes);
    const F inverse = f_set(largest > 0.0f ? QUERY_STEPS / largest : 0.0f);
    memcpy(padded, query, (size_t)padded_dim * sizeof(float));
    for (int i = padded_dim; i < round_up(padded_dim, 64); i += 16) f_store(padded + i, f_zero());
    for (int i = 0; i < padded_dim; i += 64) split_digits_64(padded + i, inverse, high + i, low + i);
    int32_t sum_of_high = 0, sum_of_low = 0;
    for (int i = 0; i < padded_dim; i++) sum_of_high += high[i], sum_of_low += low[i];
    *out = {largest / QUERY_STEPS, dot_start(sum_of_high), dot_start(sum_of_low)};
    for (int i = 0; i < padded_dim; i += 4) {
        memcpy(block + i / 4 * (QUERY_BLOCK * 8) + index * 8, high + i, 4);
        memcpy(block + i / 4 * (QUERY_BLOCK * 8) + index * 8 + 4, low + i, 4);
    }
}

static inline void quantize_queries(const AttentionShape& shape, const AttentionRows& rows, AttentionScratch& s) {
    const int dim = shape.padded_dim, group = shape.group_size;
    for (int q = 0; q < rows.num_rows * group; q++)
        quantize_query(rows.query + q / group * shape.row_stride + q % group * dim, dim,
                       s.query_digits + q / QUERY_BLOCK * (QUERY_BLOCK * 2 * dim), q % QUERY_BLOCK, s.int8_queries + q);
}

// Add products of WORDS lines of TILES times 16 keys with the digits of QUERIES queries; unrolled, or the compiler
// copies every sum each time.
template <int WORDS, int QUERIES, int TILES>
static inline void add_products(const uint8_t* lines, int tile_bytes, const int8_t* block, I (&high)[QUERIES][TILES],
                                I (&low)[QUERIES][TILES]) {
#pragma GCC unroll 16
    for (int i = 0; i < WORDS; i++) {
        B keys[TILES];
        for (int t = 0; t < TILES; t++) keys[t] = b_load(lines + t * tile_bytes + i * 64);
        for (int q = 0; q < QUERIES; q++) {
            const int8_t* digits = block + (i * QUERY_BLOCK + q) * 8;
            const B high_four = b_four(digits), low_four = b_four(digits + 4);
            for (int t = 0; t < TILES; t++) high[q][t] = i_dot_offset(high[q][t], keys[t], high_four);
            for (int t = 0; t < TILES; t++) low[q][t] = i_dot_offset(low[q][t], keys[t], low_four);
        }
    }
}

// Scores of the first QUERIES queries of a block against TILES times 16 keys.
template <int QUERIES, int TILES>
static inline void score_tiles(const uint8_t* lines, int padded_dim, const int8_t* block, const Int8Query* queries,
                               const float* key_scales, float* scores) {
    I high[QUERIES][TILES], low[QUERIES][TILES];
    for (int q = 0; q < QUERIES; q++)
        for (int t = 0; t < TILES; t++)
            high[q][t] = i_set(queries[q].start_of_high), low[q][t] = i_set(queries[q].start_of_low);
    const int words = padded_dim / 4, tile_bytes = 16 * padded_dim;
    int i = 0;
    for (; i + 16 <= words; i += 16)
        add_products<16>(lines + i * 64, tile_bytes, block + i * QUERY_BLOCK * 8, high, low);
    for (; i < words; i += 4) add_products<4>(lines + i * 64, tile_bytes, block + i * QUERY_BLOCK * 8, high, low);
    for (int q = 0; q < QUERIES; q++) {
        for (int t = 0; t < TILES; t++) {
            const I sum = i_add(i_times_128(high[q][t]), low[q][t]);
            const F scaled = i_float(sum) * f_set(queries[q].scale);
            f_store(scores + q * SPLIT + t * 16, scaled * f_load(key_scales + t * 16));
        }
    }
}

template <int QUERIES>
static inline void score_lines(const AttentionScratch& s, int padded_dim, int first_query, int first, int end,
                               KeysAhead& ahead) {
    const int8_t* block = s.query_digits + first_query * 2 * padded_dim;
    const Int8Query* queries = s.int8_queries + first_query;
    int k = first / 16 * 16;
    for (; k + SCORED_TILES_AT_ONCE * 16 <= end; k += SCORED_TILES_AT_ONCE * 16) {
        ahead.reach(ahead.next + ASKED_WHILE_SCORING);
        score_tiles<QUERIES, SCORED_TILES_AT_ONCE>(s.key_lines + k * padded_dim, padded_dim, block, queries,
                                                   s.key_scales + k, s.weights + k);
    }
    for (; k < end; k += 16)
        score_tiles<QUERIES, 1>(s.key_lines + k * padded_dim, padded_dim, block, queries, s.key_scales + k,
                                s.weights + k);
}

// Turn a query's scores into the digits of its weights: [2 (high, low), SPLIT], 0 for unseen keys up to the bounds.
static inline void soft_max_digits(float* scores, Range seen, int first, int end, const float* value_scales,
                                   int8_t* digits, AttentionState split, float* step) {
    F most = f_zero();
    soft_max(scores, seen, first, end, split.largest, split.total, [&](int k, F weights, int lo, int hi) {
        weights = weights * f_load(value_scales + k);
        // Nothing was ever written to the scales of some unseen keys.
        if (hi - lo < 16) weights = f_keep_lanes(weights, lo, hi, 0.0f);
        f_store(scores + k, weights);
        most = f_max(most, weights);
    });
    const float largest = f_fold_max(most);
    const F inverse = f_set(largest > 0.0f ? WEIGHT_STEPS / largest : 0.0f);
    // Whole 64s: what lies outside the bounds is never read.
    for (int k = first / 64 * 64; k < end; k += 64) split_digits_64(scores + k, inverse, digits + k, digits + SPLIT + k);
    *step = largest / WEIGHT_STEPS;
}

template <int QUERIES, int LINES>
static inline void weigh_some(const AttentionScratch& s, int padded_dim, int lane, int first, int end, float* out) {
    const int8_t *lines = s.value_lines, *digits = s.weight_digits;
    I high[QUERIES][LINES], low[QUERIES][LINES];
    for (int q = 0; q < QUERIES; q++)
        for (int l = 0; l < LINES; l++) high[q][l] = low[q][l] = i_set(0);
#pragma GCC unroll 4
    for (int k = first / 4 * 4; k < end; k += 4) {
        B values[LINES];
        for (int l = 0; l < LINES; l++) values[l] = b_load(lines + k * padded_dim + (lane + l * 16) * 4);
        for (int q = 0; q < QUERIES; q++) {
            const B high_four = b_four(digits + q * 2 * SPLIT + k), low_four = b_four(digits + (q * 2 + 1) * SPLIT + k);
            for (int l = 0; l < LINES; l++) high[q][l] = i_dot(high[q][l], high_four, values[l]);
            for (int l = 0; l < LINES; l++) low[q][l] = i_dot(low[q][l], low_four, values[l]);
        }
    }
    for (int q = 0; q < QUERIES; q++)
        for (int l = 0; l < LINES; l++)
            f_store(out + q * padded_dim + lane + l * 16,
                    i_float(i_add(i_times_128(high[q][l]), low[q][l])) * f_set(s.weight_steps[q]));
}

template <int QUERIES>
static inline void weigh_lines(const AttentionScratch& s, int padded_dim, int first, int end, float* out) {
    int lane = 0;
    for (; lane + VALUE_LINES_AT_ONCE * 16 <= padded_dim; lane += VALUE_LINES_AT_ONCE * 16)
        weigh_some<QUERIES, VALUE_LINES_AT_ONCE>(s, padded_dim, lane, first, end, out);
    for (; lane < padded_dim; lane += 16) weigh_some<QUERIES, 1>(s, padded_dim, lane, first, end, out);
}

// Bring keys first..end-1 (offsets in the split) into lines, and their scales together.
static void load_lines(const LayerCache& c, const AttentionRows& rows, int padded_dim, int split, int first, int end,
                       KeysAhead& ahead, AttentionScratch& s) {
    const int start = split * SPLIT;
    for (int tile = first / 16 * 16; tile < end; tile += 16) {
        ahead.reach(start + tile + 16 + KEYS_AHEAD);
        const int8_t *keys[16], *values[16];
        for (int offset = 0; offset < 16; offset += RUN) {
            // The second run may be beyond the end: its keys are not seen, any will do.
            const Int8Run run = int8_run(c, rows, start + (tile + offset < end ? tile + offset : tile));
            for (int i = 0; i < RUN; i++) {
                keys[offset + i] = run.keys + i * c.head_dim;
                values[offset + i] = run.values + i * c.head_dim;
            }
            // Not by masked lanes: storing those is slow on Zen 4.
            memcpy(s.key_scales + tile + offset, run.key_scales, RUN * sizeof(float));
            memcpy(s.value_scales + tile + offset, run.value_scales, RUN * sizeof(float));
        }
        key_lines(keys, c.head_dim, padded_dim, s.key_lines + tile * padded_dim);
        for (int k = 0; k < 16; k += 4)
            value_lines(values + k, c.head_dim, padded_dim, s.value_lines + (tile + k) * padded_dim);
    }
}

// Keys first..end-1 of a split for a block of queries.
template <int QUERIES>
static NOT_INLINED void attend_block(const AttentionShape& shape, int first_query, int first, int end,
                                     KeysAhead& ahead, AttentionScratch& s) {
    const int dim = shape.padded_dim;
    score_lines<QUERIES>(s, dim, first_query, first, end, ahead);
    for (int i = 0, q = first_query; i < QUERIES; i++, q++)
        soft_max_digits(s.weights + i * SPLIT, s.seen[q / shape.group_size], first, end, s.value_scales,
                        s.weight_digits + i * 2 * SPLIT, {s.split_largest + q, s.split_total + q, nullptr},
                        s.weight_steps + i);
    weigh_lines<QUERIES>(s, dim, first, end, s.split_sums + first_query * dim);
}

// One split of `attend`: a block of queries after the other, so that what belongs to it stays in the nearest cache.
static void attend_split_int8(const AttentionShape& shape, const AttentionRows& rows, KeysAhead& ahead,
                              AttentionScratch& s) {
    const int group = shape.group_size, queries = rows.num_rows * group;
    for (int q = 0; q < queries; q += QUERY_BLOCK) {
        const int count = std::min(QUERY_BLOCK, queries - q);
        const int first = s.seen[q / group].first, end = s.seen[(q + count - 1) / group].end;
        if (count == 1) attend_block<1>(shape, q, first, end, ahead, s);
        else if (count == 2) attend_block<2>(shape, q, first, end, ahead, s);
        else attend_block<3>(shape, q, first, end, ahead, s);
    }
}
