// Operations on 8-bit integers that variants share, see simd.h. Keys and values are brought into lines word by word from
// `first` on: all of them, or what a variant leaves.
#pragma once

static inline void split_digits_64(const float* x, F factor, int8_t* high, int8_t* low) {
    for (int i = 0; i < 64; i += 16) split_digits(f_load(x + i) * factor, high + i, low + i);
}

static inline void key_lines_from(int first, const int8_t* const* keys, int dim, int padded_dim, uint8_t* lines) {
    for (int key = 0; key < 16; key++) {
        for (int i = first; i < padded_dim; i += 4) {
            uint32_t word = 0;
            if (i + 4 <= dim) memcpy(&word, keys[key] + i, 4);
            else if (i < dim) memcpy(&word, keys[key] + i, (size_t)(dim - i));
            word ^= 0x80808080u;
            memcpy(lines + i * 16 + key * 4, &word, 4);
        }
    }
}

static inline void value_lines_from(int first, const int8_t* const* values, int dim, int padded_dim, int8_t* lines) {
    for (int i = first; i < padded_dim; i++)
        for (int key = 0; key < 4; key++) lines[i * 4 + key] = i < dim ? values[key][i] : 0;
}
