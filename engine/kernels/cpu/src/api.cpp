// The C interface that library.py binds. One translation unit: everything else is included, so the compiler sees it
// all.
//
// Functions return 0 or an error number; nothing throws across the boundary. A model is used by one thread at a time.
#define EXPORT extern "C" __attribute__((visibility("default")))

#include "kernels_api.h"
#include "sample.h"
#include "head.h"

enum Error { OK = 0, NO_MEMORY = 1, BAD_ARGUMENT = 2 };

static const int MAX_QUERIES = 48;     // query heads of the rows that are attended together, at least one row
static const int MAX_SPLIT_ROWS = 16;  // steps of so few rows may spread one sequence's context over threads
static const int EMBEDDING = -1, LM_HEAD = -2, FUSE = -3;

static Matrix* matrix_at(Model* m, int layer, int slot) {
    if (layer == EMBEDDING) return &m->embedding;
    if (layer == LM_HEAD) return &m->lm_head;
    if (layer == FUSE) return &m->head->fuse;
    return &m->layers[(size_t)layer].matrices[slot];
}

EXPORT int64_t kvr_matrix_bytes(int32_t kind, int32_t num_columns, int32_t num_inputs) {
    Matrix m;
    matrix_shape(&m, kind, num_columns, num_inputs);
    return matrix_bytes(m);
}

EXPORT void kvr_model_free(Model* m) {
    if (!m) return;
    if (!m->head) delete m->team;  // joins the threads that use the rest
    for (Model* head : m->heads) kvr_model_free(head);
    delete m->head;
    for (void* p : m->owned) free(p);
    free(m->workspace);
    m->arena.close();
    delete m;
}

// `widest_row`: most inputs of a product.
static bool open_scratch(Model* m, int num_threads, int widest_row) {
    const ModelShape& s = m->shape;
    const int group_size = s.num_heads / s.num_kv_heads, queries = m->query_rows * group_size;
    const int64_t unit = std::max({m->padded_dim, HEAD_UNIT_TILES * TILE, 2 * GROUP});
    const int64_t inputs = std::max(widest_row, s.num_heads * s.head_dim);
    for (int i = 0; i < num_threads; i++) {
        ThreadScratch t;
        float* attention = (float*)aligned(attention_scratch_floats(queries, m->padded_dim) * 4);
        t.products = (float*)aligned(PRODUCT_ROWS * unit * 4);
        t.row = (float*)aligned(inputs * 4);
        t.local_rows = aligned(rows_bytes(LOCAL_ROWS, (int)inputs));
        t.states = (AttentionState*)aligned(queries * (int64_t)sizeof(AttentionState));
        for (void* p : {(void*)attention, (void*)t.products, (void*)t.row, t.local_rows, (void*)t.states}) {
            if (!p) return false;
            m->owned.push_back(p);
        }
        attention_scratch_in(&t.attention, attention, queries, m->padded_dim);
        m->scratch.push_back(t);
    }
    return true;
}

EXPORT Model* kvr_model_new(const ModelShape* shape, int32_t num_threads, int64_t weight_bytes) {
    if (shape->head_dim > MAX_HEAD_DIM || num_threads < 1) return nullptr;
    Model* m = nullptr;
    try {
        m = new Model();
        m->shape = *shape;
        m->padded_dim = round_up(shape->head_dim, 16);
        m->query_rows = std::max(1, MAX_QUERIES / (shape->num_heads / shape->num_kv_heads));
        m->layers.resize((size_t)shape->num_layers);
        if (m->arena.open(weight_bytes) && open_scratch(m, num_threads, shape->hidden_size)) {
            m->team = new Team<Step>(num_threads, run_program);
            return m;
        }
    } catch (...) {  // no memory or no threads: as if the arena were refused
    }
    kvr_model_free(m);
    return nullptr;
}

// Make room for a matrix. Columns are filled by one of the two functions below; rows[column] < 0 leaves it zero.
EXPORT int32_t kvr_add_matrix(Model* m, int32_t layer, int32_t slot, int32_t kind, int32_t num_columns,
                              int32_t num_inputs) {
    Matrix* w = matrix_at(m, layer, slot);
    matrix_shape(w, kind, num_columns, num_inputs);
    w->data = (uint8_t*)m->arena.take(matrix_bytes(*w));
    return w->data ? OK : NO_MEMORY;
}

EXPORT void kvr_pack_columns(Model* m, int32_t layer, int32_t slot, const int32_t* rows, const uint8_t* blocks,
                             int64_t row_bytes) {
    const Matrix& w = *matrix_at(m, layer, slot);
    for (int column = 0; column < w.num_tiles * TILE; column++) {
        const int row = column < w.num_columns ? rows[column] : -1;
        if (row < 0) zero_column(w, column);
        else pack_column(w, column, blocks + row * row_bytes);
    }
}

EXPORT void kvr_quantize_columns(Model* m, int32_t layer, int32_t slot, const int32_t* rows, const float* values) {
    const Matrix& w = *matrix_at(m, layer, slot);
    for (int column = 0; column < w.num_tiles * TILE; column++) {
        const int row = column < w.num_columns ? rows[column] : -1;
        if (row < 0) zero_column(w, column);
        else quantize_column(w, column, values + (int64_t)row * w.num_inputs);
    }
}

// Tied embeddings: one matrix serves the look-up and the logits.
EXPORT void kvr_tie_lm_head(Model* m) { m->lm_head = m->embedding; }

EXPORT int32_t kvr_add_vector(Model* m, int32_t layer, int32_t slot, const float* values, int32_t n) {
    float* copy = (float*)m->arena.take((int64_t)round_up(n, GROUP) * 4);
    if (!copy) return NO_MEMORY;
    memset(copy, 0, (size_t)round_up(n, GROUP) * 4);
    memcpy(copy, values, (size_t)n * 4);
    if (layer >= 0) m->layers[(size_t)layer].vectors[slot] = copy;
    else if (layer == EMBEDDING) m->inverse_frequencies = copy;
    else if (layer == FUSE) m->head->feature_norm = copy;
    else m->final_norm = copy;
    return OK;
}

// Mirrored by `StepArguments` in library.py.
struct StepArguments {
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slot_mapping;
    const int32_t* query_start;
    const int32_t* context_lens;
    const int32_t* block_tables;
    const int64_t* logit_rows;
    float* logits;
    uint8_t* cache;
    void (*on_layer)(int32_t layer);
    int64_t* part_ns;
    float* taps;
    const int32_t* tap_layers;
    int64_t cache_layer_bytes, cache_block_bytes;
    int32_t cache_type, cache_block_size, cache_num_blocks;
    int32_t num_rows, num_seqs, max_blocks, num_logit_rows, num_taps;
};

static bool is_inside(const Model* m, const StepArguments& a) {
    const int64_t num_slots = (int64_t)a.cache_num_blocks * a.cache_block_size;
    if (a.num_taps < 0 || a.num_taps > MAX_TAPS) return false;
    for (int i = 0; i < a.num_taps; i++)
        if (a.tap_layers[i] < 0 || a.tap_layers[i] >= m->shape.num_layers) return false;
    if (a.query_start[0] != 0 || a.query_start[a.num_seqs] != a.num_rows) return false;
    for (int i = 0; i < a.num_rows; i++) {
        if (a.token_ids[i] < 0 || a.token_ids[i] >= m->shape.vocab_size) return false;
        if (a.slot_mapping[i] < 0 || a.slot_mapping[i] >= num_slots || a.positions[i] < 0) return false;
    }
    for (int i = 0; i < a.num_logit_rows; i++)
        if (a.logit_rows[i] < 0 || a.logit_rows[i] >= a.num_rows) return false;
    for (int seq = 0; seq < a.num_seqs; seq++) {
        const int rows = a.query_start[seq + 1] - a.query_start[seq];
        const int blocks = divide_up(a.context_lens[seq], a.cache_block_size);
        if (rows < 1 || a.context_lens[seq] < rows || blocks > a.max_blocks) return false;
        for (int b = 0; b < blocks; b++) {
            const int32_t block = a.block_tables[(int64_t)seq * a.max_blocks + b];
            if (block < 0 || block >= a.cache_num_blocks) return false;
        }
    }
    return true;
}

// Cut the step's attention into items; few items of long contexts are cut further, by splits.
static void plan_attention(Model* m, const StepArguments& a, Step* step) {
    const int kv_heads = m->shape.num_kv_heads;
    int longest = 1, num_items = 0;
    for (int seq = 0; seq < a.num_seqs; seq++) {
        longest = std::max(longest, a.context_lens[seq]);
        num_items += divide_up(a.query_start[seq + 1] - a.query_start[seq], m->query_rows) * kv_heads;
    }
    const int num_splits = divide_up(longest, SPLIT);
    const bool by_split = num_splits > 1 && a.num_rows <= MAX_SPLIT_ROWS && num_items < 4 * m->team->num_threads &&
                          m->team->num_threads > 1;
    m->items.clear();
    for (int seq = 0; seq < a.num_seqs; seq++) {
        const int first = a.query_start[seq], end = a.query_start[seq + 1];
        // The last rows see most keys: first come, first served ends evenly when the long ones come first.
        for (int row = first + (end - first - 1) / m->query_rows * m->query_rows; row >= first; row -= m->query_rows)
            for (int head = 0; head < kv_heads; head++)
                for (int split = by_split ? 0 : -1; split < (by_split ? num_splits : 0); split++)
                    m->items.push_back(
                        {seq, row, std::min(m->query_rows, end - row), a.context_lens[seq] - (end - row), head, split});
    }
    step->items = m->items.data();
    step->num_items = (int)m->items.size();
    step->num_parts = by_split ? num_splits : 1;
}

// Pick the rows that the last layer computes, and the items that hold them, cut down to one row where others don't
// count.
static void plan_last_layer(Model* m, const StepArguments& a, Step* step) {
    std::vector<uint8_t> is_wanted((size_t)a.num_rows, 0);
    m->last_rows.clear();
    m->last_items.clear();
    for (int tap = 0; tap < a.num_taps && m->last_rows.empty(); tap++) {
        if (a.tap_layers[tap] != m->shape.num_layers - 1) continue;
        for (int row = 0; row < a.num_rows; row++) m->last_rows.push_back(row);
        std::fill(is_wanted.begin(), is_wanted.end(), 1);
    }
    for (int i = 0; i < a.num_logit_rows; i++) {
        const size_t row = (size_t)a.logit_rows[i];
        if (!is_wanted[row]) m->last_rows.push_back((int32_t)row);
        is_wanted[row] = 1;
    }
    for (const AttentionItem& item : m->items) {
        int wanted = 0;
        for (int i = 0; i < item.num_rows; i++) wanted += is_wanted[(size_t)(item.first_row + i)];
        if (wanted == item.num_rows) m->last_items.push_back(item);
        for (int i = 0; wanted < item.num_rows && i < item.num_rows; i++) {
            if (!is_wanted[(size_t)(item.first_row + i)]) continue;
            AttentionItem one = item;
            one.first_row += i, one.first_position += i, one.num_rows = 1;
            m->last_items.push_back(one);
        }
    }
    step->last_rows = m->last_rows.data();
    step->num_last_rows = (int)m->last_rows.size();
    step->last_items = m->last_items.data();
    step->num_last_items = (int)m->last_items.size();
}

// Lay out the arrays of a step. Called twice: to measure (memory null) and to place.
static int64_t place(const Model* m, Step* s, uint8_t* memory) {
    const ModelShape& shape = m->shape;
    const int64_t rows = s->num_rows, heads = shape.num_heads;
    int64_t at = 0;
    const auto take = [&](int64_t bytes) {
        uint8_t* p = memory + at;
        at += (bytes + 63) / 64 * 64;
        return p;
    };
    const auto floats = [&](int64_t n) { return (float*)take(n * 4); };
    const auto quantized = [&](int64_t n, int inputs) {
        return rows_in(take(rows_bytes((int)n, inputs)), (int)n, inputs);
    };
    s->hidden = floats(rows * m->embedding.num_groups * GROUP);
    s->query = floats(rows * heads * m->padded_dim);
    s->largest = floats(rows * heads * s->num_parts);
    s->total = floats(rows * heads * s->num_parts);
    s->sums = floats(rows * heads * s->num_parts * m->padded_dim);
    s->cosines = floats(rows * (shape.head_dim / 2));
    s->sines = floats(rows * (shape.head_dim / 2));
    s->normed = quantized(rows, shape.hidden_size);
    s->attended = quantized(rows, shape.num_heads * shape.head_dim);
    s->activated = quantized(rows, shape.intermediate_size);
    s->final_rows = quantized(s->num_logit_rows, shape.hidden_size);
    if (m->head) {
        s->embedded = floats(rows * SEEN_TOKENS * m->embedding.num_groups * GROUP);
        s->joined = quantized(rows * (HeadProgram::JOIN_QUERY + 1), 2 * shape.hidden_size);
        s->tapped = quantized(rows, m->head->fuse.num_inputs);
    }
    return at;
}

static bool make_room(Model* m, Step* step) {
    const int64_t bytes = place(m, step, nullptr);
    if (bytes > m->workspace_bytes) {
        free(m->workspace);
        m->workspace = aligned(bytes);
        m->workspace_bytes = m->workspace ? bytes : 0;
        if (!m->workspace) return false;
    }
    place(m, step, (uint8_t*)m->workspace);
    return true;
}

static Step read_arguments(const Model* m, const StepArguments& a) {
    Step step = {};
    step.model = m;
    step.token_ids = a.token_ids;
    step.positions = a.positions;
    step.slot_mapping = a.slot_mapping;
    step.block_tables = a.block_tables;
    step.logit_rows = a.logit_rows;
    step.logits = a.logits;
    step.on_layer = a.on_layer;
    step.part_ns = a.part_ns;
    step.taps = a.taps;
    step.num_taps = a.num_taps;
    for (int i = 0; i < a.num_taps; i++) step.tap_layers[i] = a.tap_layers[i];
    step.cache = a.cache;
    step.cache_layer_bytes = a.cache_layer_bytes;
    step.cache_block_bytes = a.cache_block_bytes;
    step.cache_type = a.cache_type;
    step.cache_block_size = a.cache_block_size;
    step.num_rows = a.num_rows;
    step.num_logit_rows = a.num_logit_rows;
    step.max_blocks = a.max_blocks;
    return step;
}

EXPORT int32_t kvr_step(Model* m, const StepArguments* arguments) {
    const StepArguments& a = *arguments;
    if (!is_inside(m, a)) return BAD_ARGUMENT;
    Step step = read_arguments(m, a);
    try {
        plan_attention(m, a, &step);
        plan_last_layer(m, a, &step);
    } catch (...) {
        return NO_MEMORY;
    }
    if (!make_room(m, &step)) return NO_MEMORY;
    m->team->run(step);
    return OK;
}

#include "head_api.h"
