// Single kernels behind the C interface, for tests and measurements. The step uses the same code without these
// wrappers.
#pragma once

#include "model.h"
#include "noise.h"

EXPORT void kvr_exp(const float* x, float* out, int32_t n) {  // n: a multiple of 16
    for (int i = 0; i < n; i += 16) f_store(out + i, f_exp(f_load(x + i)));
}

EXPORT void kvr_silu(const float* x, float* out, int32_t n) {
    for (int i = 0; i < n; i += 16) f_store(out + i, f_silu(f_load(x + i)));
}

// Quantize rows [num_rows, n]; normed first where `weight` is given. quants are padded to whole groups.
EXPORT void kvr_quantize_rows(const float* x, const float* weight, int32_t num_rows, int32_t n, float eps,
                              int8_t* quants, float* scales) {
    void* memory = aligned(rows_bytes(num_rows, n));
    Rows rows = rows_in(memory, num_rows, n);
    for (int r = 0; r < num_rows; r++) {
        if (weight) rms_norm_quantize(x + (int64_t)r * n, weight, n, eps, rows, r);
        else quantize_row(x + (int64_t)r * n, n, rows, r);
    }
    memcpy(quants, rows.quants, (size_t)num_rows * rows.num_groups * GROUP);
    memcpy(scales, rows.scales, (size_t)num_rows * rows.num_groups * 4);
    free(memory);
}

// Rows [num_rows, num_inputs] times a matrix given as blocks of `kind` or, where `blocks` is null, as fp32 values.
// out: [num_rows, columns rounded up to 16].
EXPORT void kvr_gemm(int32_t kind, int32_t num_columns, int32_t num_inputs, const uint8_t* blocks, int64_t row_bytes,
                     const float* values, const float* x, int32_t num_rows, float* out) {
    Matrix w;
    matrix_shape(&w, kind, num_columns, num_inputs);
    w.data = (uint8_t*)aligned(matrix_bytes(w));
    for (int column = 0; column < w.num_tiles * TILE; column++) {
        if (column >= num_columns) zero_column(w, column);
        else if (blocks) pack_column(w, column, blocks + column * row_bytes);
        else quantize_column(w, column, values + (int64_t)column * num_inputs);
    }
    void* memory = aligned(rows_bytes(num_rows, num_inputs));
    Rows rows = rows_in(memory, num_rows, num_inputs);
    for (int r = 0; r < num_rows; r++) quantize_row(x + (int64_t)r * num_inputs, num_inputs, rows, r);
    gemm(w, 0, w.num_tiles, rows, 0, num_rows, out, w.num_tiles * TILE);
    free(memory);
    free(w.data);
}

// Indices of `noise_candidates` into out [n]; -1 if there is no memory.
EXPORT int32_t kvr_noise_candidates(const float* weights, const int64_t* token_ids, int32_t n, uint64_t seed,
                                    uint32_t position, int32_t* out) {
    double* noisy = (double*)malloc((size_t)n * sizeof(double));
    if (!noisy) return -1;
    const int favourite = best_token(weights, n);
    const int count = noise_candidates(weights, token_ids, n, favourite, seed, position, out, noisy);
    free(noisy);
    return count;
}

// Mirrored by `AttentionArguments` in library.py.
struct AttentionArguments {
    const float* query;  // [rows, heads, head_dim]
    const float* kv;     // [rows, 2, kv heads, head_dim], written before anything is attended
    const int64_t* slot_mapping;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    uint8_t* cache;
    float* out;  // [rows, heads, head_dim]
    int64_t cache_block_bytes;
    int32_t cache_type, cache_block_size, num_seqs, max_blocks, num_heads, num_kv_heads, head_dim, window;
    int32_t rows_at_once;
};

EXPORT void kvr_attention(const AttentionArguments* arguments) {
    const AttentionArguments& a = *arguments;
    const int dim = round_up(a.head_dim, 16), group = a.num_heads / a.num_kv_heads, queries = a.rows_at_once * group;
    const int num_rows = a.query_start[a.num_seqs];
    const LayerCache cache = {a.cache,        a.cache_block_bytes, a.cache_type,
                              a.num_kv_heads, a.cache_block_size,  a.head_dim};
    for (int row = 0; row < num_rows; row++)
        for (int part = 0; part < 2; part++)
            for (int head = 0; head < a.num_kv_heads; head++)
                write_token(cache, a.slot_mapping[row], part, head,
                            a.kv + (((int64_t)row * 2 + part) * a.num_kv_heads + head) * a.head_dim);
    AttentionScratch scratch;
    float* memory = (float*)aligned(attention_scratch_floats(queries, dim) * 4);
    attention_scratch_in(&scratch, memory, queries, dim);
    std::vector<float> query((size_t)(num_rows * a.num_heads * dim), 0.0f), sums((size_t)(queries * dim));
    std::vector<float> largest((size_t)queries), total((size_t)queries);
    std::vector<AttentionState> states((size_t)queries);
    for (int q = 0; q < queries; q++) states[q] = {&largest[q], &total[q], &sums[q * dim]};
    for (int i = 0; i < num_rows * a.num_heads * a.head_dim; i++)
        query[i / a.head_dim * dim + i % a.head_dim] = a.query[i] * (1.0f / sqrtf((float)a.head_dim));
    for (int seq = 0; seq < a.num_seqs; seq++) {
        const int end = a.query_start[seq + 1];
        for (int row = a.query_start[seq]; row < end; row += a.rows_at_once) {
            const int count = std::min(a.rows_at_once, end - row), position = a.context_lens[seq] - (end - row);
            for (int head = 0; head < a.num_kv_heads; head++) {
                const int64_t first = (int64_t)row * a.num_heads + head * group;
                const AttentionRows rows = {&query[first * dim], count, position, a.block_tables + seq * a.max_blocks,
                                            head};
                attend(cache, {group, dim, a.window, (int64_t)a.num_heads * dim}, rows, 0,
                       (position + count - 1) / SPLIT + 1, states.data(), scratch);
                for (int q = 0; q < count * group; q++) {
                    const float inverse = 1.0f / total[q];
                    float* out = a.out + (first + q / group * a.num_heads + q % group) * a.head_dim;
                    for (int i = 0; i < a.head_dim; i++) out[i] = sums[q * dim + i] * inverse;
                }
            }
        }
    }
    free(memory);
}
