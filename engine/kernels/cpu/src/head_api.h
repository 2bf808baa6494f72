// The C interface of draft heads. A head belongs to its target, which frees it.
#pragma once

#include "head.h"

// Make a head for a target. Its layer is layer 0, its output norm the final norm, its output matrix comes from
// `kvr_head_take_rows`. It writes the cache's layer behind the target's own.
EXPORT Model* kvr_head_new(Model* target, int32_t num_taps, int32_t num_finding, float rms_norm_eps,
                           int64_t weight_bytes) {
    if (num_taps < 1 || num_taps > MAX_TAPS) return nullptr;
    Model* m = nullptr;
    try {
        m = new Model();
        target->heads.push_back(m);  // from here on freed with the target
        m->shape = target->shape;
        m->shape.num_layers = 1;
        m->shape.rms_norm_eps = rms_norm_eps;
        m->padded_dim = target->padded_dim;
        m->query_rows = target->query_rows;
        m->layers.resize(1);
        m->embedding = target->embedding;
        m->inverse_frequencies = target->inverse_frequencies;
        m->head = new HeadParts();
        m->head->cache_layer = target->shape.num_layers;
        m->head->state_size = m->shape.hidden_size + STATE_TOKENS;
        m->head->num_finding = num_finding;
        const int widest = std::max(2, (int)num_taps) * m->shape.hidden_size;
        if (!m->arena.open(weight_bytes) || !open_scratch(m, target->team->num_threads, widest)) return nullptr;
    } catch (...) {
        return nullptr;
    }
    m->team = target->team;
    return m;
}

// Give a head those rows of its target's output matrix, ids ascending, stored as `kind`.
EXPORT int32_t kvr_head_take_rows(Model* m, const Model* target, int32_t kind, const int32_t* ids, int32_t num_ids) {
    const Matrix& from = target->lm_head;
    for (int i = 0; i < num_ids; i++)
        if (ids[i] < 0 || ids[i] >= from.num_columns) return BAD_ARGUMENT;
    matrix_shape(&m->lm_head, kind, num_ids, from.num_inputs);
    m->lm_head.data = (uint8_t*)m->arena.take(matrix_bytes(m->lm_head));
    if (!m->lm_head.data) return NO_MEMORY;
    float* row = m->scratch[0].row;
    for (int i = 0; i < m->lm_head.num_tiles * TILE; i++) {
        if (i >= num_ids) {
            zero_column(m->lm_head, i);
            continue;
        }
        dequantize_column(from, ids[i], row);
        quantize_column(m->lm_head, i, row);
    }
    m->shape.vocab_size = num_ids;
    return OK;
}

// Mirrored by `HeadArguments` in ../head.py.
struct HeadArguments {
    StepArguments step;     // absorb: `taps` are given, no logits; draft: every row has logits
    const float* carried;   // absorb: [num_seqs, state_size] states before each sequence's first row
    const float* previous;  // draft: [num_rows, state_size] states before each row
    float* states;          // [num_rows, state_size] out
    int32_t* best;          // draft: [num_rows] out, index of the largest logit
    float* share;           // draft: [num_rows] out, its share of the sum of e^logit
};

static int32_t run_head(Model* m, const Model* target, const HeadArguments& a, bool is_absorbing) {
    if (!is_inside(target, a.step)) return BAD_ARGUMENT;
    const int n = m->shape.hidden_size, size = m->head->state_size, num_rows = a.step.num_rows;
    Step step = read_arguments(m, a.step);
    step.taps = a.step.taps;
    step.num_taps = 0;  // nothing is to be tapped here
    step.states = is_absorbing ? a.states : nullptr;
    step.best = a.best;
    step.share = a.share;
    try {
        m->previous.resize((size_t)num_rows);
        for (int row = 0; row < num_rows && !is_absorbing; row++)
            m->previous[(size_t)row] = a.previous + (int64_t)row * size;
        for (int seq = 0; seq < a.step.num_seqs && is_absorbing; seq++)
            for (int row = a.step.query_start[seq]; row < a.step.query_start[seq + 1]; row++)
                m->previous[(size_t)row] = row == a.step.query_start[seq] ? a.carried + (int64_t)seq * size
                                                                          : a.states + (int64_t)(row - 1) * size;
        for (int row = 0; row < num_rows; row++) {  // in order: a row may follow the one before it
            float* tokens = a.states + (int64_t)row * size + n;
            tokens[0] = (float)(a.step.token_ids[row] + 1);
            tokens[1] = m->previous[(size_t)row][n];
        }
        if (!is_absorbing) plan_attention(m, a.step, &step);
    } catch (...) {
        return NO_MEMORY;
    }
    step.previous = m->previous.data();
    if (!make_room(m, &step)) return NO_MEMORY;
    m->team->run(step);
    for (int row = 0; row < num_rows && !is_absorbing; row++)
        memcpy(a.states + (int64_t)row * size, step.hidden + (int64_t)row * m->embedding.num_groups * GROUP,
               (size_t)n * sizeof(float));
    return OK;
}

EXPORT int32_t kvr_head_absorb(Model* m, const Model* target, const HeadArguments* arguments) {
    return run_head(m, target, *arguments, true);
}

EXPORT int32_t kvr_head_draft(Model* m, const Model* target, const HeadArguments* arguments) {
    return run_head(m, target, *arguments, false);
}

static const int NUM_GRADES = 10;

// Mirrored by `_RunArguments` in ../head.py.
struct HeadRunArguments {
    HeadArguments head;        // of one row, whose arrays are changed as the run goes on
    const int32_t* vocab_ids;  // ascending
    const int32_t* stop_ids;   // nothing is drafted behind these
    const float* chances;      // [NUM_GRADES] that a draft is accepted, by its share
    const float* least_reach;  // [max_drafts] by drafts made: the run ends when the chance that all is accepted is less
    int32_t* tokens;           // [max_drafts] out
    float* shares;             // [max_drafts] out
    int32_t num_stop_ids, max_drafts;
    int32_t num_drafts;  // out
    int64_t first_ns;    // out, time of the first draft
};

EXPORT int32_t kvr_head_run(Model* m, const Model* target, HeadRunArguments* arguments) {
    HeadRunArguments& run = *arguments;
    StepArguments& step = run.head.step;
    if (step.num_rows != 1 || run.max_drafts < 1) return BAD_ARGUMENT;
    // The caller's arrays are his to change; the types say const because steps do not.
    int64_t &token = *(int64_t*)step.token_ids, &position = *(int64_t*)step.positions,
            &slot = *(int64_t*)step.slot_mapping;
    if (position + run.max_drafts > (int64_t)step.max_blocks * step.cache_block_size) return BAD_ARGUMENT;
    const int64_t started_ns = now_ns();
    float reach = 1.0f;
    for (run.num_drafts = 0;;) {
        const int32_t error = run_head(m, target, run.head, false);
        if (error) return error;
        if (run.num_drafts == 0) run.first_ns = now_ns() - started_ns;
        const int32_t drafted = run.vocab_ids[*run.head.best];
        const float share = *run.head.share;
        run.tokens[run.num_drafts] = drafted;
        run.shares[run.num_drafts++] = share;
        for (int i = 0; i < run.num_stop_ids; i++)
            if (run.stop_ids[i] == drafted) return OK;
        const int grade = std::min((int)(share * NUM_GRADES), NUM_GRADES - 1);
        reach *= run.chances[std::max(grade, 0)];
        if (run.num_drafts == run.max_drafts || reach < run.least_reach[run.num_drafts]) break;
        token = drafted;
        position++;
        ++*(int32_t*)step.context_lens;
        slot = (int64_t)step.block_tables[position / step.cache_block_size] * step.cache_block_size +
               position % step.cache_block_size;
        memcpy((float*)run.head.previous, run.head.states, (size_t)m->head->state_size * sizeof(float));
    }
    return OK;
}
