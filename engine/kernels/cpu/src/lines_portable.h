// Keys and values of an int8 cache in the order in which attention multiplies them, word by word from `first` on: all of
// them, or what a variant leaves. See simd.h.
#pragma once

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
