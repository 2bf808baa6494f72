// A draft head (engine/spec/head_format.py): one layer over the target's hidden states. Its model borrows the target's
// threads, embedding and rotary frequencies, and writes one more layer of the target's KV cache.
//
//     absorb   fuse the taps of a target's step to features, and write the head's K and V of all its rows
//     draft    run rows whose previous features are given up to the logits; what leaves the layer are their features
//     run      draft one sequence's likeliest tokens one after the other, until the next is not worth it
//
// As in a step of the target, a row's bits do not depend on the rows beside it.
#pragma once

#include "step.h"

struct HeadProgram : Program {
    void run() {
        const Layer& layer = m.layer(0);
        const LayerCache cache = layer_cache(m.head->cache_layer);
        if (s.features) fuse();
        look_up();
        auto joined = input(s.num_rows, 2 * shape.hidden_size, s.joined,
                            [this](int row, const Rows& to) { join(row, to); });
        project(layer, cache, joined, s.features ? shape.num_heads : 0);
        if (s.features) return;
        attention(cache, s.items, s.num_items);
        output_and_mlp(layer, -1);
        logits();
        phase(PART_LM_HEAD, s.num_rows, [&](int row) {
            find_best(s.logits + (int64_t)row * shape.vocab_size, shape.vocab_size, s.best + row, s.share + row);
        });
    }

    // The first of the largest values, and its share.
    static void find_best(const float* logits, int n, int32_t* best, float* share) {
        F lanes = f_set(-INFINITY);
        int i = 0;
        for (; i + 16 <= n; i += 16) lanes = f_max(lanes, f_load(logits + i));
        float largest = f_fold_max(lanes);
        for (; i < n; i++) largest = logits[i] > largest ? logits[i] : largest;
        F sum = f_zero();
        const F most = f_set(largest);
        float rest = 0.0f;
        for (i = 0; i + 16 <= n; i += 16) sum = sum + f_exp(f_load(logits + i) - most);
        for (; i < n; i++) rest += exp_one(logits[i] - largest);
        *share = 1.0f / (f_fold_sum(sum) + rest);
        for (i = 0; i + 1 < n && logits[i] != largest; i++) {}
        *best = i;
    }

    void fuse() {
        const Matrix& w = m.head->fuse;
        auto in = input(s.num_rows, w.num_inputs, s.tapped, [this](int row, const Rows& to) {
            const int n = m.head->fuse.num_inputs;
            quantize_row(s.taps + (int64_t)row * n, n, to, row);
        });
        product_phase(PART_OUTPUT, w, UNIT_TILES, s.num_rows, in,
                      [this](int row, int count, const float* products, int first_tile) {
                          const int first = first_tile * TILE;
                          const int columns = std::min(UNIT_TILES * TILE, shape.hidden_size - first);
                          for (int r = 0; r < count; r++)
                              memcpy(s.features + (int64_t)(row + r) * shape.hidden_size + first,
                                     products + r * UNIT_TILES * TILE, (size_t)columns * sizeof(float));
                      });
    }

    void look_up() {
        phase(PART_EMBED, s.num_rows, [&](int row) {
            dequantize_column(m.embedding, (int)s.token_ids[row], s.embedded + row_offset(row));
            find_rotation(row);
            if (!s.features) memcpy(hidden_row(row), s.previous[row], (size_t)shape.hidden_size * sizeof(float));
        });
    }
    int64_t row_offset(int row) const { return (int64_t)row * m.embedding.num_groups * GROUP; }

    // The layer's input: normed embedding and normed features, side by side.
    void join(int row, const Rows& to) {
        const int n = shape.hidden_size;
        memcpy(own.row, s.embedded + row_offset(row), (size_t)n * sizeof(float));
        memcpy(own.row + n, s.previous[row], (size_t)n * sizeof(float));
        rms_norm(own.row, m.layer(0).vectors[INPUT_NORM], n, shape.rms_norm_eps);
        rms_norm(own.row + n, m.head->feature_norm, n, shape.rms_norm_eps);
        quantize_row(own.row, 2 * n, to, row);
    }
};

static void run_program(Team<Step>& team, const Step& step, uint64_t first_phase, int thread) {
    ThreadScratch& own = const_cast<Model*>(step.model)->scratch[(size_t)thread];
    const Program program = {team, step, *step.model, step.model->shape, own, thread, first_phase, step.num_rows};
    if (step.model->head) HeadProgram{program}.run();
    else Program(program).run();
}
