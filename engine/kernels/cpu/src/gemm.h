// Products of quantized rows with weight matrices: out[row, column] = sum over inputs of x[row, i] * w[column, i].
//
// Row-exact: an element is a sum over groups in order, each group an exact integer dot product scaled once, whatever
// rows and columns are computed beside it:
//
//     out = fma(float(dot), weight scale * row scale, out);   Q4_1 also: out = fma(minimum, row scale * row sum, out)
//
// A variant provides gemm_tile<KIND, R, C>: R rows by C tiles of 16 columns, everything in registers, and which R and C
// its registers hold: up to WIDE_ROWS rows by WIDE_TILES tiles, up to TALL_ROWS by one.
#pragma once

#include "activations.h"

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
#include "gemm_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "gemm_avx2.h"
#else
#include "gemm_portable.h"
#endif

template <int KIND, int C>
static void gemm_rows(const Matrix& w, int tile, const Rows& x, int row, int num_rows, bool is_first, float* out,
                      int64_t stride) {
    const int most = C == WIDE_TILES ? WIDE_ROWS : TALL_ROWS;
    switch (num_rows) {
#define CASE(R) \
    case R: return gemm_tile<KIND, (R <= most ? R : 1), C>(w, tile, x, row, is_first, out, stride);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#undef CASE
    }
}

template <int KIND, int C>
static void gemm_tiles(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row, int num_rows,
                       float* out, int64_t stride) {
    const int most = C == WIDE_TILES ? WIDE_ROWS : TALL_ROWS, num_parts = (num_rows + most - 1) / most;
    for (int t = 0; t < num_tiles; t += C) {
        for (int part = 0; part < num_parts; part++) {  // parts of nearly equal size
            const int begin = num_rows * part / num_parts, end = num_rows * (part + 1) / num_parts;
            float* to = out + begin * stride + t * TILE;
            gemm_rows<KIND, C>(w, first_tile + t, x, first_row + begin, end - begin, part == 0, to, stride);
        }
    }
}

template <int KIND>
static NOT_INLINED void gemm_kind(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row, int num_rows,
                      float* out, int64_t stride) {
    const bool is_tall = num_rows > WIDE_ROWS && num_rows <= TALL_ROWS;  // one pass over the weights beats two
    const int num_wide = is_tall ? 0 : num_tiles / WIDE_TILES * WIDE_TILES;
    gemm_tiles<KIND, WIDE_TILES>(w, first_tile, num_wide, x, first_row, num_rows, out, stride);
    gemm_tiles<KIND, 1>(w, first_tile + num_wide, num_tiles - num_wide, x, first_row, num_rows, out + num_wide * TILE,
                        stride);
}

// out [num_rows, num_tiles * 16] with `stride` floats from row to row; padding columns come out as 0.
static void gemm(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row, int num_rows, float* out,
                 int64_t stride) {
    if (w.kind == Q4_0) gemm_kind<Q4_0>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
    else if (w.kind == Q4_1) gemm_kind<Q4_1>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
    else gemm_kind<Q8_0>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
}
