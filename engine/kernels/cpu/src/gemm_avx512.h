// GEMM tiles with AVX512-VNNI: vpdpbusd multiplies unsigned weights by four signed activations, which are broadcast.
//
// Sums start at GEMM_START, the bits of the fp32 number 1.5 * 2^23, whose last bit counts 1: a sum below 2^22 is then the
// number 1.5 * 2^23 + dot, without a conversion. Times an fp16 scale, fused with -1.5 * 2^23 * scale, which is exact in
// fp32, that is float(dot) * scale rounded once.
//
// R rows by C tiles stay in registers: 2 * R * C accumulators, and a broadcast serves C products. Weights are read once
// and in order, so the first rows that use them ask for them ahead: without that, a step of few rows waits for each
// line. They ask for them into the second-level cache, which has more requests under way than the first: on Zen 4 that
// doubles what one core reads.
#pragma once

#include <immintrin.h>

static const int ROWS_AT_ONCE = 8, TILES_AT_ONCE = 2;  // some spill, but fewer rows would read the weights more often
static const int GROUPS_AHEAD = 12;

static inline __m512i four_inputs(const int8_t* x) {
    int32_t word;
    memcpy(&word, x, 4);
    return _mm512_set1_epi32(word);
}

static inline __m512i high_half(__m512i x) {
#if defined(__GFNI__)
    return _mm512_gf2p8affine_epi64_epi8(x, _mm512_set1_epi64(0x1020408000000000), 0);  // bits 7..4 to 3..0
#else
    return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15));
#endif
}

template <int KIND, int R, int C>
static inline void gemm_tile(const Matrix& w, int tile, const Rows& x, int row, bool is_first, float* out,
                             int64_t stride) {
    const int groups = w.num_groups, quant_bytes = KIND == Q8_0 ? 512 : 256, group_bytes = quant_bytes + 64;
    const int64_t at = (int64_t)row * groups, tile_bytes = w.tile_bytes;
    const uint8_t* record = tile_quants(w, tile, 0);
    const uint8_t* ahead = record + GROUPS_AHEAD * group_bytes;
    const __m512i low_half = _mm512_set1_epi8(15);
    __m512 sum[C][R];
    for (int t = 0; t < C; t++)
        for (int r = 0; r < R; r++) sum[t][r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, record += group_bytes, ahead += group_bytes) {
        __m512i dot[C][R];
        for (int r = 0; r < R; r++) {
            const int64_t i = at + r * groups + g;
            const int32_t first = KIND == Q4_0 ? x.minus_8[i] : KIND == Q8_0 ? x.minus_128[i] : GEMM_START;
            const __m512i start = _mm512_set1_epi32(first);
            for (int t = 0; t < C; t++) dot[t][r] = start;
        }
        if (is_first) {
            if (g == groups - GROUPS_AHEAD) ahead += (C - 1) * tile_bytes;  // the tile behind the next ones
            for (int t = 0; t < C; t++)
                for (int line = 0; line < group_bytes; line += 64)
                    _mm_prefetch((const char*)(ahead + t * tile_bytes + line), _MM_HINT_T1);
        }
        const int8_t* inputs = x.quants + (at + g) * GROUP;
#pragma GCC unroll 8
        for (int c = 0; c < (KIND == Q8_0 ? 8 : 4); c++) {
            __m512i low[C], high[C];
            for (int t = 0; t < C; t++) {
                low[t] = _mm512_loadu_si512(record + t * tile_bytes + c * 64);
                if (KIND == Q8_0) continue;
                high[t] = high_half(low[t]);
                low[t] = _mm512_and_si512(low[t], low_half);
            }
            for (int r = 0; r < R; r++) {
                const int8_t* in = inputs + r * groups * GROUP + c * 4;
                const __m512i first = four_inputs(in);
                for (int t = 0; t < C; t++) dot[t][r] = _mm512_dpbusd_epi32(dot[t][r], low[t], first);
                if (KIND == Q8_0) continue;
                const __m512i second = four_inputs(in + 16);
                for (int t = 0; t < C; t++) dot[t][r] = _mm512_dpbusd_epi32(dot[t][r], high[t], second);
            }
        }
        for (int t = 0; t < C; t++) {
            const __m256i* scales = (const __m256i*)(record + t * tile_bytes + quant_bytes);
            const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256(scales));
            const __m512 minus_start = _mm512_mul_ps(scale, _mm512_set1_ps(-EXP_MAGIC));
            for (int r = 0; r < R; r++) {
                const __m512 scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(dot[t][r]), scale, minus_start);
                sum[t][r] = _mm512_fmadd_ps(scaled, _mm512_set1_ps(x.scales[at + r * groups + g]), sum[t][r]);
            }
            if (KIND != Q4_1) continue;
            const __m512 minimum = _mm512_cvtph_ps(_mm256_loadu_si256(scales + 1));
            for (int r = 0; r < R; r++)
                sum[t][r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(x.scaled_sums[at + r * groups + g]), sum[t][r]);
        }
    }
    for (int t = 0; t < C; t++)
        for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * stride + t * TILE, sum[t][r]);
}
