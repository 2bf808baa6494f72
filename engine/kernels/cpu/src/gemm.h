// Products of quantized rows with weight matrices: out[row, column] = sum over inputs of x[row, i] * w[column, i].
//
// Row-exact: an element is a sum over groups in order, each group an exact integer dot product scaled once, whatever
// rows and columns are computed beside it:
//
//     out = fma(float(dot) * weight scale, row scale, out);   Q4_1 also: out = fma(minimum, row scale * row sum, out)
//
// A variant provides gemm_tile<KIND, R, C>: R rows by C tiles of 16 columns, everything in registers, and how many of
// each it takes: up to ROWS_AT_ONCE rows by TILES_AT_ONCE tiles.
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
    switch (num_rows) {
#define CASE(R) \
    case R: return gemm_tile<KIND, (R <= ROWS_AT_ONCE ? R : 1), C>(w, tile, x, row, is_first, out, stride);
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
    }
}

template <int KIND, int C>
static void gemm_tiles(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row, int num_rows,
                       float* out, int64_t stride) {
    const int num_parts = (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (int t = 0; t < num_tiles; t += C) {
        for (int part = 0; part < num_parts; part++) {  // parts of nearly equal size
            const int begin = num_rows * part / num_parts, end = num_rows * (part + 1) / num_parts;
            float* to = out + begin * stride + t * TILE;
            gemm_rows<KIND, C>(w, first_tile + t, x, first_row + begin, end - begin, part == 0, to, stride);
        }
    }
}

template <int KIND>
static NOT_INLINED void gemm_kind(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row,
                                  int num_rows, float* out, int64_t stride) {
    const int even = num_tiles / TILES_AT_ONCE * TILES_AT_ONCE, odd = num_tiles - even;
    gemm_tiles<KIND, TILES_AT_ONCE>(w, first_tile, even, x, first_row, num_rows, out, stride);
    gemm_tiles<KIND, 1>(w, first_tile + even, odd, x, first_row, num_rows, out + even * TILE, stride);
}

// out [num_rows, num_tiles * 16] with `stride` floats from row to row; padding columns come out as 0.
static void gemm(const Matrix& w, int first_tile, int num_tiles, const Rows& x, int first_row, int num_rows, float* out,
                 int64_t stride) {
    if (w.kind == Q4_0) gemm_kind<Q4_0>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
    else if (w.kind == Q4_1) gemm_kind<Q4_1>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
    else gemm_kind<Q8_0>(w, first_tile, num_tiles, x, first_row, num_rows, out, stride);
}
