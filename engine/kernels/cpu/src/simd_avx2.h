// Sixteen fp32 lanes in two AVX2 registers. See simd.h for what every variant provides.
#pragma once

#include <immintrin.h>

static const int32_t GEMM_START = 0;  // of integer sums, see the variant's gemm

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

// --- 8-bit products: see simd.h ---

struct I {
    __m256i a, b;
};
struct B {
    __m256i a, b;
};

static inline I i_set(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline B b_load(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
static inline B b_four(const void* p) {
    int32_t word;
    memcpy(&word, p, 4);
    const __m256i four = _mm256_set1_epi32(word);
    return {four, four};
}
#if defined(__AVXVNNI__)
static inline int32_t dot_start(int32_t sum) { return -128 * sum; }
static inline I i_dot(I sum, B small, B values) {
    return {_mm256_dpbusd_avx_epi32(sum.a, small.a, values.a), _mm256_dpbusd_avx_epi32(sum.b, small.b, values.b)};
}
static inline I i_dot_offset(I sum, B offset, B values) { return i_dot(sum, offset, values); }
#else
// Two products of at most 127 * 127 stay below 2^15.
static inline int32_t dot_start(int32_t) { return 0; }
static inline __m256i dot_eight(__m256i sum, __m256i small, __m256i values) {
    const __m256i products = _mm256_maddubs_epi16(small, values);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
static inline I i_dot(I sum, B small, B values) {
    return {dot_eight(sum.a, small.a, values.a), dot_eight(sum.b, small.b, values.b)};
}
static inline __m256i dot_eight_offset(__m256i sum, __m256i offset, __m256i values) {
    const __m256i real = _mm256_xor_si256(offset, _mm256_set1_epi8((char)0x80));
    return dot_eight(sum, _mm256_abs_epi8(real), _mm256_sign_epi8(values, real));
}
static inline I i_dot_offset(I sum, B offset, B values) {
    return {dot_eight_offset(sum.a, offset.a, values.a), dot_eight_offset(sum.b, offset.b, values.b)};
}
#endif
static inline I i_times_128(I x) { return {_mm256_slli_epi32(x.a, 7), _mm256_slli_epi32(x.b, 7)}; }
static inline F i_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }

static inline void pack_bytes(__m256i a, __m256i b, int8_t* out) {  // values that fit
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128((__m128i*)out, bytes);
}
static inline void split_digits(F x, int8_t* high, int8_t* low) {
    const __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b), mask = _mm256_set1_epi32(127);
    pack_bytes(_mm256_srai_epi32(a, 7), _mm256_srai_epi32(b, 7), high);
    pack_bytes(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask), low);
}
#include "int8_shared.h"

// Word i of eight keys to `lines` + 64 i, for i in 0..7.
static inline void eight_key_lines(const int8_t* const* keys, uint8_t* lines) {
    __m256i r[8], p[8];
    for (int k = 0; k < 8; k++)
        r[k] = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)keys[k]), _mm256_set1_epi8((char)0x80));
    for (int k = 0; k < 8; k += 4) {
        const __m256i ab = _mm256_unpacklo_epi32(r[k], r[k + 1]), ab2 = _mm256_unpackhi_epi32(r[k], r[k + 1]);
        const __m256i cd = _mm256_unpacklo_epi32(r[k + 2], r[k + 3]), cd2 = _mm256_unpackhi_epi32(r[k + 2], r[k + 3]);
        p[k] = _mm256_unpacklo_epi64(ab, cd), p[k + 1] = _mm256_unpackhi_epi64(ab, cd);
        p[k + 2] = _mm256_unpacklo_epi64(ab2, cd2), p[k + 3] = _mm256_unpackhi_epi64(ab2, cd2);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_si256((__m256i*)(lines + i * 64), _mm256_permute2x128_si256(p[i], p[i + 4], 0x20));
        _mm256_storeu_si256((__m256i*)(lines + (i + 4) * 64), _mm256_permute2x128_si256(p[i], p[i + 4], 0x31));
    }
}
static inline void key_lines(const int8_t* const* keys, int dim, int padded_dim, uint8_t* lines) {
    int first = 0;
    for (; first + 32 <= dim; first += 32) {
        for (int k = 0; k < 16; k += 8) {
            const int8_t* part[8];
            for (int i = 0; i < 8; i++) part[i] = keys[k + i] + first;
            eight_key_lines(part, lines + first * 16 + k * 4);
        }
    }
    key_lines_from(first, keys, dim, padded_dim, lines);
}

static inline void value_lines(const int8_t* const* values, int dim, int padded_dim, int8_t* lines) {
    int first = 0;
    for (; first + 32 <= dim; first += 32) {
        __m256i v[4];
        for (int k = 0; k < 4; k++) v[k] = _mm256_loadu_si256((const __m256i*)(values[k] + first));
        const __m256i lo = _mm256_unpacklo_epi8(v[0], v[1]), hi = _mm256_unpackhi_epi8(v[0], v[1]);
        const __m256i lo2 = _mm256_unpacklo_epi8(v[2], v[3]), hi2 = _mm256_unpackhi_epi8(v[2], v[3]);
        v[0] = _mm256_unpacklo_epi16(lo, lo2), v[1] = _mm256_unpackhi_epi16(lo, lo2);
        v[2] = _mm256_unpacklo_epi16(hi, hi2), v[3] = _mm256_unpackhi_epi16(hi, hi2);
        __m256i* to = (__m256i*)(lines + first * 4);
        for (int i = 0; i < 2; i++) {
            _mm256_storeu_si256(to + i, _mm256_permute2x128_si256(v[2 * i], v[2 * i + 1], 0x20));
            _mm256_storeu_si256(to + 2 + i, _mm256_permute2x128_si256(v[2 * i], v[2 * i + 1], 0x31));
        }
    }
    value_lines_from(first, values, dim, padded_dim, lines);
}
