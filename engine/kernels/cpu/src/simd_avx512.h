// Sixteen fp32 lanes in one AVX-512 register. See simd.h for what every variant provides.
#pragma once

#include <immintrin.h>

static const int32_t GEMM_START = 0x4B400000;  // of integer sums, see the variant's gemm

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

// --- 8-bit products: see simd.h ---

struct I {
    __m512i v;
};
struct B {
    __m512i v;
};

static inline I i_set(int32_t x) { return {_mm512_set1_epi32(x)}; }
static inline int32_t dot_start(int32_t sum) { return -128 * sum; }
static inline B b_load(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline B b_four(const void* p) {
    int32_t word;
    memcpy(&word, p, 4);
    return {_mm512_set1_epi32(word)};
}
static inline I i_dot(I sum, B small, B values) { return {_mm512_dpbusd_epi32(sum.v, small.v, values.v)}; }
static inline I i_dot_offset(I sum, B offset, B values) { return i_dot(sum, offset, values); }
static inline I i_times_128(I a) { return {_mm512_slli_epi32(a.v, 7)}; }
static inline F i_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I i_add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }

static inline void split_digits_64(const float* x, F factor, int8_t* high, int8_t* low) {
    __m512i n[4];
    for (int i = 0; i < 4; i++) n[i] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i * 16), factor.v));
    const __m512i a = _mm512_packs_epi32(n[0], n[1]), b = _mm512_packs_epi32(n[2], n[3]);
    const __m512i mask = _mm512_set1_epi16(127);
    const __m512i h = _mm512_packs_epi16(_mm512_srai_epi16(a, 7), _mm512_srai_epi16(b, 7));
    const __m512i l = _mm512_packs_epi16(_mm512_and_si512(a, mask), _mm512_and_si512(b, mask));
    // Packing goes by 128-bit lanes: four bytes of each n side by side.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(high, _mm512_permutexvar_epi32(order, h));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi32(order, l));
}

static inline __m512i b_load_n(const int8_t* p, int n) {
    return n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, p);
}

// Transposes 4 x 4 squares: of 32-bit words in each 128-bit lane, then of the lanes.
static inline void transpose_words(__m512i* a, __m512i* b, __m512i* c, __m512i* d) {
    const __m512i ab = _mm512_unpacklo_epi32(*a, *b), ab2 = _mm512_unpackhi_epi32(*a, *b);
    const __m512i cd = _mm512_unpacklo_epi32(*c, *d), cd2 = _mm512_unpackhi_epi32(*c, *d);
    *a = _mm512_unpacklo_epi64(ab, cd), *b = _mm512_unpackhi_epi64(ab, cd);
    *c = _mm512_unpacklo_epi64(ab2, cd2), *d = _mm512_unpackhi_epi64(ab2, cd2);
}
static inline void transpose_lanes(__m512i* a, __m512i* b, __m512i* c, __m512i* d) {
    const __m512i ab = _mm512_shuffle_i32x4(*a, *b, 0x88), ab2 = _mm512_shuffle_i32x4(*a, *b, 0xDD);
    const __m512i cd = _mm512_shuffle_i32x4(*c, *d, 0x88), cd2 = _mm512_shuffle_i32x4(*c, *d, 0xDD);
    *a = _mm512_shuffle_i32x4(ab, cd, 0x88), *b = _mm512_shuffle_i32x4(ab2, cd2, 0x88);
    *c = _mm512_shuffle_i32x4(ab, cd, 0xDD), *d = _mm512_shuffle_i32x4(ab2, cd2, 0xDD);
}

static inline void key_lines(const int8_t* const* keys, int dim, int padded_dim, uint8_t* lines) {
    for (int first = 0; first < padded_dim; first += 64) {
        const int words = padded_dim - first < 64 ? (padded_dim - first) / 4 : 16;
        __m512i w[16];
#pragma GCC unroll 16
        for (int k = 0; k < 16; k++)
            w[k] = _mm512_xor_si512(b_load_n(keys[k] + first, dim - first), _mm512_set1_epi8((char)0x80));
#pragma GCC unroll 4
        for (int k = 0; k < 16; k += 4) transpose_words(w + k, w + k + 1, w + k + 2, w + k + 3);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) transpose_lanes(w + k, w + k + 4, w + k + 8, w + k + 12);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            if (i < words) _mm512_storeu_si512(lines + (first / 4 + i) * 64, w[i]);
    }
}

static inline void value_lines(const int8_t* const* values, int dim, int padded_dim, int8_t* lines) {
    for (int first = 0; first < padded_dim; first += 64) {
        const int num_lines = padded_dim - first < 64 ? (padded_dim - first) / 16 : 4;
        __m512i v[4];
        for (int k = 0; k < 4; k++) v[k] = b_load_n(values[k] + first, dim - first);
        const __m512i lo = _mm512_unpacklo_epi8(v[0], v[1]), hi = _mm512_unpackhi_epi8(v[0], v[1]);
        const __m512i lo2 = _mm512_unpacklo_epi8(v[2], v[3]), hi2 = _mm512_unpackhi_epi8(v[2], v[3]);
        v[0] = _mm512_unpacklo_epi16(lo, lo2), v[1] = _mm512_unpackhi_epi16(lo, lo2);
        v[2] = _mm512_unpacklo_epi16(hi, hi2), v[3] = _mm512_unpackhi_epi16(hi, hi2);
        transpose_lanes(v, v + 1, v + 2, v + 3);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (i < num_lines) _mm512_storeu_si512(lines + (first / 16 + i) * 64, v[i]);
    }
}
