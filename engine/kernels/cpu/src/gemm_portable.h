// GEMM tiles in plain C++: the other variants' arithmetic, one row at a time.
#pragma once

static const int ROWS_AT_ONCE = 1, TILES_AT_ONCE = 1;

template <int KIND, int R, int C>
static inline void gemm_tile(const Matrix& w, int tile, const Rows& x, int row, bool, float* out, int64_t stride) {
    for (int r = 0; r < R; r++) {
        float sum[TILE] = {0};
        for (int g = 0; g < w.num_groups; g++) {
            const int64_t i = (int64_t)(row + r) * w.num_groups + g;
            const int8_t* in = x.quants + i * GROUP;
            const uint8_t* quants = tile_quants(w, tile, g);
            int32_t dot[TILE];
            for (int n = 0; n < TILE; n++) dot[n] = KIND == Q4_0 ? x.minus_8[i] : KIND == Q8_0 ? x.minus_128[i] : 0;
            for (int c = 0; c < (KIND == Q8_0 ? 8 : 4); c++) {
                for (int n = 0; n < TILE; n++) {
                    for (int b = 0; b < 4; b++) {
                        const int q = quants[c * 64 + n * 4 + b];
                        if (KIND == Q8_0) dot[n] += q * in[c * 4 + b];
                        else dot[n] += (q & 15) * in[c * 4 + b] + (q >> 4) * in[c * 4 + b + 16];
                    }
                }
            }
            for (int n = 0; n < TILE; n++) {
                const float scale = f16_to_f32(tile_scales(w, tile, g)[n]);
                sum[n] = __builtin_fmaf((float)dot[n] * scale, x.scales[i], sum[n]);
                if (KIND == Q4_1)
                    sum[n] = __builtin_fmaf(f16_to_f32(tile_minima(w, tile, g)[n]), x.scaled_sums[i], sum[n]);
            }
        }
        memcpy(out + r * stride, sum, sizeof sum);
    }
}
