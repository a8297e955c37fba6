// Recycled candidates: what a target found likeliest after a token, and after a pair of tokens, in earlier passes.
//
// Each row of a verified tree, rejected ones included, has the target's prediction after it, from which later trees are
// drafted ("Turning Trash into Treasure", Luo et al. 2024, arXiv 2408.08696). Here candidates keep their probabilities,
// which are mixed with those of n-grams and ranked under the shared noise.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "error.h"
#include "machine/math.h"

namespace pystaged {

// Two direct-mapped tables, one of tokens and one of pairs, shared by all texts of a model. All memory is allocated at
// once, because slow growth would look like a leak.
class RecycledCandidates {
public:
    static constexpr int num_candidates = 16;  // of a token or a pair

    // Candidates with their chances, which sum to 1, best first; those of chance 0 are none.
    struct Entry {
        int64_t key = -1;  // -1 for a free slot
        std::array<int32_t, num_candidates> tokens;
        std::array<float, num_candidates> chances;
    };

    // Room for so many pairs, a power of two, and half as many tokens.
    explicit RecycledCandidates(size_t slots) : num_token_slots_(slots / 2) {
        require(slots >= 2 && slots <= size_t{1} << 30 && std::has_single_bit(slots),
                "slots must be a power of two, 2 to 2**30");
        shift_ = std::countl_zero(uint64_t{slots}) + 1;
        Entry none;
        none.tokens.fill(-1);
        none.chances.fill(0);
        slots_.assign(slots + slots / 2, none);
    }

    // Takes in n verified rows. Where rows of one call have the same slot, the first one gets it, which is the nearest
    // to the root; a later call's row takes it over. before: the token before each row's, -1 for none; tokens: each
    // row's own; candidates, logits: [n][k], the tokens of the largest logits after each row, best first. Throws
    // std::invalid_argument for tokens that are negative, and for more candidates than are kept.
    void learn(size_t n, const int32_t* before, const int32_t* tokens, int k, const int32_t* candidates,
               const float* logits) {
        require(k >= 1 && k <= kKept, "there must be 1 to ", kKept, " candidates of a row, not ", k);
        for (size_t i = 0; i < n; ++i) {
            require(tokens[i] >= 0 && before[i] >= -1 && before[i] < INT32_MAX,
                    "a token must not be negative, nor one before it below -1 or above all others");
        }
        std::vector<size_t> taken;
        std::array<float, kKept> chances;
        for (size_t i = 0; i < n; ++i) {
            const float* row = logits + i * k;
            float sum = 0;
            for (int j = 0; j < k; ++j) {
                chances[j] = static_cast<float>(own_exp(row[j] - row[0]));
                sum += chances[j];
            }
            if (!std::isfinite(sum)) {
                continue;  // weights that overflow
            }
            for (int j = 0; j < k; ++j) {
                chances[j] /= sum;
            }
            for (const int64_t key : {int64_t{tokens[i]}, key_of(before[i], tokens[i])}) {
                const size_t slot = slot_of(key);
                if (std::ranges::find(taken, slot) == taken.end()) {
                    taken.push_back(slot);
                    blend(key, k, candidates + i * k, chances.data());
                }
            }
        }
        num_learnt_ += static_cast<int64_t>(n);
    }
    // Rows that were learnt.
    int64_t num_learnt() const { return num_learnt_; }

    // The chance of each candidate after two tokens (`before` is -1 for none), and after how many of them it is known.
    struct Known {
        std::vector<std::pair<int32_t, float>> chances;
        int num_tokens = 0;
    };
    Known chances(int32_t before, int32_t token) const {
        if (token < 0 || before < -1) {
            return {};
        }
        const Entry* const single = find(token);
        const Entry* const pair = find(key_of(before, token));
        Known known{{}, pair ? 2 : single ? 1 : 0};
        const auto add = [&](const Entry* entry, float weight) {
            for (int j = 0; entry && j < kKept; ++j) {
                const int32_t candidate = entry->tokens[j];
                if (candidate < 0) {
                    continue;
                }
                const auto same = std::ranges::find(known.chances, candidate, &std::pair<int32_t, float>::first);
                if (same != known.chances.end()) {
                    same->second += weight * entry->chances[j];
                } else {
                    known.chances.emplace_back(candidate, weight * entry->chances[j]);
                }
            }
        };
        add(single, pair ? 1 - kPairWeight : 1);
        add(pair, single ? kPairWeight : 1);
        return known;
    }

    const std::vector<Entry>& slots() const { return slots_; }
    // Takes in entries that another one had. Throws std::invalid_argument, and takes in none, for a negative key or
    // chance, or where the chances of an entry's candidates sum to nothing.
    void restore(std::vector<Entry> entries) {
        for (Entry& entry : entries) {
            for (int j = 0; j < kKept; ++j) {
                entry.chances[j] = entry.tokens[j] < 0 ? 0 : entry.chances[j];
            }
            const float least = *std::ranges::min_element(entry.chances), sum = normalize(entry);
            require(entry.key >= 0 && least >= 0 && sum > 0 && std::isfinite(sum),
                    "an entry needs a key and chances that are not negative, and candidates");
        }
        for (const Entry& entry : entries) {
            slots_[slot_of(entry.key)] = entry;
        }
    }

private:
    static constexpr float kNewWeight = 0.35f;  // of what is seen beside what was known
    static constexpr float kPairWeight = 0.7f;  // of a pair's candidates beside its last token's
    // Added to a pair's first token, -1 for none: pairs' keys are above all tokens'.
    static constexpr int64_t kPairOffset = 2;
    static constexpr uint64_t kFibonacci = 0x9E3779B97F4A7C15ull;  // Fibonacci hashing: the product's upper bits
    static constexpr int kKept = num_candidates;

    // Of a token alone it is the token.
    static int64_t key_of(int32_t before, int32_t token) {
        return (int64_t{before} + kPairOffset) << 32 | static_cast<uint32_t>(token);
    }
    size_t slot_of(int64_t key) const {
        if (key < int64_t{1} << 32) {
            return static_cast<size_t>(key) & (num_token_slots_ - 1);
        }
        return num_token_slots_ + static_cast<size_t>(static_cast<uint64_t>(key) * kFibonacci >> shift_);
    }
    const Entry* find(int64_t key) const {
        const Entry& found = slots_[slot_of(key)];
        return found.key == key && key >= 0 ? &found : nullptr;
    }
    void blend(int64_t key, int k, const int32_t* candidates, const float* chances) {
        Entry& entry = slots_[slot_of(key)];
        std::array<std::pair<float, int32_t>, 2 * kKept> mixed;
        int size = 0;
        for (int j = 0; j < k; ++j) {
            mixed[size++] = {kNewWeight * chances[j], candidates[j]};
        }
        for (int j = 0; entry.key == key && j < kKept; ++j) {
            const auto same = std::find(candidates, candidates + k, entry.tokens[j]);
            const float old = (1 - kNewWeight) * entry.chances[j];
            if (same != candidates + k) {
                mixed[same - candidates].first += old;
            } else {
                mixed[size++] = {old, entry.tokens[j]};
            }
        }
        std::stable_sort(mixed.begin(), mixed.begin() + size,
                         [](const auto& a, const auto& b) { return a.first > b.first; });
        entry.key = key;
        for (int j = 0; j < kKept; ++j) {
            std::tie(entry.chances[j], entry.tokens[j]) = j < size ? mixed[j] : std::pair(0.0f, -1);
        }
        normalize(entry);
    }
    // Makes the chances sum to 1, and returns what they summed to. Those too small for how they were kept are none.
    static float normalize(Entry& entry) {
        const float sum = std::accumulate(entry.chances.begin(), entry.chances.end(), 0.0f);
        for (int j = 0; j < kKept; ++j) {
            entry.chances[j] /= sum;
            entry.tokens[j] = entry.chances[j] > 0 ? entry.tokens[j] : -1;
        }
        return sum;
    }

    size_t num_token_slots_;
    int shift_;
    int64_t num_learnt_ = 0;
    std::vector<Entry> slots_;  // those of tokens first
};

}  // namespace pystaged
