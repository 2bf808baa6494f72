// A loaded model and the memory that a step works in.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "team.h"

enum Slot { SLOT_Q, SLOT_K, SLOT_V, SLOT_O, SLOT_GATE, SLOT_UP, SLOT_DOWN, NUM_MATRICES };
enum VectorSlot { INPUT_NORM, POST_NORM, Q_NORM, K_NORM, Q_BIAS, K_BIAS, V_BIAS, NUM_VECTORS };

// Mirrored by `ModelShape` in library.py.
struct ModelShape {
    int32_t num_layers;
    int32_t hidden_size;
    int32_t intermediate_size;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t vocab_size;
    int32_t window;  // 0 = all
    float rms_norm_eps;
};

struct Layer {
    Matrix matrices[NUM_MATRICES];
    float* vectors[NUM_VECTORS];
};

static inline void* aligned(int64_t bytes) { return aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64)); }

// Anonymous memory in large pages where the system gives them: a step reads all weights once, page by page.
struct Arena {
    uint8_t* data = nullptr;
    int64_t size = 0, used = 0;

    bool open(int64_t bytes) {
        const int64_t page = 2 << 20;
        size = (bytes + page - 1) / page * page;
        void* p = mmap(nullptr, (size_t)(size + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) return false;
        uint8_t* aligned = (uint8_t*)(((uintptr_t)p + page - 1) / page * page);
        if (aligned > (uint8_t*)p) munmap(p, (size_t)(aligned - (uint8_t*)p));
        const int64_t behind = (uint8_t*)p + size + page - (aligned + size);
        if (behind > 0) munmap(aligned + size, (size_t)behind);
        data = aligned;
        madvise(data, (size_t)size, MADV_HUGEPAGE);
        return true;
    }
    void* take(int64_t bytes) {
        const int64_t at = used;
        if (at + bytes > size) return nullptr;
        used = (at + bytes + 63) / 64 * 64;
        return data + at;
    }
    void close() {
        if (data) munmap(data, (size_t)size);
        data = nullptr;
    }
};

// Query rows of one sequence that are attended together, over one KV head.
struct AttentionItem {
    int32_t sequence;
    int32_t first_row;
    int32_t num_rows;
    int32_t first_position;
    int32_t kv_head;
    int32_t split;  // only this one; -1: all
};

static const int MAX_TAPS = 8;

// What one step computes: the caller's arrays (see library.py's `StepArguments`) and the workspace of the model.
struct Step {
    const struct Model* model;
    const int64_t* token_ids;
    const int64_t* positions;
    const int64_t* slot_mapping;
    const int32_t* block_tables;
    const int64_t* logit_rows;
    float* logits;
    void (*on_layer)(int32_t layer);
    int64_t* part_ns;  // null = not measured
    uint8_t* cache;
    int64_t cache_layer_bytes, cache_block_bytes;
    int cache_type, cache_block_size;
    int num_rows, num_logit_rows, max_blocks, num_parts;
    int num_items, num_last_items, num_last_rows;
    const AttentionItem* items;
    const AttentionItem* last_items;  // of the last layer, where only rows with logits are attended
    const int32_t* last_rows;         // these, each once
    float *hidden, *query, *largest, *total, *sums, *cosines, *sines;
    Rows normed, attended, activated, final_rows;
    float* taps;  // [num_rows, num_taps, hidden_size]: rows as they leave the layers `tap_layers`
    int num_taps;
    int32_t tap_layers[MAX_TAPS];
    // Of a draft head only, see head.h.
    const float* const* previous;  // [num_rows] the state of each row's previous position
    float* states;                 // [num_rows, state_size] out, features made of the taps; null = the head drafts
    float* embedded;               // [num_rows, tokens seen, hidden_size], normed
    Rows tapped, joined;
    int32_t* best;  // [num_rows] the best vocabulary id's index, and its share of all e^logit
    float* share;
};

struct ThreadScratch {
    float* products;         // [PRODUCT_ROWS, widest unit]
    float* row;              // [num_heads * head_dim]
    void* local_rows;        // quantized rows of a small step, when each thread computes them itself
    AttentionState* states;  // [queries attended together]
    AttentionScratch attention;
};

// What a draft head has besides a layer, norm and output; see head.h.
struct HeadParts {
    Matrix fuse;
    float* feature_norm = nullptr;
    int cache_layer;
    int state_size;
    int num_finding;  // KV heads that find, the first ones
};

struct Model {
    ModelShape shape;
    int padded_dim;
    int query_rows;  // rows of a sequence that are attended together
    Arena arena;
    std::vector<Layer> layers;
    Matrix embedding, lm_head;
    float* final_norm = nullptr;
    float* inverse_frequencies = nullptr;

    HeadParts* head = nullptr;  // of a draft head's model
    std::vector<Model*> heads;  // of a target: they use its threads and end with it

    Team<Step>* team = nullptr;
    std::vector<ThreadScratch> scratch;
    std::vector<void*> owned;
    void* workspace = nullptr;
    int64_t workspace_bytes = 0;
    std::vector<AttentionItem> items, last_items;
    std::vector<int32_t> last_rows;
    std::vector<const float*> previous;

    int num_finding() const { return head ? head->num_finding : 0; }
    Layer& layer(int i) const { return const_cast<Layer&>(layers[(size_t)i]); }
};
