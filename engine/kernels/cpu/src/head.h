// A draft head (engine/spec/head/format.py): one layer over the target's hidden states. Its model borrows the target's
// threads, embedding and rotary frequencies, and writes one more layer of the target's KV cache.
//
//     absorb   fuse the taps of a target's step to features, and write the head's K and V of all its rows
//     draft    run rows whose previous features are given up to the logits; what leaves the layer are their features
//     run      draft one sequence's likeliest tokens one after the other, until the next is not worth it
//
// What is known behind a position is its state: hidden_size features, and the ids + 1 of its token and of the one before,
// 0 = none. As in a step of the target, a row's bits do not depend on the rows beside it.
#pragma once

#include "step.h"

static const int STATE_TOKENS = 2;
static const int SEEN_TOKENS = 1 + STATE_TOKENS;  // its own token and those of the state before it

struct HeadProgram : Program {
    void run() {
        const Layer& layer = m.layer(0);
        const LayerCache cache = layer_cache(m.head->cache_layer);
        if (s.states) fuse();
        look_up();
        const int joins = m.num_finding() ? (s.states ? JOIN_KEY : JOIN_QUERY) + 1 : JOIN_ALL + 1;
        auto joined = input(joins * s.num_rows, 2 * shape.hidden_size, s.joined,
                            [this](int row, const Rows& to) { join(row, to); });
        project(layer, cache, joined, s.states ? shape.num_heads : 0);
        if (s.states) return;
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
                              memcpy(s.states + (int64_t)(row + r) * m.head->state_size + first,
                                     products + r * UNIT_TILES * TILE, (size_t)columns * sizeof(float));
                      });
    }

    void look_up() {
        phase(PART_EMBED, s.num_rows, [&](int row) {
            const float* before = s.previous[row];
            find_rotation(row);
            embed_token((int)s.token_ids[row], embedded(row, 0));
            if (m.num_finding() && !follows(row))
                for (int i = 0; i < STATE_TOKENS; i++)
                    embed_token(state_token(before[shape.hidden_size + i]), embedded(row, 1 + i));
            if (!s.states) memcpy(hidden_row(row), before, (size_t)shape.hidden_size * sizeof(float));
        });
    }
    float* embedded(int row, int token) const {
        return s.embedded + ((int64_t)row * SEEN_TOKENS + token) * m.embedding.num_groups * GROUP;
    }
    // Whether the row before is here and of the same sequence: only where rows are absorbed.
    bool follows(int row) const {
        return s.states && row && s.previous[row] == s.states + (int64_t)(row - 1) * m.head->state_size;
    }
    // The normed embedding of the token so far before a row: that row's own, where it is here.
    const float* seen(int row, int back) const {
        return back && follows(row) ? seen(row - 1, back - 1) : embedded(row, back);
    }
    // States come from other processes too: what is no token is none.
    int state_token(float value) const {
        return value >= 1.0f && value <= (float)m.embedding.num_columns ? (int)value - 1 : -1;
    }
    void embed_token(int token, float* to) {
        const size_t n = (size_t)shape.hidden_size;
        if (token < 0) return (void)memset(to, 0, n * sizeof(float));
        dequantize_column(m.embedding, token, to);
        rms_norm(to, m.layer(0).vectors[INPUT_NORM], (int)n, shape.rms_norm_eps);
    }

    // The layer's inputs: two vectors side by side.
    void join(int input_row, const Rows& to) {
        const int row = input_row % s.num_rows, kind = input_row / s.num_rows, n = shape.hidden_size;
        const float* left = seen(row, kind == JOIN_KEY ? 1 : 0);
        const float* right = kind == JOIN_ALL ? s.previous[row] : seen(row, kind == JOIN_KEY ? 2 : 1);
        memcpy(own.row, left, (size_t)n * sizeof(float));
        memcpy(own.row + n, right, (size_t)n * sizeof(float));
        if (kind == JOIN_ALL) rms_norm(own.row + n, m.head->feature_norm, n, shape.rms_norm_eps);
        quantize_row(own.row, 2 * n, to, input_row);
    }
};

static void run_program(Team<Step>& team, const Step& step, uint64_t first_phase, int thread) {
    ThreadScratch& own = const_cast<Model*>(step.model)->scratch[(size_t)thread];
    const Program program = {team, step, *step.model, step.model->shape, own, thread, first_phase, step.num_rows};
    if (step.model->head) HeadProgram{program}.run();
    else Program(program).run();
}
