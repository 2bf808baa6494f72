// Sixteen fp32 lanes and the few operations on them that everything else is written in.
//
// Three variants, chosen by the compiler's target: AVX-512, AVX2 with FMA, and portable. Each operation gives the same
// bits in all of them, so a model gives the same logits on every CPU: sums have one order, products are fused exactly
// where f_fma says so (the compiler must not fuse others: -ffp-contract=off), and functions are our own.
//
//   f_load_n, f_store_n       n lanes, the rest 0 / untouched
//   f_zero_below(x, l, v)     0 where x < l, else v
//   f_keep_lanes(a, lo, hi)   lanes lo..hi-1 of a, `fill` elsewhere; 0 <= lo <= hi <= 16
//   f_pow2(EXP_MAGIC + n)     2^n for whole n in -126..127
//   f_fold_sum, f_fold_max    over the lanes, in halves 8, 4, 2, 1 apart
//   f_fold_four, f_join_four  f_fold_sum of 16 vectors at once, in two halves: with t[j] = f_fold_four(x[j], x[4 + j],
//                             x[8 + j], x[12 + j]), lane i of f_join_four(t) is f_fold_sum(x[i])
//   quantize_32(a, b, out)    32 values to int8, ties to even; returns the sum
//
// Products of 8-bit integers, for attention over an int8 cache. I is sixteen int32 lanes, B sixteen times four bytes. All
// results are exact.
//
//   b_four(p)                 the same four bytes in every lane
//   i_dot(sum, u, s)          adds to each lane the four products of u (0..127) and s (-127..127)
//   i_dot_offset(sum, k, s)   the same of k - 128 and s, if the first `sum` is dot_start(sum of all s of a lane)
//   split_digits_64           64 values times a factor, rounded to whole numbers (-16256..16383, ties to even), as
//                             128 * high + low with low in 0..127
//   key_lines                 16 keys of `dim` bytes: line i is bytes 4i..4i+3 of each, plus 128
//   value_lines               4 values of `dim` bytes: line i is bytes 16i..16i+15, each of all four together
//
// Both pad to `padded_dim` bytes, a multiple of 16, with what counts as 0.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define NOT_INLINED __attribute__((noinline))  // large, called from several places: one copy is enough
#define ALWAYS_INLINED inline __attribute__((always_inline))

static inline int round_up(int x, int to) { return (x + to - 1) / to * to; }

static inline float bf16_to_f32(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}

static inline uint16_t f32_to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;  // NaN: rounding up could make it infinity
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

static inline float f16_to_f32(uint16_t h) {
    const uint32_t exponent = (h >> 10) & 31, fraction = h & 1023;
    uint32_t bits = (uint32_t)(h & 0x8000) << 16;
    float r;
    if (exponent == 0) {  // zero or subnormal: fraction * 2^-24
        r = (float)fraction * 5.9604644775390625e-08f;
        return bits ? -r : r;
    }
    bits |= exponent == 31 ? 0x7F800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
    memcpy(&r, &bits, 4);
    return r;
}

static inline uint16_t f32_to_f16(float x) {  // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    bits &= 0x7FFFFFFFu;
    if (bits > 0x7F800000u) return sign | 0x7E00;
    if (bits >= 0x477FF000u) return sign | 0x7C00;  // 65520 and above round to infinity
    if (bits < 0x38800000u) {                       // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        float a;
        memcpy(&a, &bits, 4);
        a += 0.5f;
        memcpy(&bits, &a, 4);
        return sign | (uint16_t)(bits - 0x3F000000u);
    }
    return sign | (uint16_t)((bits + 0xFFFu + ((bits >> 13) & 1) - 0x38000000u) >> 13);
}

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

// Lanes first..first+15 of n values, zeros behind the last.
static inline F load_up_to(const float* x, int first, int n) {
    return first + 16 <= n ? f_load(x + first) : first < n ? f_load_n(x + first, n - first) : f_zero();
}

#define EXP_MAGIC 12582912.0f  // 1.5 * 2^23: adding it leaves a whole number in the low bits

// e^x for x <= 0 to about 1 unit in the last place; 0 below -87, where fp32 ends. Cody-Waite reduction to |r| <= ln2 /
// 2, then the Taylor series, whose 7th term is below half a unit there.
static inline F f_exp(F x) {
    const F clamped = f_max(x, f_set(-87.0f));
    const F t = f_fma(clamped, f_set(1.44269504f), f_set(EXP_MAGIC));
    const F n = t - f_set(EXP_MAGIC);
    F r = f_fma(n, f_set(-0.693145752f), clamped);
    r = f_fma(n, f_set(-1.42860677e-06f), r);
    F p = f_set(1.98412698e-04f);
    p = f_fma(p, r, f_set(1.38888889e-03f));
    p = f_fma(p, r, f_set(8.33333333e-03f));
    p = f_fma(p, r, f_set(4.16666667e-02f));
    p = f_fma(p, r, f_set(1.66666667e-01f));
    p = f_fma(p, r, f_set(0.5f));
    p = f_fma(p, r, f_set(1.0f));
    p = f_fma(p, r, f_set(1.0f));
    return f_zero_below(x, -87.0f, p * f_pow2(t));
}

static inline float exp_one(float x) {
    float lanes[16];
    f_store(lanes, f_exp(f_set(x)));
    return lanes[0];
}

// x * sigmoid(x) with e = e^-|x|, so that nothing overflows: x / (1 + e) from 0 up, x * e / (1 + e) below.
static inline F f_silu(F x) {
    const F e = f_exp(f_zero() - f_abs(x));
    const F numerator = f_max(e, f_zero_below(x, 0.0f, f_set(1.0f)));  // e is never above 1
    return x * numerator / (f_set(1.0f) + e);
}
