// GEMM tiles with AVX2: products of bytes in 16 bits, summed in 32.
//
// 4-bit weights: eight products of at most 15 * 127, two by two, stay below 2^15, so a group is summed in 16 bits and
// widened once. 8-bit weights: |w| times the activation with w's sign, at most 2 * 128 * 127 < 2^15, widened each time.
// Where AVX-VNNI is there, vpdpbusd does either in one instruction.
#pragma once

#include <immintrin.h>

static const int ROWS_AT_ONCE = 4, TILES_AT_ONCE = 1;

static inline __m256i four_inputs(const int8_t* x) {
    int32_t word;
    memcpy(&word, x, 4);
    return _mm256_set1_epi32(word);
}

template <int KIND>
static inline __m256i group_dot(const uint8_t* quants, const int8_t* in, int32_t correction) {
#if defined(__AVXVNNI__)
    __m256i dot = _mm256_set1_epi32(correction);
#endif
    const __m256i low_half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i wide = _mm256_setzero_si256(), narrow = _mm256_setzero_si256();
    for (int c = 0; c < (KIND == Q8_0 ? 8 : 4); c++) {
        const __m256i chunk = _mm256_loadu_si256((const __m256i*)(quants + c * 64));
        if (KIND == Q8_0) {
#if defined(__AVXVNNI__)
            dot = _mm256_dpbusd_avx_epi32(dot, chunk, four_inputs(in + c * 4));
#else
            const __m256i w = _mm256_xor_si256(chunk, _mm256_set1_epi8((char)0x80));
            const __m256i products =
                _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four_inputs(in + c * 4), w));
            wide = _mm256_add_epi32(wide, _mm256_madd_epi16(products, ones));
#endif
            continue;
        }
        const __m256i low = _mm256_and_si256(chunk, low_half);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(chunk, 4), low_half);
#if defined(__AVXVNNI__)
        dot = _mm256_dpbusd_avx_epi32(dot, low, four_inputs(in + c * 4));
        dot = _mm256_dpbusd_avx_epi32(dot, high, four_inputs(in + c * 4 + 16));
#else
        narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(low, four_inputs(in + c * 4)));
        narrow = _mm256_add_epi16(narrow, _mm256_maddubs_epi16(high, four_inputs(in + c * 4 + 16)));
#endif
    }
#if defined(__AVXVNNI__)
    (void)ones, (void)wide, (void)narrow;
    return dot;
#else
    if (KIND == Q8_0) return wide;  // signed already
    wide = _mm256_madd_epi16(narrow, ones);
    return KIND == Q4_0 ? _mm256_add_epi32(wide, _mm256_set1_epi32(correction)) : wide;
#endif
}

template <int KIND, int R>
static inline void gemm_half_tile(const Matrix& w, int tile, int half, const Rows& x, int row, float* out,
                                  int64_t stride) {
    const int groups = w.num_groups;
    const uint8_t* quants = tile_quants(w, tile, 0) + half * 32;
    const int64_t at = (int64_t)row * groups;
    __m256 sum[R];
    for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++, quants += w.group_bytes) {
        const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(tile_scales(w, tile, g) + half * 8)));
        __m256 minimum = _mm256_setzero_ps();
        if (KIND == Q4_1)
            minimum = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(tile_minima(w, tile, g) + half * 8)));
        for (int r = 0; r < R; r++) {
            const int64_t i = at + r * groups + g;
            const int32_t correction = KIND == Q4_0 ? x.minus_8[i] : KIND == Q8_0 ? x.minus_128[i] : 0;
            const __m256i dot = group_dot<KIND>(quants, x.quants + i * GROUP, correction);
            const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), scale);
            sum[r] = _mm256_fmadd_ps(scaled, _mm256_set1_ps(x.scales[i]), sum[r]);
            if (KIND == Q4_1) sum[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.scaled_sums[i]), sum[r]);
        }
    }
    for (int r = 0; r < R; r++) _mm256_storeu_ps(out + r * stride, sum[r]);
}

template <int KIND, int R, int C>
static inline void gemm_tile(const Matrix& w, int tile, const Rows& x, int row, bool, float* out, int64_t stride) {
    for (int half = 0; half < 2; half++) gemm_half_tile<KIND, R>(w, tile, half, x, row, out + half * 8, stride);
}
