// One step of the model: the program that every thread of the team runs.
//
//     embed
//     each layer:  norm · q k v, bias, head norms, rope, KV write · attention · o + residual
//                  · norm · gate up, silu * mul · down + residual
//     norm · lm_head, for the rows whose logits are wanted
//
// Each `·` is a phase boundary. Where a step has few rows, the threads norm and quantize them each for itself, which is
// quicker than waiting for one another. In the last layer only the rows whose logits are wanted go past the KV write,
// unless it is tapped.
// Nothing that decides a result depends on the number of rows or threads.
#pragma once

#include "model.h"

static const int LOCAL_ROWS = 4;     // up to so many rows every thread norms for itself
static const int PRODUCT_ROWS = 48;  // rows of a product that stay in the cache until they are used
static const int ROWS_PER_PART = 256;
static const int UNIT_TILES = 2;
static const int HEAD_UNIT_TILES = 16;  // of lm_head

static inline int divide_up(int x, int by) { return (x + by - 1) / by; }

// What a step's time is spent on, for `part_ns`; mirrored by `StepPart` in library.py.
enum Part { PART_EMBED, PART_NORM, PART_QKV, PART_ATTENTION, PART_OUTPUT, PART_GATE_UP, PART_DOWN, PART_LM_HEAD };

struct Program {
    Team<Step>& team;
    const Step& s;
    const Model& m;
    const ModelShape& shape;
    ThreadScratch& own;
    const int thread;  // 0 is the caller's
    uint64_t number;   // of the next phase
    int num_rows;      // still in use, and which they are; null = all of the step's
    const int32_t* rows = nullptr;

    template <class BODY>
    void phase(Part part, int num_chunks, BODY body) {
        int64_t* spent = thread == 0 ? s.part_ns : nullptr;
        const int64_t start = spent ? now_ns() : 0;
        team.phase(thread, number++, num_chunks, body);
        if (spent) spent[part] += now_ns() - start;
    }

    // Quantized rows made by `make(row, rows)`: here and now if they are few, else by the team into `shared`.
    template <class MAKE>
    struct Input {
        Rows rows;
        MAKE make;
        int missing;  // rows still to be made, by this thread
        const Rows& get() {
            for (; missing; missing--) make(missing - 1, rows);
            return rows;
        }
    };
    template <class MAKE>
    Input<MAKE> input(int num_rows, int num_inputs, const Rows& shared, MAKE make) {
        if (num_rows <= LOCAL_ROWS) return {rows_in(own.local_rows, LOCAL_ROWS, num_inputs), make, num_rows};
        const int per_chunk = std::max(1, std::min(8, num_rows / (2 * team.num_threads)));
        phase(PART_NORM, divide_up(num_rows, per_chunk), [&](int chunk) {
            for (int r = chunk * per_chunk; r < std::min(num_rows, (chunk + 1) * per_chunk); r++) make(r, shared);
        });
        return {shared, make, 0};
    }

    // Products of all rows with units of tiles; `use(row, count, products, unit)` takes them while they are in cache.
    template <class INPUT, class USE>
    void product_phase(Part kind, const Matrix& w, int unit_tiles, int num_rows, INPUT& in, USE use) {
        const int units = divide_up(w.num_tiles, unit_tiles), parts = divide_up(num_rows, ROWS_PER_PART);
        phase(kind, units * parts, [&](int chunk) {
            const int unit = chunk % units, part = chunk / units, first = unit * unit_tiles;
            const int tiles = std::min(unit_tiles, w.num_tiles - first);
            product_rows(num_rows, part, parts, [&](int row, int count) {
                gemm(w, first, tiles, in.get(), row, count, own.products, unit_tiles * TILE);
                use(row, count, own.products, first);
            });
        });
    }
    template <class BODY>
    void product_rows(int num_rows, int part, int parts, BODY body) {
        const int begin = (int)((int64_t)num_rows * part / parts), end = (int)((int64_t)num_rows * (part + 1) / parts);
        for (int row = begin; row < end; row += PRODUCT_ROWS) body(row, std::min(PRODUCT_ROWS, end - row));
    }

    void embed() {
        phase(PART_EMBED, s.num_rows, [&](int row) {
            dequantize_column(m.embedding, (int)s.token_ids[row], hidden_row(row));
            find_rotation(row);
        });
    }
    void find_rotation(int row) {
        const int half = shape.head_dim / 2;
        for (int i = 0; i < half; i++) {
            const float angle = (float)s.positions[row] * m.inverse_frequencies[i];
            s.cosines[(int64_t)row * half + i] = (float)cos((double)angle);
            s.sines[(int64_t)row * half + i] = (float)sin((double)angle);
        }
    }

    int step_row(int row) const { return rows ? rows[row] : row; }
    float* hidden_row(int step_row) const { return s.hidden + (int64_t)step_row * m.embedding.num_groups * GROUP; }

    auto normed(const float* weight) {
        return [this, weight](int row, const Rows& to) {
            rms_norm_quantize(hidden_row(step_row(row)), weight, shape.hidden_size, shape.rms_norm_eps, to, row);
        };
    }

    LayerCache layer_cache(int layer) const {
        return {s.cache + layer * s.cache_layer_bytes,
                s.cache_block_bytes,
                s.cache_type,
                shape.num_kv_heads,
                s.cache_block_size,
                shape.head_dim};
    }

    // Which input rows a head is computed from: `num_rows` of each kind, one kind after the other. See head.h.
    enum Join { JOIN_ALL, JOIN_KEY, JOIN_QUERY };
    Join join_of(int slot, int head) const {
        if (slot == SLOT_V || head >= m.num_finding() * (slot == SLOT_Q ? shape.num_heads / shape.num_kv_heads : 1))
            return JOIN_ALL;
        return slot == SLOT_K ? JOIN_KEY : JOIN_QUERY;
    }

    // Unit: one head of q, k or v, from unit `first` on.
    template <class INPUT>
    void project(const Layer& layer, const LayerCache& cache, INPUT& in, int first) {
        const int heads = shape.num_heads, kv_heads = shape.num_kv_heads, dim = m.padded_dim;
        const int units = heads + 2 * kv_heads - first, parts = divide_up(s.num_rows, ROWS_PER_PART);
        phase(PART_QKV, units * parts, [&](int chunk) {
            const int unit = first + chunk % units, part = chunk / units;
            const int slot = unit < heads ? SLOT_Q : unit < heads + kv_heads ? SLOT_K : SLOT_V;
            const int head = slot == SLOT_Q ? unit : (unit - heads) % kv_heads;
            const Matrix& w = layer.matrices[slot];
            const int from = join_of(slot, head) * s.num_rows;
            product_rows(s.num_rows, part, parts, [&](int row, int count) {
                gemm(w, head * dim / TILE, dim / TILE, in.get(), from + row, count, own.products, dim);
                for (int i = 0; i < count; i++) finish_head(layer, cache, slot, head, row + i, own.products + i * dim);
            });
        });
    }

    void finish_head(const Layer& layer, const LayerCache& cache, int slot, int head, int row, float* values) {
        const int dim = shape.head_dim, half = dim / 2;
        if (const float* bias = layer.vectors[Q_BIAS + slot])
            for (int i = 0; i < dim; i++) values[i] += bias[head * dim + i];
        if (slot == SLOT_V) return write_token(cache, s.slot_mapping[row], 1, head, values);
        if (const float* weight = layer.vectors[Q_NORM + slot]) rms_norm(values, weight, dim, shape.rms_norm_eps);
        const float* cosine = s.cosines + (int64_t)row * half;
        const float* sine = s.sines + (int64_t)row * half;
        const bool is_rotated = join_of(slot, head) == JOIN_ALL;
        for (int i = 0; i < half && is_rotated; i++) {
            const float a = values[i], b = values[half + i];
            values[i] = a * cosine[i] - b * sine[i];
            values[half + i] = b * cosine[i] + a * sine[i];
        }
        if (slot == SLOT_K) return write_token(cache, s.slot_mapping[row], 0, head, values);
        float* query = s.query + ((int64_t)row * shape.num_heads + head) * m.padded_dim;
        const float scale = 1.0f / sqrtf((float)dim);
        for (int i = 0; i < m.padded_dim; i++) query[i] = i < dim ? values[i] * scale : 0.0f;
    }

    void attention(const LayerCache& cache, const AttentionItem* items, int num_items) {
        const int group_size = shape.num_heads / shape.num_kv_heads, dim = m.padded_dim;
        const AttentionShape geometry = {group_size, dim, shape.window, (int64_t)shape.num_heads * dim};
        const auto rows_of = [&](const AttentionItem& item) -> AttentionRows {
            return {s.query + ((int64_t)item.first_row * shape.num_heads + item.kv_head * group_size) * dim,
                    item.num_rows, item.first_position, s.block_tables + (int64_t)item.sequence * s.max_blocks,
                    item.kv_head};
        };
        const auto first_split_of = [&](const AttentionItem& item) {
            if (item.split >= 0) return item.split;
            return std::max(shape.window ? item.first_position - shape.window + 1 : 0, 0) / SPLIT;
        };
        const auto end_split_of = [](const AttentionItem& item) {
            return item.split < 0 ? (item.first_position + item.num_rows - 1) / SPLIT + 1 : item.split + 1;
        };
        phase(PART_ATTENTION, num_items, [&](int index) {
            if (index + 1 < num_items) {  // most likely this thread's next
                const AttentionItem& next = items[index + 1];
                attend_soon(cache, geometry, rows_of(next), first_split_of(next), end_split_of(next));
            }
            const AttentionItem& item = items[index];
            const AttentionRows rows = rows_of(item);
            const int first_split = first_split_of(item), end_split = end_split_of(item);
            const int first_head = item.kv_head * group_size;
            AttentionState* states = own.states;
            for (int q = 0; q < item.num_rows * group_size; q++) {
                const int64_t head =
                    (int64_t)(item.first_row + q / group_size) * shape.num_heads + first_head + q % group_size;
                const int64_t at = head * s.num_parts + (item.split < 0 ? 0 : item.split);
                states[q] = {s.largest + at, s.total + at, s.sums + at * dim};
            }
            attend(cache, geometry, rows, first_split, end_split, states, own.attention);
        });
    }

    // Join the parts of each head, divide by the total weight and quantize the row.
    void finish_attention(int row, const Rows& to) {
        const int dim = m.padded_dim;
        for (int head = 0; head < shape.num_heads; head++) {
            const int64_t at = ((int64_t)step_row(row) * shape.num_heads + head) * s.num_parts;
            const AttentionState state = {s.largest + at, s.total + at, s.sums + at * dim};
            float largest, total, sums[MAX_HEAD_DIM];
            const AttentionState joined = {&largest, &total, sums};
            largest = *state.largest, total = *state.total;
            memcpy(sums, state.sums, (size_t)dim * sizeof(float));
            for (int part = 1; part < s.num_parts; part++) {
                if (s.total[at + part] == 0.0f) continue;
                const float* part_sums = s.sums + (at + part) * dim;
                if (total == 0.0f) {
                    largest = s.largest[at + part], total = s.total[at + part];
                    memcpy(sums, part_sums, (size_t)dim * sizeof(float));
                } else {
                    join_states(joined, s.largest[at + part], s.total[at + part], part_sums, dim);
                }
            }
            const F inverse = f_set(1.0f / total);
            for (int i = 0; i < dim; i += 16) f_store(sums + i, f_load(sums + i) * inverse);
            memcpy(own.row + head * shape.head_dim, sums, (size_t)shape.head_dim * sizeof(float));
        }
        quantize_row(own.row, shape.num_heads * shape.head_dim, to, row);
    }

    // Copies what comes out to the layer's tap, unless `tap` is -1.
    auto add_to_hidden(int tap) {
        return [this, tap](int row, int count, const float* products, int first_tile) {
            const int first = first_tile * TILE, columns = std::min(UNIT_TILES * TILE, shape.hidden_size - first);
            for (int r = 0; r < count; r++) {
                float* hidden = hidden_row(step_row(row + r)) + first;
                for (int i = 0; i < columns; i++) hidden[i] += products[r * UNIT_TILES * TILE + i];
                if (tap < 0) continue;
                float* to = s.taps + ((int64_t)step_row(row + r) * s.num_taps + tap) * shape.hidden_size + first;
                memcpy(to, hidden, (size_t)columns * sizeof(float));
            }
        };
    }
    int tap_of(int layer) const {
        for (int tap = 0; tap < s.num_taps; tap++)
            if (s.tap_layers[tap] == layer) return tap;
        return -1;
    }

    // Unit: a group of 32 intermediate columns, quantized at once as the input of `down`.
    void gate_and_up(const Layer& layer) {
        const Matrix &gate = layer.matrices[SLOT_GATE], &up = layer.matrices[SLOT_UP];
        const int units = divide_up(shape.intermediate_size, GROUP), parts = divide_up(num_rows, ROWS_PER_PART);
        auto in = input(num_rows, shape.hidden_size, s.normed, normed(layer.vectors[POST_NORM]));
        phase(PART_GATE_UP, units * parts, [&](int chunk) {
            const int unit = chunk % units, part = chunk / units, first = unit * 2;
            const int tiles = std::min(2, gate.num_tiles - first);
            float* up_products = own.products + PRODUCT_ROWS * GROUP;
            product_rows(num_rows, part, parts, [&](int row, int count) {
                gemm(gate, first, tiles, in.get(), row, count, own.products, GROUP);
                gemm(up, first, tiles, in.get(), row, count, up_products, GROUP);
                for (int r = 0; r < count; r++) {
                    F halves[2] = {f_zero(), f_zero()};
                    for (int t = 0; t < tiles; t++) {
                        const int at = r * GROUP + t * TILE;
                        halves[t] = f_silu(f_load(own.products + at)) * f_load(up_products + at);
                    }
                    quantize_group(s.activated, row + r, unit, halves[0], halves[1]);
                }
            });
        });
    }

    void run() {
        embed();
        for (int index = 0; index < shape.num_layers; index++) {
            const Layer& layer = m.layer(index);
            const LayerCache cache = layer_cache(index);
            auto in = input(s.num_rows, shape.hidden_size, s.normed, normed(layer.vectors[INPUT_NORM]));
            project(layer, cache, in, 0);
            if (thread == 0 && s.on_layer) s.on_layer(index);
            if (index + 1 < shape.num_layers) {
                attention(cache, s.items, s.num_items);
            } else {
                if (!s.num_last_rows) return;
                rows = s.last_rows, num_rows = s.num_last_rows;
                attention(cache, s.last_items, s.num_last_items);
            }
            output_and_mlp(layer, tap_of(index));
        }
        if (s.num_logit_rows) logits();
    }

    void output_and_mlp(const Layer& layer, int tap) {
        auto attended = input(num_rows, shape.num_heads * shape.head_dim, s.attended,
                              [this](int row, const Rows& to) { finish_attention(row, to); });
        product_phase(PART_OUTPUT, layer.matrices[SLOT_O], UNIT_TILES, num_rows, attended, add_to_hidden(-1));
        gate_and_up(layer);
        auto activated = input(0, shape.intermediate_size, s.activated, [](int, const Rows&) {});
        activated.rows = s.activated;
        product_phase(PART_DOWN, layer.matrices[SLOT_DOWN], UNIT_TILES, num_rows, activated, add_to_hidden(tap));
    }

    void logits() {
        auto final_rows = input(s.num_logit_rows, shape.hidden_size, s.final_rows, [this](int row, const Rows& to) {
            rms_norm_quantize(hidden_row((int)s.logit_rows[row]), m.final_norm, shape.hidden_size, shape.rms_norm_eps,
                              to, row);
        });
        product_phase(PART_LM_HEAD, m.lm_head, HEAD_UNIT_TILES, s.num_logit_rows, final_rows,
                      [this](int row, int count, const float* products, int first_tile) {
                          const int first = first_tile * TILE;
                          const int columns = std::min(HEAD_UNIT_TILES * TILE, shape.vocab_size - first);
                          for (int r = 0; r < count; r++)
                              memcpy(s.logits + (int64_t)(row + r) * shape.vocab_size + first,
                                     products + r * HEAD_UNIT_TILES * TILE, (size_t)columns * sizeof(float));
                      });
    }
};
