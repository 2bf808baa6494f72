// The race of sampling: which tokens can have the largest weight + Gumbel noise. Noise is that of
// engine/sampling/noise.py, keyed by (seed, position, token id); computing it exactly for a whole vocabulary costs more
// than a step of the model.
//
// A token beats the best one found so far, `lead`, only if its noise is at least lead - weight, that is if the uniform
// number u behind it is so close to 1 that 1 - u <= 1 - e^-e^-(lead - weight) <= e^(weight - lead). One multiplication
// and comparison settle that; the few tokens that remain are computed exactly.
#pragma once

#include "simd.h"

// Eight 32-bit words in 64-bit lanes.
typedef uint64_t Words __attribute__((vector_size(64)));

// Products of the lanes' low halves. Spelled out because compilers multiply all 64 bits, which takes three times as long.
static inline Words multiply_low(Words a, uint32_t factor) {
#if defined(__AVX512F__)
    return (Words)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    __m256i halves[2];
    memcpy(halves, &a, 64);
    for (__m256i& half : halves) half = _mm256_mul_epu32(half, _mm256_set1_epi64x(factor));
    memcpy(&a, halves, 64);
    return a;
#else
    const Words zero = {};
    return (a & (zero + 0xFFFFFFFFull)) * (zero + (uint64_t)factor);
#endif
}

// First words of Philox4x32-10 (Salmon et al., SC 2011) of eight counters (token id, position, 0, 0).
static inline Words philox_8(Words token_ids, uint32_t position, uint64_t seed) {
    const Words zero = {}, low = zero + 0xFFFFFFFFull;
    Words c0 = token_ids, c1 = zero + position, c2 = zero, c3 = zero;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const Words a = multiply_low(c0, 0xD2511F53u), b = multiply_low(c2, 0xCD9E8D57u);
        c0 = (b >> 32) ^ c1 ^ (uint64_t)k0;
        c1 = b & low;
        c2 = (a >> 32) ^ c3 ^ (uint64_t)k1;
        c3 = a & low;
    }
    return c0;
}

static inline void philox_16(const uint32_t* token_ids, uint32_t position, uint64_t seed, uint32_t* out) {
    Words early, late;
    for (int i = 0; i < 8; i++) early[i] = token_ids[i], late[i] = token_ids[8 + i];
    early = philox_8(early, position, seed);
    late = philox_8(late, position, seed);
    for (int i = 0; i < 8; i++) out[i] = (uint32_t)early[i], out[8 + i] = (uint32_t)late[i];
}

static inline double gumbel(uint32_t word) { return -log(-log(((double)word + 0.5) * 0x1p-32)); }

// Largest of n values; NaN if there is one among them.
static float largest(const float* values, int n) {
    F best = f_set(-INFINITY), sum = f_zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const F x = f_load(values + i);
        best = f_max(best, x);
        sum = sum + x * f_zero();  // NaN for NaN and for the infinities
    }
    float result = f_fold_max(best);
    bool is_odd = f_fold_sum(sum) != 0.0f;
    for (; i < n; i++) result = values[i] > result ? values[i] : result, is_odd |= !isfinite(values[i]);
    if (is_odd)
        for (i = 0; i < n; i++)
            if (isnan(values[i])) return NAN;
    return result;
}

// First index of the largest logit; -1 where that is not finite or NaN is among them.
static int32_t best_token(const float* logits, int n) {
    const float best = largest(logits, n);
    if (!isfinite(best)) return -1;
    int first = 0;
    for (; first + 16 <= n; first += 16)
        if (f_fold_max(f_load(logits + first)) == best) break;
    while (logits[first] != best) first++;
    return first;
}

// Indices that may have the largest noisy weight, ascending, the winner's surely; returns their number. `token_ids` may
// be null: the indices themselves. Weights of -inf never win. `favourite` is an index of large weight, or -1: its noisy
// value is a lead to begin with, which leaves most others without a chance.
static inline int noise_candidates(const float* weights, const int64_t* token_ids, int n, int favourite, uint64_t seed,
                                   uint32_t position, int32_t* out, double* noisy) {
    const double slack = 1e-6;    // wider than any two libraries' logarithms differ
    const float range = 22.9f;    // no noise is larger
    int count = 0;
    double lead = -INFINITY;
    const auto consider = [&](int i, uint32_t word) {
        const double x = (double)weights[i] + gumbel(word);
        if (x < lead - slack) return;
        lead = x > lead ? x : lead;
        out[count] = i, noisy[count++] = x;
    };
    const auto words_of = [&](int first, int lanes, uint32_t* words) {
        uint32_t ids[16] = {0};
        for (int i = 0; i < lanes; i++) ids[i] = (uint32_t)(token_ids ? token_ids[first + i] : first + i);
        philox_16(ids, position, seed, words);
    };
    if (favourite >= 0) {
        uint32_t words[16];
        words_of(favourite, 1, words);
        lead = (double)weights[favourite] + gumbel(words[0]);
    }
    for (int first = 0; first < n; first += 16) {
        const int lanes = n - first < 16 ? n - first : 16;
        F group = load_up_to(weights, first, n);
        if (lanes < 16) group = f_keep_lanes(group, 0, lanes, -INFINITY);
        if (f_fold_max(group) + range < (float)lead) continue;
        uint32_t words[16];
        words_of(first, lanes, words);
        float rest[16], most[16];  // 1 - u, and how large it may be; a thousandth more than rounding can take away
        for (int i = 0; i < 16; i++) rest[i] = ((float)~words[i] + 0.5f) * 0x1p-32f;
        const F ahead = group - f_set((float)lead);
        f_store(most, f_exp(f_zero() - f_max(f_zero(), f_zero() - ahead)) * f_set(1.001f));
        for (int i = 0; i < lanes; i++)
            if (rest[i] <= most[i] && weights[first + i] > -INFINITY) consider(first + i, words[i]);
    }
    int kept = 0;
    for (int i = 0; i < count; i++)
        if (noisy[i] >= lead - slack) out[kept++] = out[i];
    return kept;
}
