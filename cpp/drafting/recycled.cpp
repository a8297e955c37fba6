#include "drafting/recycled.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "error.h"
#include "machine/math.h"

namespace pystaged {
constexpr float kNewWeight = 0.35f;  // of what is seen beside what was known
constexpr float kPairWeight = 0.7f;  // of a pair's candidates beside its last token's
constexpr int64_t kPairOffset = 2;   // added to a pair's first token, -1 for none: pairs' keys are above all tokens'
constexpr uint64_t kFibonacci = 0x9E3779B97F4A7C15ull;  // Fibonacci hashing: the slot is the product's upper bits
constexpr int kKept = RecycledCandidates::num_candidates;

RecycledCandidates::RecycledCandidates(size_t slots) : num_token_slots_(slots / 2) {
    require(slots >= 2 && slots <= size_t{1} << 30 && std::has_single_bit(slots),
            "slots must be a power of two, 2 to 2**30");
    shift_ = std::countl_zero(uint64_t{slots}) + 1;
    Entry none;
    none.tokens.fill(-1);
    none.chances.fill(0);
    slots_.assign(slots + slots / 2, none);
}

int64_t RecycledCandidates::key_of(int32_t before, int32_t token) {
    return (int64_t{before} + kPairOffset) << 32 | static_cast<uint32_t>(token);
}

size_t RecycledCandidates::slot_of(int64_t key) const {
    if (key < int64_t{1} << 32) {
        return static_cast<size_t>(key) & (num_token_slots_ - 1);
    }
    return num_token_slots_ + static_cast<size_t>(static_cast<uint64_t>(key) * kFibonacci >> shift_);
}

const RecycledCandidates::Entry* RecycledCandidates::find(int64_t key) const {
    const Entry& found = slots_[slot_of(key)];
    return found.key == key && key >= 0 ? &found : nullptr;
}

RecycledCandidates::Known RecycledCandidates::chances(int32_t before, int32_t token) const {
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

void RecycledCandidates::learn(size_t n, const int32_t* before, const int32_t* tokens, int k, const int32_t* candidates,
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

void RecycledCandidates::blend(int64_t key, int k, const int32_t* candidates, const float* chances) {
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
    size = std::min(size, kKept);
    float sum = 0;
    for (int j = 0; j < size; ++j) {
        sum += mixed[j].first;
    }
    entry.key = key;
    for (int j = 0; j < kKept; ++j) {
        const float chance = j < size ? mixed[j].first / sum : 0;
        entry.chances[j] = chance;
        entry.tokens[j] = chance > 0 ? mixed[j].second : -1;
    }
}

void RecycledCandidates::restore(std::vector<Entry> entries) {
    for (Entry& entry : entries) {
        float sum = 0, least = 0;
        for (int j = 0; j < kKept; ++j) {
            entry.chances[j] = entry.tokens[j] < 0 ? 0 : entry.chances[j];
            sum += entry.chances[j];
            least = std::min(least, entry.chances[j]);
        }
        require(entry.key >= 0 && least >= 0 && sum > 0 && std::isfinite(sum),
                "an entry needs a key and chances that are not negative, and candidates");
        for (int j = 0; j < kKept; ++j) {
            // Chances that were too small for how they were kept are 0.
            entry.chances[j] /= sum;
            entry.tokens[j] = entry.chances[j] > 0 ? entry.tokens[j] : -1;
        }
    }
    for (const Entry& entry : entries) {
        slots_[slot_of(entry.key)] = entry;
    }
}

}  // namespace pystaged
