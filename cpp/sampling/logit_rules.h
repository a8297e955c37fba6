// What is done to the logits of a position before its token is chosen: a pure function of them and of the text so far.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/kernel.h"

namespace pystaged {

// One row of logits with the maximum of each run.
struct LogitsRow {
    const float* logits = nullptr;  // [stride], -inf past `size`
    const float* maxima = nullptr;  // [stride / kRun]
    int size = 0;
    int stride = 0;
};

// The tokens before a position: a text's, then those of a path below it.
struct Prefix {
    const int32_t* text = nullptr;
    size_t length = 0;
    std::vector<int32_t> path;  // the last token first

    size_t size() const { return length + path.size(); }
    // The i-th token from the end.
    int32_t last(size_t i) const { return i < path.size() ? path[i] : text[length - 1 - (i - path.size())]; }
};

// Applied in the order of the fields, as in llama.cpp, which counts the tokens of the prompt too.
struct LogitRules {
    std::vector<std::pair<int32_t, float>> bias;  // added to logits; -inf excludes a token
    std::vector<int32_t> end_tokens;              // excluded while the text has fewer than `min_length` tokens
    int64_t min_length = 0;

    // For tokens among the last `repeat_last_n`, 0 for none, -1 for the whole text. Positive logits are divided by
    // the first, others multiplied; then each loses presence + count * frequency.
    float repeat_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    int repeat_last_n = 64;

    // DRY: what would make n tokens at the end of the text a repetition of earlier ones loses
    // multiplier * base^(n - allowed_length), from n = allowed_length on. No repetition goes beyond a breaker.
    float dry_multiplier = 0, dry_base = 1.75f;
    int dry_allowed_length = 2, dry_last_n = -1;
    std::unordered_multimap<int32_t, std::vector<int32_t>> dry_breakers;  // the first token, and those after it
};

// Throws std::invalid_argument, naming the field.
void check(const LogitRules& rules);

// A row under rules, with the memory that takes.
class RuledRow {
public:
    explicit RuledRow(const Kernel& kernel) : kernel_(kernel) {}

    // The logits after `prefix`; until the next call. None is above 1e30, and none but those excluded is below -1e30.
    LogitsRow apply(const LogitRules& rules, const LogitsRow& row, const Prefix& prefix);
    // The same without some tokens; `row` may be what one of these calls gave.
    LogitsRow exclude(const LogitsRow& row, const std::vector<int32_t>& tokens);

private:
    LogitsRow copy(const LogitsRow& row);
    void change(int32_t token, float logit);
    LogitsRow changed();
    void penalize(const LogitRules& rules, const Prefix& prefix);
    void penalize_repetitions(const LogitRules& rules, const Prefix& prefix);
    int repetition_limit(const LogitRules& rules, int length) const;

    const Kernel& kernel_;
    std::vector<float> logits_, maxima_;
    int size_ = 0;
    std::vector<int> runs_;         // that are changed
    std::vector<bool> is_changed_;  // by run
    std::vector<int> counts_;       // by token, of those that `seen_` holds; else 0
    std::vector<int32_t> seen_;
    std::vector<int32_t> recent_;  // the last tokens, the last one first
    std::vector<int> common_;      // how many of them equal those from each of them on
};

}  // namespace pystaged
