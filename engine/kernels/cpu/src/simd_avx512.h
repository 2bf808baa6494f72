// Sixteen fp32 lanes in one AVX-512 register. See simd.h for what every variant provides.
#pragma once

#include <immintrin.h>

struct F {
    __m512 v;
};

static inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F f_zero() { return {_mm512_setzero_ps()}; }
static inline F f_set(float x) { return {_mm512_set1_ps(x)}; }
static inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline F f_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
static inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline void f_store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
static inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F f_zero_below(F x, float limit, F value) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), value.v)};
}
static inline F f_keep_lanes(F a, int lo, int hi, float fill) {
    const __mmask16 keep = (__mmask16)(((1u << hi) - 1) & ~((1u << lo) - 1));
    return {_mm512_mask_mov_ps(_mm512_set1_ps(fill), keep, a.v)};
}
static inline F f_pow2(F magic_plus_n) {
    const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(magic_plus_n.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3F800000)))};
}

static inline F f_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline F f_load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline F f_load_i8(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}

static inline float f_fold_sum(F a) {
    const __m256 x8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_shuffle_ps(x2, x2, 1)));
}
static inline float f_fold_max(F a) { return _mm512_reduce_max_ps(a.v); }

static inline F f_fold_four(F a, F b, F c, F d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xEE));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD))};
}
static inline F f_join_four(const F t[4]) {
    const __m512 u = _mm512_add_ps(_mm512_shuffle_ps(t[0].v, t[1].v, 0x44), _mm512_shuffle_ps(t[0].v, t[1].v, 0xEE));
    const __m512 v = _mm512_add_ps(_mm512_shuffle_ps(t[2].v, t[3].v, 0x44), _mm512_shuffle_ps(t[2].v, t[3].v, 0xEE));
    return {_mm512_add_ps(_mm512_shuffle_ps(u, v, 0x88), _mm512_shuffle_ps(u, v, 0xDD))};
}

// Rounds 32 values in -127..127 to the nearest integers, ties to even; returns their sum.
static inline int32_t quantize_32(F a, F b, int8_t* out) {
    const __m512i x = _mm512_cvtps_epi32(a.v), y = _mm512_cvtps_epi32(b.v);
    _mm_storeu_si128((__m128i*)out, _mm512_cvtsepi32_epi8(x));
    _mm_storeu_si128((__m128i*)(out + 16), _mm512_cvtsepi32_epi8(y));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(x, y));
}
