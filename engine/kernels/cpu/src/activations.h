// Activations in the form the GEMM reads: int8 per row and group of 32 inputs, symmetric.
//
//     x[i] ~ quants[i] * scale[group],   scale = largest magnitude in the group / 127
//
// Beside them what the weight kinds need of a group's sum: sums * scale for Q4_1's minima, and where integer sums start
// for weights stored with an offset of 8 or 128. A row is quantized alone, so it never depends on other rows.
#pragma once

#include "weights.h"

struct Rows {
    int8_t* quants;      // [rows, groups * 32]
    float* scales;       // [rows, groups]
    float* scaled_sums;  // [rows, groups]: scale * sum of the group's quants
    int32_t* minus_8;    // [rows, groups]: GEMM_START - 8 * sum
    int32_t* minus_128;  // [rows, groups]: GEMM_START - 128 * sum
    int num_groups;
};

static inline int64_t rows_bytes(int num_rows, int num_inputs) {
    const int64_t groups = round_up(num_inputs, GROUP) / GROUP;
    return ((int64_t)num_rows * groups * (GROUP + 16) + 63) / 64 * 64 + 64;
}

// Lay out room for `num_rows` rows in `memory`, 64-byte aligned.
static inline Rows rows_in(void* memory, int num_rows, int num_inputs) {
    Rows r;
    r.num_groups = round_up(num_inputs, GROUP) / GROUP;
    const int64_t n = (int64_t)num_rows * r.num_groups;
    r.quants = (int8_t*)memory;
    r.scales = (float*)(r.quants + n * GROUP);
    r.scaled_sums = r.scales + n;
    r.minus_8 = (int32_t*)(r.scaled_sums + n);
    r.minus_128 = r.minus_8 + n;
    return r;
}

static inline void quantize_group(const Rows& rows, int row, int group, F a, F b) {
    const int64_t at = (int64_t)row * rows.num_groups + group;
    const float largest = f_fold_max(f_max(f_abs(a), f_abs(b)));
    const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    const int32_t sum = quantize_32(a * f_set(inverse), b * f_set(inverse), rows.quants + at * GROUP);
    const float scale = largest / 127.0f;
    rows.scales[at] = scale;
    rows.scaled_sums[at] = scale * (float)sum;
    rows.minus_8[at] = GEMM_START - 8 * sum;
    rows.minus_128[at] = GEMM_START - 128 * sum;
}

static inline void quantize_row(const float* x, int n, const Rows& rows, int row) {
    for (int g = 0; g < rows.num_groups; g++)
        quantize_group(rows, row, g, load_up_to(x, g * GROUP, n), load_up_to(x, g * GROUP + 16, n));
}

// 1 / sqrt(mean(x^2) + eps)
static inline float rms_factor(const float* x, int n, float eps) {
    F even = f_zero(), odd = f_zero();
    for (int i = 0; i < n; i += 32) {
        const F a = load_up_to(x, i, n), b = load_up_to(x, i + 16, n);
        even = f_fma(a, a, even);
        odd = f_fma(b, b, odd);
    }
    return 1.0f / sqrtf(f_fold_sum(even + odd) / (float)n + eps);
}

static inline void rms_norm_quantize(const float* x, const float* weight, int n, float eps, const Rows& rows, int row) {
    const F factor = f_set(rms_factor(x, n, eps));
    for (int g = 0; g < rows.num_groups; g++) {
        const int i = g * GROUP;
        const F a = load_up_to(x, i, n) * factor * load_up_to(weight, i, n);
        const F b = load_up_to(x, i + 16, n) * factor * load_up_to(weight, i + 16, n);
        quantize_group(rows, row, g, a, b);
    }
}

static inline void rms_norm(float* x, const float* weight, int n, float eps) {
    const F factor = f_set(rms_factor(x, n, eps));
    for (int i = 0; i < n; i += 16) {
        const F y = load_up_to(x, i, n) * factor * load_up_to(weight, i, n);
        if (i + 16 <= n) f_store(x + i, y);
        else f_store_n(x + i, y, n - i);
    }
}
