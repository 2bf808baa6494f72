// Drawing tokens from rows of logits: temperature, top-k, top-p, min-p and the keyed noise of noise.h, many rows at once.
//
// Follows engine/sampling/distribution.py and sampler.py, which define the result. A row is left UNDECIDED, for them to
// settle, where the order in which numbers are summed, or a library's logarithm, could decide: two noisy weights or a
// nucleus' border too close to tell apart. So tokens never depend on which of the two drew them.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "noise.h"
#include "team.h"

typedef double D8 __attribute__((vector_size(64)));
typedef int64_t I8 __attribute__((vector_size(64)));

static const int32_t UNDECIDED = -1, NOT_FINITE = -2;

// Mirrors `_Row` in ../sampling.py.
struct SampleRow {
    const float* logits;
    uint64_t seed;
    double top_p;  // 1: off
    float temperature, min_p_offset;  // ln(min_p), or -infinity
    uint32_t position;
    int32_t vocab_size, top_k;  // 0: off
    int32_t token;              // the result
};

// Mirrors `_Logprobs` in ../sampling.py.
struct LogprobRow {
    const float* logits;
    int32_t* top;  // [num_top], best first
    double normaliser;
    int32_t vocab_size, token, num_top, rank;
};

struct Weighted {
    float weight;
    int32_t token;
};
static inline bool is_better(const Weighted& a, const Weighted& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
}

// e^x for x <= 0 in eight lanes, to a few units in the last place; 0 below -700. Cody-Waite reduction as in f_exp, with
// the Taylor series to the 13th term.
static inline D8 exp_8(D8 x) {
    const D8 zero = {}, magic = zero + 6755399441055744.0, low = zero - 700.0;
    const D8 clamped = x < low ? low : x;
    const D8 t = clamped * (zero + 1.4426950408889634) + magic;
    const D8 n = t - magic;
    const D8 r = (clamped - n * (zero + 0.693147180369123816490)) - n * (zero + 1.90821492927058770002e-10);
    static const double terms[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
                                   1.0 / 720,       1.0 / 120,      1.0 / 24,      1.0 / 6,      0.5,         1.0,
                                   1.0};
    D8 p = zero + 1.0 / 6227020800;
    for (const double term : terms) p = p * r + term;
    const I8 exponent = ((I8)t - (I8)magic + 1023) << 52;
    const D8 result = p * (D8)exponent;
    return x < low ? zero : result;
}

// Sum of e^(weight - best). Differences are taken in DIFFERENCE, float or double, as the definition of what is computed
// says.
template <class DIFFERENCE>
static double total_mass(const float* weights, int n, float best) {
    typedef float F8 __attribute__((vector_size(32)));
    D8 total = {};
    for (int first = 0; first < n; first += 8) {
        F8 lanes = {};
        memcpy(&lanes, weights + first, (size_t)(first + 8 <= n ? 8 : n - first) * 4);
        for (int i = n - first; i < 8; i++) lanes[i] = -INFINITY;
        total += exp_8(sizeof(DIFFERENCE) == 4 ? __builtin_convertvector(lanes - best, D8)
                                               : __builtin_convertvector(lanes, D8) - (double)best);
    }
    double sum = 0;
    for (int i = 0; i < 8; i++) sum += total[i];
    return sum;
}

// Tokens whose weight is at least `floor`, if they are `enough`; else more and more below it.
template <class ENOUGH>
static void collect(const float* weights, int n, float best, std::vector<Weighted>* out, ENOUGH is_enough) {
    for (const float cut : {3.0f, 8.0f, 16.0f, INFINITY}) {
        const float floor = best - cut;
        out->clear();
        for (int first = 0; first < n; first += 16) {
            const int end = first + 16 < n ? first + 16 : n;
            if (end - first == 16 && f_fold_max(f_load(weights + first)) < floor) continue;
            for (int i = first; i < end; i++)
                if (weights[i] >= floor) out->push_back({weights[i], i});
        }
        if (is_enough(*out)) return;
    }
}

static double mass_of(const std::vector<Weighted>& tokens, float best) {
    double total = 0;
    for (const Weighted& w : tokens) total += exp((double)(w.weight - best));
    return total;
}

// Keep the `count` best; returns the sum of e^(weight - best) over them.
static double keep_best(std::vector<Weighted>* kept, size_t count, float best) {
    if (count < kept->size()) {
        std::nth_element(kept->begin(), kept->begin() + (ptrdiff_t)count, kept->end(), is_better);
        kept->resize(count);
    }
    return mass_of(*kept, best);
}

// Keep the smallest number of best tokens whose mass reaches `target`. False if rounding could move the border.
static bool keep_nucleus(std::vector<Weighted>* kept, double target, double total, float best) {
    std::vector<Weighted>& k = *kept;
    size_t begin = 0, end = k.size();  // the border lies between
    double sum = 0;                    // of the tokens before `begin`
    while (end - begin > 64) {
        const size_t middle = begin + (end - begin) / 2;
        std::nth_element(k.begin() + (ptrdiff_t)begin, k.begin() + (ptrdiff_t)middle, k.begin() + (ptrdiff_t)end, is_better);
        double half = 0;
        for (size_t i = begin; i < middle; i++) half += exp((double)(k[i].weight - best));
        if (sum + half >= target)
            end = middle;
        else
            sum += half, begin = middle;
    }
    std::sort(k.begin() + (ptrdiff_t)begin, k.begin() + (ptrdiff_t)end, is_better);
    const double slack = 1e-9 * total;
    if (fabs(sum - target) < slack) return false;
    while (begin < end && sum < target) {
        sum += exp((double)(k[begin++].weight - best));
        if (fabs(sum - target) < slack) return false;
    }
    if (sum < target) return false;
    k.resize(begin);
    return true;
}

// The room that a thread needs to sample.
struct SampleRoom {
    std::vector<float> weights;
    std::vector<int32_t> finalists;
    std::vector<double> noisy;
    std::vector<Weighted> best;
    std::vector<int64_t> ids;
};

static int32_t race(const float* weights, const int64_t* ids, int n, int favourite, const SampleRow& row,
                    SampleRoom* room) {
    room->finalists.resize((size_t)n);
    room->noisy.resize((size_t)n);
    const int count = noise_candidates(weights, ids, n, favourite, row.seed, row.position, room->finalists.data(),
                                       room->noisy.data());
    if (count != 1) return UNDECIDED;
    const int32_t winner = room->finalists[0];
    return ids ? (int32_t)ids[winner] : winner;
}

static int32_t sample_row(const SampleRow& row, SampleRoom* room) {
    const int n = row.vocab_size;
    const int favourite = best_token(row.logits, n);
    if (favourite < 0) return NOT_FINITE;
    room->weights.resize((size_t)n);
    float* weights = room->weights.data();
    const F temperature = f_set(row.temperature);
    int i = 0;
    for (; i + 16 <= n; i += 16) f_store(weights + i, f_load(row.logits + i) / temperature);
    for (; i < n; i++) weights[i] = row.logits[i] / row.temperature;
    const float best = weights[favourite], floor = best + row.min_p_offset;
    if (!isfinite(best)) return UNDECIDED;
    const bool has_top_k = row.top_k > 0 && row.top_k < n, has_top_p = row.top_p < 1.0;
    if (!has_top_k && !has_top_p) {
        for (i = 0; row.min_p_offset > -INFINITY && i < n; i++) weights[i] = weights[i] >= floor ? weights[i] : -INFINITY;
        return race(weights, nullptr, n, favourite, row, room);
    }
    double total = has_top_k ? 0 : total_mass<float>(weights, n, best);
    collect(weights, n, best, &room->best, [&](const std::vector<Weighted>& tokens) {
        return has_top_k ? tokens.size() >= (size_t)row.top_k : mass_of(tokens, best) > row.top_p * total * 1.001;
    });
    if (has_top_k) total = keep_best(&room->best, (size_t)row.top_k, best);
    if (has_top_p && !keep_nucleus(&room->best, row.top_p * total, total, best)) return UNDECIDED;
    int count = 0;
    room->ids.resize(room->best.size());
    for (const Weighted& w : room->best)
        if (w.weight >= floor) weights[count] = w.weight, room->ids[(size_t)count++] = w.token;
    return race(weights, room->ids.data(), count, -1, row, room);
}

static void logprob_row(LogprobRow* row, SampleRoom* room) {
    const int n = row->vocab_size;
    const float best = largest(row->logits, n), own = row->logits[row->token];
    row->rank = 1;
    row->normaliser = NAN;
    for (int k = 0; k < row->num_top; k++) row->top[k] = k;
    if (!isfinite(best)) return;
    for (int i = 0; i < n; i++) row->rank += row->logits[i] > own;
    row->normaliser = (double)best + log(total_mass<double>(row->logits, n, best));
    const auto is_enough = [&](const std::vector<Weighted>& tokens) { return tokens.size() >= (size_t)row->num_top; };
    if (row->num_top == 0) return;
    collect(row->logits, n, best, &room->best, is_enough);
    std::partial_sort(room->best.begin(), room->best.begin() + row->num_top, room->best.end(), is_better);
    for (int k = 0; k < row->num_top; k++) row->top[k] = room->best[(size_t)k].token;
}

struct SampleStep {
    SampleRow* rows;
    LogprobRow* logprobs;
    const float* logits;  // [num_best, vocab_size]
    int32_t* best;        // [num_best]
    SampleRoom* rooms;    // one per thread
    int num_rows, num_logprobs, num_best, vocab_size;
};

static void sample_program(Team<SampleStep>& team, const SampleStep& step, uint64_t first_phase, int thread) {
    // One of the three is asked for at a time.
    team.phase(thread, first_phase, step.num_rows + step.num_logprobs + step.num_best, [&](int chunk) {
        if (step.num_rows) step.rows[chunk].token = sample_row(step.rows[chunk], &step.rooms[thread]);
        if (step.num_logprobs) logprob_row(&step.logprobs[chunk], &step.rooms[thread]);
        if (step.num_best) step.best[chunk] = best_token(step.logits + (int64_t)chunk * step.vocab_size, step.vocab_size);
    });
}

struct Sampler {
    explicit Sampler(int num_threads) : rooms((size_t)num_threads), team(num_threads, sample_program) {}
    std::vector<SampleRoom> rooms;
    Team<SampleStep> team;
};

EXPORT Sampler* kvr_sampler_new(int32_t num_threads) {
    try {
        return new Sampler(num_threads);
    } catch (...) {
        return nullptr;
    }
}

EXPORT void kvr_sampler_free(Sampler* sampler) { delete sampler; }

// Fill in the tokens of all rows.
EXPORT void kvr_draw(Sampler* sampler, SampleRow* rows, int32_t num_rows) {
    SampleStep step = {};
    step.rows = rows, step.num_rows = num_rows, step.rooms = sampler->rooms.data();
    if (num_rows) sampler->team.run(step);
}

// Fill in what is asked of all rows.
EXPORT void kvr_logprobs(Sampler* sampler, LogprobRow* rows, int32_t num_rows) {
    SampleStep step = {};
    step.logprobs = rows, step.num_logprobs = num_rows, step.rooms = sampler->rooms.data();
    if (num_rows) sampler->team.run(step);
}

EXPORT void kvr_best(Sampler* sampler, const float* logits, int32_t num_rows, int32_t vocab_size, int32_t* best) {
    SampleStep step = {};
    step.logits = logits, step.num_best = num_rows, step.vocab_size = vocab_size, step.best = best;
    if (num_rows) sampler->team.run(step);
}
