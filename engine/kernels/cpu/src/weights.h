// Weight matrices in the form the GEMM reads: tiles of 16 output columns, groups of 32 inputs.
//
// A column is one row of the checkpoint's [out_features, in_features] matrix. A tile is a run of one record per group,
// each of whole cache lines, in the order in which they are read:
//
//     quants    chunks of 64 bytes: 16 columns x 4 bytes
//     scales    16 x fp16
//     minima    16 x fp16 (Q4_1; unused in the others)
//
//     Q4_0, Q4_1   4 chunks; byte b of chunk c: input 4c + b in the low half, 16 + 4c + b in the high half, which is
//     the
//                  order of GGUF's blocks, so that packing moves 4 bytes at a time and changes none
//     Q8_0         8 chunks; byte b of chunk c: input 4c + b, plus 128 (dot products want one unsigned side)
//
//     weight = (q - 8) * scale | q * scale + minimum | q * scale, exactly the checkpoint's
//
// Columns and inputs beyond the matrix are zeros, so any size works. Nothing here is thread-safe against its own
// matrix.
#pragma once

#include "simd.h"

enum Kind { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };

static const int GROUP = 32;
static const int TILE = 16;

struct Matrix {
    int kind;
    int num_columns;  // as in the model; tiles are padded
    int num_inputs;
    int num_groups;
    int num_tiles;
    int quant_bytes;  // of a group in a tile
    int group_bytes;  // the whole record
    int64_t tile_bytes;
    uint8_t* data;
};

static inline void matrix_shape(Matrix* m, int kind, int num_columns, int num_inputs) {
    m->kind = kind;
    m->num_columns = num_columns;
    m->num_inputs = num_inputs;
    m->num_groups = round_up(num_inputs, GROUP) / GROUP;
    m->num_tiles = round_up(num_columns, TILE) / TILE;
    m->quant_bytes = kind == Q8_0 ? 512 : 256;
    m->group_bytes = m->quant_bytes + 64;
    m->tile_bytes = (int64_t)m->num_groups * m->group_bytes;
}

static inline int64_t matrix_bytes(const Matrix& m) { return m.num_tiles * m.tile_bytes; }

static inline uint8_t* tile_quants(const Matrix& m, int tile, int group) {
    return m.data + tile * m.tile_bytes + (int64_t)group * m.group_bytes;
}
static inline uint16_t* tile_scales(const Matrix& m, int tile, int group) {
    return (uint16_t*)(tile_quants(m, tile, group) + m.quant_bytes);
}
static inline uint16_t* tile_minima(const Matrix& m, int tile, int group) { return tile_scales(m, tile, group) + TILE; }

static inline void zero_column(const Matrix& m, int column) {
    const int tile = column / TILE, lane = column % TILE, chunks = m.quant_bytes / 64;
    for (int g = 0; g < m.num_groups; g++) {
        for (int c = 0; c < chunks; c++)
            memset(tile_quants(m, tile, g) + c * 64 + lane * 4, m.kind == Q8_0 ? 0x80 : 0, 4);
        tile_scales(m, tile, g)[lane] = 0;
        if (m.kind == Q4_1) tile_minima(m, tile, g)[lane] = 0;
    }
}

// Fill a column from one row of GGUF blocks of the same kind.
static inline void pack_column(const Matrix& m, int column, const uint8_t* row) {
    const int tile = column / TILE, lane = column % TILE, chunks = m.quant_bytes / 64;
    const int header = m.kind == Q4_1 ? 4 : 2;
    for (int g = 0; g < m.num_groups; g++, row += header + chunks * 4) {
        memcpy(tile_scales(m, tile, g) + lane, row, 2);
        if (m.kind == Q4_1) memcpy(tile_minima(m, tile, g) + lane, row + 2, 2);
        uint8_t* quants = tile_quants(m, tile, g) + lane * 4;
        for (int c = 0; c < chunks; c++) {
            uint32_t word;
            memcpy(&word, row + header + c * 4, 4);
            if (m.kind == Q8_0) word ^= 0x80808080u;  // + 128 as unsigned bytes
            memcpy(quants + c * 64, &word, 4);
        }
    }
}

// The whole number nearest to x / step, within [least, most]: a scale that fp16 rounded down may push it beyond.
static inline int steps_of(float x, float step, float least, float most) {
    return step > 0.0f ? (int)fminf(fmaxf(nearbyintf(x / step), least), most) : 0;
}

// A group of a Q8_0 column: symmetric, the largest magnitude becomes 127.
static inline void quantize_q8_0(const float* x, uint8_t* quants, uint16_t* scale) {
    float largest = 0.0f;
    for (int i = 0; i < GROUP; i++) largest = fmaxf(largest, fabsf(x[i]));
    *scale = f32_to_f16(largest / 127.0f);
    const float step = f16_to_f32(*scale);
    for (int i = 0; i < GROUP; i++)
        quants[i / 4 * 64 + i % 4] = (uint8_t)(steps_of(x[i], step, -127.0f, 127.0f) + 128);
}

// A group of a Q4_1 column: from the least value, which becomes 0, to the largest, 15.
static inline void quantize_q4_1(const float* x, uint8_t* quants, uint16_t* scale, uint16_t* minimum) {
    float least = x[0], largest = x[0];
    for (int i = 1; i < GROUP; i++) least = fminf(least, x[i]), largest = fmaxf(largest, x[i]);
    *minimum = f32_to_f16(least);
    *scale = f32_to_f16((largest - least) / 15.0f);
    const float start = f16_to_f32(*minimum), step = f16_to_f32(*scale);
    for (int i = 0; i < GROUP / 2; i++) {
        const int low = steps_of(x[i] - start, step, 0.0f, 15.0f);
        const int high = steps_of(x[GROUP / 2 + i] - start, step, 0.0f, 15.0f);
        quants[i / 4 * 64 + i % 4] = (uint8_t)(high << 4 | low);
    }
}

// Fill a column of a Q8_0 or Q4_1 matrix from fp32 values.
static inline void quantize_column(const Matrix& m, int column, const float* values) {
    const int tile = column / TILE, lane = column % TILE;
    for (int g = 0; g < m.num_groups; g++) {
        float x[GROUP];
        for (int i = 0; i < GROUP; i++) {
            const int input = g * GROUP + i;
            x[i] = input < m.num_inputs ? values[input] : 0.0f;
        }
        uint8_t* quants = tile_quants(m, tile, g) + lane * 4;
        uint16_t* scale = tile_scales(m, tile, g) + lane;
        if (m.kind == Q4_1) quantize_q4_1(x, quants, scale, tile_minima(m, tile, g) + lane);
        else quantize_q8_0(x, quants, scale);
    }
}

// Read a column back as fp32: how embeddings are looked up. out[round_up(num_inputs, GROUP)].
static inline void dequantize_column(const Matrix& m, int column, float* out) {
    const int tile = column / TILE, lane = column % TILE;
    for (int g = 0; g < m.num_groups; g++, out += GROUP) {
        const uint8_t* quants = tile_quants(m, tile, g) + lane * 4;
        const float scale = f16_to_f32(tile_scales(m, tile, g)[lane]);
        const float minimum = m.kind == Q4_1 ? f16_to_f32(tile_minima(m, tile, g)[lane]) : 0.0f;
        for (int i = 0; i < GROUP; i++) {
            if (m.kind == Q8_0) {
                out[i] = (float)(quants[i / 4 * 64 + i % 4] - 128) * scale;
                continue;
            }
            const uint8_t byte = quants[i % 16 / 4 * 64 + i % 4];
            const int q = i < 16 ? byte & 15 : byte >> 4;
            out[i] = m.kind == Q4_0 ? (float)(q - 8) * scale : (float)q * scale + minimum;
        }
    }
}
