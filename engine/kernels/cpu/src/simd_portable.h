// Sixteen fp32 lanes in an array, for compilers to vectorise as they can. See simd.h for what every variant provides.
#pragma once

static const int32_t GEMM_START = 0;  // of integer sums, see the variant's gemm

struct F {
    float v[16];
};

template <class Op>
static inline F f_map(Op op) {
    F r;
    for (int i = 0; i < 16; i++) r.v[i] = op(i);
    return r;
}
static inline F operator+(F a, F b) {
    return f_map([&](int i) { return a.v[i] + b.v[i]; });
}
static inline F operator-(F a, F b) {
    return f_map([&](int i) { return a.v[i] - b.v[i]; });
}
static inline F operator*(F a, F b) {
    return f_map([&](int i) { return a.v[i] * b.v[i]; });
}
static inline F operator/(F a, F b) {
    return f_map([&](int i) { return a.v[i] / b.v[i]; });
}
static inline F f_set(float x) {
    return f_map([&](int) { return x; });
}
static inline F f_zero() { return f_set(0.0f); }
static inline F f_load(const float* p) {
    return f_map([&](int i) { return p[i]; });
}
static inline F f_load_n(const float* p, int n) {
    return f_map([&](int i) { return i < n ? p[i] : 0.0f; });
}
static inline void f_store(float* p, F a) { memcpy(p, a.v, sizeof a.v); }
static inline void f_store_n(float* p, F a, int n) { memcpy(p, a.v, (size_t)n * sizeof(float)); }
// A true fused product, in software where the CPU has none: results are the same on every CPU.
static inline F f_fma(F a, F b, F c) {
    return f_map([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
}
static inline F f_max(F a, F b) {
    return f_map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
static inline F f_abs(F a) {
    return f_map([&](int i) { return __builtin_fabsf(a.v[i]); });
}
static inline F f_zero_below(F x, float limit, F value) {
    return f_map([&](int i) { return x.v[i] < limit ? 0.0f : value.v[i]; });
}
static inline F f_keep_lanes(F a, int lo, int hi, float fill) {
    return f_map([&](int i) { return i >= lo && i < hi ? a.v[i] : fill; });
}
static inline F f_pow2(F magic_plus_n) {
    return f_map([&](int i) {
        uint32_t bits;
        memcpy(&bits, &magic_plus_n.v[i], 4);
        bits = (bits << 23) + 0x3F800000u;
        float r;
        memcpy(&r, &bits, 4);
        return r;
    });
}

static inline F f_load_f16(const uint16_t* p) {
    return f_map([&](int i) { return f16_to_f32(p[i]); });
}
static inline F f_load_bf16(const uint16_t* p) {
    return f_map([&](int i) { return bf16_to_f32(p[i]); });
}

static inline float f_fold_sum(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] + a.v[i + half];
    return a.v[0];
}
static inline float f_fold_max(F a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}
static inline F f_fold_four(F a, F b, F c, F d) {
    const F* x[4] = {&a, &b, &c, &d};
    return f_map([&](int i) {
        const float* v = x[i / 4]->v + i % 4;
        return (v[0] + v[8]) + (v[4] + v[12]);
    });
}
static inline F f_join_four(const F t[4]) {
    return f_map([&](int i) {
        const float* v = t[i % 4].v + i / 4 * 4;
        return (v[0] + v[2]) + (v[1] + v[3]);
    });
}

static inline int32_t quantize_32(F a, F b, int8_t* out) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) {
        float x = i < 16 ? a.v[i] : b.v[i - 16];
        x = x > -127.0f ? x : -127.0f;  // also takes NaN, whose conversion would be undefined
        const float rounded = ((x < 127.0f ? x : 127.0f) + 12582912.0f) - 12582912.0f;
        out[i] = (int8_t)rounded;
        sum += out[i];
    }
    return sum;
}

// --- 8-bit products: see simd.h ---

struct I {
    int32_t v[16];
};
struct B {
    uint8_t v[64];
};

static inline I i_set(int32_t x) {
    I r;
    for (int i = 0; i < 16; i++) r.v[i] = x;
    return r;
}
static inline int32_t dot_start(int32_t sum) { return -128 * sum; }
static inline B b_load(const void* p) {
    B r;
    memcpy(r.v, p, 64);
    return r;
}
static inline B b_four(const void* p) {
    B r;
    for (int i = 0; i < 64; i += 4) memcpy(r.v + i, p, 4);
    return r;
}
static inline I i_dot(I sum, B small, B values) {
    for (int i = 0; i < 64; i++) sum.v[i / 4] += small.v[i] * (int8_t)values.v[i];
    return sum;
}
static inline I i_dot_offset(I sum, B offset, B values) { return i_dot(sum, offset, values); }
static inline I i_times_128(I a) {
    for (int i = 0; i < 16; i++) a.v[i] *= 128;
    return a;
}
static inline I i_add(I a, I b) {
    for (int i = 0; i < 16; i++) a.v[i] += b.v[i];
    return a;
}
static inline F i_float(I a) {
    return f_map([&](int i) { return (float)a.v[i]; });
}

static inline void split_digits(F x, int8_t* high, int8_t* low) {
    for (int i = 0; i < 16; i++) {
        float y = x.v[i] > -16384.0f ? x.v[i] : -16384.0f;  // also takes NaN, whose conversion would be undefined
        y = ((y < 16383.0f ? y : 16383.0f) + 12582912.0f) - 12582912.0f;
        const int n = (int)y, l = n & 127;
        high[i] = (int8_t)((n - l) / 128);
        low[i] = (int8_t)l;
    }
}
#include "int8_shared.h"

static inline void key_lines(const int8_t* const* keys, int dim, int padded_dim, uint8_t* lines) {
    key_lines_from(0, keys, dim, padded_dim, lines);
}
static inline void value_lines(const int8_t* const* values, int dim, int padded_dim, int8_t* lines) {
    value_lines_from(0, values, dim, padded_dim, lines);
}
