// Gumbel noise: a pure function of seed, position and token, with the same bits on every instruction set. A part of
// generic.h.
//
// A token's noise is -log(t) of the time t at which it arrives, when all tokens arrive at random with rate 1. Of the
// kRun tokens of a run the first arrives at an exponential time / kRun, each of them equally likely to be the one;
// every other arrives an exponential time later. So one number per run says how much noise its tokens can have.
// Exponential times are -log(u) of the uniform u = (word + 1/2) / 2^32, words those of Philox4x32-10 (Salmon et al.
// 2011) under the key `seed`: for token t word t % 4 of counter (t / 4, 0, position), for run r word 0 of counter
// (r, 1, position), whose word 1 modulo kRun says which token is first.
#pragma once

#include "vector.h"

inline void philox(uint64_t seed, int64_t position, WordRow c0, uint32_t kind, WordRow (&out)[4]) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    WordRow c1 = WordRow::set(kind), c2 = WordRow::set(static_cast<uint32_t>(position));
    WordRow c3 = WordRow::set(static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32));
    for (int i = 0; i < 10; ++i) {
        WordRow high0, low0, high1, low1;
        multiply(c0, 0xD2511F53u, high0, low0);
        multiply(c2, 0xCD9E8D57u, high1, low1);
        c0 = high1 ^ c1 ^ WordRow::set(k0);
        c1 = low1;
        c2 = high0 ^ c3 ^ WordRow::set(k1);
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

// x = 2^exponent * mantissa for normal x > 0, the mantissa around 1: from sqrt(1/2) to sqrt(2).
inline void split(Row x, Row& exponent, Row& mantissa) {
    const WordRow least = WordRow::set(0x3f3504f3u), bits = WordRow::bits_of(x) + WordRow::set(0u - 0x3f3504f3u);
    exponent = bits.shift<23>().to_float();
    mantissa = ((bits & WordRow::set(0x007fffffu)) + least).as_float();
}

// log(1 + z) for z in [-1/2, sqrt(2) - 1], with a small relative error for small z too: the series of
// 2 atanh(z / (z + 2)).
inline Row log_near_one(Row z) {
    const Row s = z / (z + Row::set(2.0f)), q = s * s;
    Row p = Row::set(2.0f / 13);
    p = fma(p, q, Row::set(2.0f / 11));
    p = fma(p, q, Row::set(2.0f / 9));
    p = fma(p, q, Row::set(2.0f / 7));
    p = fma(p, q, Row::set(2.0f / 5));
    p = fma(p, q, Row::set(2.0f / 3));
    p = fma(p, q, Row::set(2.0f));
    return s * p;
}

constexpr float kLn2 = 0.693147181f;

// -log(x) for normal x > 0.
inline Row minus_log(Row x) {
    Row exponent, mantissa;
    split(x, exponent, mantissa);
    return fma(exponent, Row::set(-kLn2), Row::set(0) - log_near_one(mantissa - Row::set(1)));
}

// -log(u). Where u is above a half, log(1 - (1 - u)) by the words' complement, of which no bit is lost.
inline Row exponential(WordRow words) {
    const WordRow above = words.shift<31>();
    const Row x = ((words ^ above).to_float() + Row::set(0.5f)) * Row::set(0x1p-32f);
    Row exponent, mantissa;
    split(x, exponent, mantissa);
    const WordRow below = WordRow::bits_of(mantissa - Row::set(1)), one_minus = WordRow::bits_of(Row::set(0) - x);
    const Row z = (below ^ ((below ^ one_minus) & above)).as_float();
    exponent = (WordRow::bits_of(exponent) & (above ^ WordRow::set(~0u))).as_float();
    return fma(exponent, Row::set(-kLn2), Row::set(0) - log_near_one(z));
}

// When the first tokens of runs arrive; `first` gets the words that say which they are.
inline Row first_arrivals(uint64_t seed, int64_t position, WordRow runs, WordRow& first) {
    WordRow words[4];
    philox(seed, position, runs, 1, words);
    first = words[1];
    return exponential(words[0]) * Row::set(1.0f / kRun);
}

void noise(uint64_t seed, int64_t position, const int32_t* tokens, int n, float* out) {
    static_assert(kRun == 64, "its logarithm is written below");
    for (int i = 0; i < n; i += kLanes) {
        uint32_t ids[kLanes] = {}, words[4][kLanes];
        __builtin_memcpy(ids, tokens + i, (n - i < kLanes ? n - i : kLanes) * sizeof(uint32_t));
        const WordRow id = WordRow::load(ids);
        WordRow first, block[4];
        const Row first_arrival = first_arrivals(seed, position, id.shift<6>(), first);
        philox(seed, position, id.shift<2>(), 0, block);
        for (int j = 0; j < 4; ++j) {
            block[j].store(words[j]);
        }
        for (int j = 0; j < kLanes; ++j) {
            ids[j] = words[ids[j] % 4][j];
        }
        // All bits where the token is not the first of its run.
        const WordRow other = (((id ^ first) & WordRow::set(kRun - 1)) + WordRow::set(0x7fffffffu)).shift<31>();
        const Row later = (WordRow::bits_of(exponential(WordRow::load(ids))) & other).as_float();
        store_first(minus_log(first_arrival + later), out + i, n - i);
    }
}

void run_noise(uint64_t seed, int64_t position, int n, float* most) {
    uint32_t lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        lanes[i] = static_cast<uint32_t>(i);
    }
    for (int i = 0; i < n; i += kLanes) {
        WordRow first;
        const WordRow runs = WordRow::load(lanes) + WordRow::set(static_cast<uint32_t>(i));
        // More than minus_log() errs by.
        (minus_log(first_arrivals(seed, position, runs, first)) + Row::set(1e-4f)).store(most + i);
    }
}
