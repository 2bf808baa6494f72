// Sixteen fp32 lanes in two AVX2 registers. See simd.h for what every variant provides.
#pragma once

#include <immintrin.h>

struct F {
    __m256 a, b;
};

static inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f_store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline F f_load_n(const float* p, int n) {
    float copy[16] = {0};
    memcpy(copy, p, (size_t)n * sizeof(float));
    return f_load(copy);
}
static inline void f_store_n(float* p, F x, int n) {
    float copy[16];
    f_store(copy, x);
    memcpy(p, copy, (size_t)n * sizeof(float));
}
static inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F f_abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
static inline F f_zero_below(F x, float limit, F value) {
    const __m256 l = _mm256_set1_ps(limit);
    return {_mm256_and_ps(_mm256_cmp_ps(x.a, l, _CMP_NLT_UQ), value.a),
            _mm256_and_ps(_mm256_cmp_ps(x.b, l, _CMP_NLT_UQ), value.b)};
}
static inline __m256 keep_eight(__m256 x, int first, int lo, int hi, __m256 fill) {
    const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(first));
    const __m256i keep = _mm256_and_si256(_mm256_cmpgt_epi32(lane, _mm256_set1_epi32(lo - 1)),
                                          _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(keep));
}
static inline F f_keep_lanes(F x, int lo, int hi, float fill) {
    const __m256 f = _mm256_set1_ps(fill);
    return {keep_eight(x.a, 0, lo, hi, f), keep_eight(x.b, 8, lo, hi, f)};
}
static inline __m256 pow2_eight(__m256 magic_plus_n) {
    const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(magic_plus_n), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3F800000)));
}
static inline F f_pow2(F magic_plus_n) { return {pow2_eight(magic_plus_n.a), pow2_eight(magic_plus_n.b)}; }

static inline F f_load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 load_eight_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline F f_load_bf16(const uint16_t* p) { return {load_eight_bf16(p), load_eight_bf16(p + 8)}; }
static inline __m256 load_eight_i8(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline F f_load_i8(const int8_t* p) { return {load_eight_i8(p), load_eight_i8(p + 8)}; }

static inline float f_fold_sum(F x) {
    const __m256 x8 = _mm256_add_ps(x.a, x.b);
    const __m128 x4 = _mm_add_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_add_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_add_ss(x2, _mm_shuffle_ps(x2, x2, 1)));
}
static inline float f_fold_max(F x) {
    const __m256 x8 = _mm256_max_ps(x.a, x.b);
    const __m128 x4 = _mm_max_ps(_mm256_castps256_ps128(x8), _mm256_extractf128_ps(x8, 1));
    const __m128 x2 = _mm_max_ps(x4, _mm_movehl_ps(x4, x4));
    return _mm_cvtss_f32(_mm_max_ss(x2, _mm_shuffle_ps(x2, x2, 1)));
}

static inline __m256 fold_two(F x, F y) {
    const __m256 p = _mm256_add_ps(x.a, x.b), q = _mm256_add_ps(y.a, y.b);
    return _mm256_add_ps(_mm256_permute2f128_ps(p, q, 0x20), _mm256_permute2f128_ps(p, q, 0x31));
}
static inline F f_fold_four(F x, F y, F z, F w) { return {fold_two(x, y), fold_two(z, w)}; }
static inline __m256 join_halves(__m256 t0, __m256 t1, __m256 t2, __m256 t3) {
    const __m256 u = _mm256_add_ps(_mm256_shuffle_ps(t0, t1, 0x44), _mm256_shuffle_ps(t0, t1, 0xEE));
    const __m256 v = _mm256_add_ps(_mm256_shuffle_ps(t2, t3, 0x44), _mm256_shuffle_ps(t2, t3, 0xEE));
    return _mm256_add_ps(_mm256_shuffle_ps(u, v, 0x88), _mm256_shuffle_ps(u, v, 0xDD));
}
static inline F f_join_four(const F t[4]) {
    return {join_halves(t[0].a, t[1].a, t[2].a, t[3].a), join_halves(t[0].b, t[1].b, t[2].b, t[3].b)};
}

static inline int32_t quantize_32(F x, F y, int8_t* out) {
    const __m256i p = _mm256_cvtps_epi32(x.a), q = _mm256_cvtps_epi32(x.b);
    const __m256i r = _mm256_cvtps_epi32(y.a), s = _mm256_cvtps_epi32(y.b);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(p, q), _mm256_packs_epi32(r, s));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256((__m256i*)out, _mm256_permutevar8x32_epi32(bytes, order));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(p, q), _mm256_add_epi32(r, s));
    __m128i s4 = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    s4 = _mm_add_epi32(s4, _mm_shuffle_epi32(s4, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(s4, _mm_shuffle_epi32(s4, 0xB1)));
}
