// Recycled candidates: what a target found likeliest after a token, and after a pair of tokens, in earlier passes.
//
// Each row of a verified tree, rejected ones included, has the target's prediction after it, from which later trees are
// drafted ("Turning Trash into Treasure", Luo et al. 2024, arXiv 2408.08696). Here candidates keep their probabilities,
// which are mixed with those of n-grams and ranked under the shared noise.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

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
    explicit RecycledCandidates(size_t slots);

    // Takes in n verified rows. Where rows of one call have the same slot, the first one gets it, which is the nearest
    // to the root; a later call's row takes it over. before: the token before each row's, -1 for none; tokens: each
    // row's own; candidates, logits: [n][k], the tokens of the largest logits after each row, best first. Throws
    // std::invalid_argument for tokens that are negative, and for more candidates than are kept.
    void learn(size_t n, const int32_t* before, const int32_t* tokens, int k, const int32_t* candidates,
               const float* logits);
    // Rows that were learnt.
    int64_t num_learnt() const { return num_learnt_; }

    // The chance of each candidate after two tokens (`before` is -1 for none), and after how many of them it is known.
    struct Known {
        std::vector<std::pair<int32_t, float>> chances;
        int num_tokens = 0;
    };
    Known chances(int32_t before, int32_t token) const;

    const std::vector<Entry>& slots() const { return slots_; }
    // Takes in entries that another one had. Throws std::invalid_argument, and takes in none, for a negative key or
    // chance, or where the chances of an entry's candidates sum to nothing.
    void restore(std::vector<Entry> entries);

private:
    static int64_t key_of(int32_t before, int32_t token);  // of a token alone it is the token

    size_t slot_of(int64_t key) const;
    const Entry* find(int64_t key) const;
    void blend(int64_t key, int k, const int32_t* candidates, const float* chances);

    size_t num_token_slots_;
    int shift_;
    int64_t num_learnt_ = 0;
    std::vector<Entry> slots_;  // those of tokens first
};

}  // namespace pystaged
