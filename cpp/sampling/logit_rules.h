// What is done to the logits of a position before its token is chosen: a pure function of them and of the text so far.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "error.h"
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
    // The last of them, -1 for all.
    size_t window(int last_n) const { return last_n < 0 ? size() : std::min(size(), static_cast<size_t>(last_n)); }
    // The i-th token from the end.
    int32_t last(size_t i) const { return i < path.size() ? path[i] : text[length - 1 - (i - path.size())]; }
};

// Applied in the order of the fields, as in llama.cpp, which counts the tokens of the prompt too.
struct LogitRules {
    static constexpr float kExcluded = -std::numeric_limits<float>::infinity();
    // What no rule but exclusion leads beyond, so that no arithmetic on logits is undefined.
    static constexpr float kMost = 1e30f;

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
    std::vector<std::vector<int32_t>> dry_breakers;  // sorted by check()

    // Those that begin with a token.
    auto breakers_from(int32_t token) const {
        return std::ranges::equal_range(dry_breakers, token, {}, [](const auto& breaker) { return breaker[0]; });
    }
};

// Throws std::invalid_argument, naming the field.
inline void check(LogitRules& r) {
    const auto is_bias = [](const auto& each) {
        return each.first >= 0 && !std::isnan(each.second) && each.second <= LogitRules::kMost;
    };
    require(std::ranges::all_of(r.bias, is_bias), "logit_bias must be finite numbers, or -inf to exclude a token");
    require(std::ranges::none_of(r.end_tokens, [](int32_t token) { return token < 0; }),
            "end_tokens must be tokens, which are numbers from 0 up");
    require(r.repeat_penalty > 0 && !std::isinf(r.repeat_penalty), "repeat_penalty must be above 0; 1 is off");
    require(std::isfinite(r.presence_penalty), "presence_penalty must be a number; 0 is off");
    require(std::isfinite(r.frequency_penalty), "frequency_penalty must be a number; 0 is off");
    require(r.repeat_last_n >= -1, "repeat_last_n must be a number of tokens, or -1 for the whole text");
    require(r.dry_multiplier >= 0 && !std::isinf(r.dry_multiplier), "dry_multiplier must be at least 0 (off)");
    require(r.dry_base >= 1 && !std::isinf(r.dry_base), "dry_base must be at least 1");
    require(r.dry_allowed_length >= 0, "dry_allowed_length must be at least 0");
    require(r.dry_last_n >= -1, "dry_penalty_last_n must be a number of tokens, or -1 for the whole text");
    std::ranges::sort(r.dry_breakers);
    require(r.dry_breakers.empty() || !r.dry_breakers[0].empty(), "a breaker of dry_breakers has no tokens");
}

// A row under rules, with the memory that takes.
class RuledRow {
public:
    explicit RuledRow(const Kernel& kernel) : kernel_(kernel) {}

    // The logits after `prefix`; until the next call. None is above 1e30, and none but those excluded is below -1e30.
    LogitsRow apply(const LogitRules& rules, const LogitsRow& row, const Prefix& prefix) {
        copy(row);
        for (const auto& [token, bias] : rules.bias) {
            if (token < size_) {
                change(token, logits_[token] + bias);
            }
        }
        if (static_cast<int64_t>(prefix.size()) < rules.min_length) {
            for (const int32_t token : rules.end_tokens) {
                if (token < size_) {
                    change(token, kExcluded);
                }
            }
        }
        if (rules.repeat_penalty != 1 || rules.presence_penalty != 0 || rules.frequency_penalty != 0) {
            penalize(rules, prefix);
        }
        if (rules.dry_multiplier > 0 && rules.dry_last_n != 0) {
            penalize_repetitions(rules, prefix);
        }
        return changed();
    }
    // The same without some tokens; `row` may be what one of these calls gave.
    LogitsRow exclude(const LogitsRow& row, const std::vector<int32_t>& tokens) {
        if (row.logits != logits_.data()) {
            copy(row);
        }
        for (const int32_t token : tokens) {
            change(token, kExcluded);
        }
        return changed();
    }

private:
    static constexpr float kExcluded = LogitRules::kExcluded, kMost = LogitRules::kMost;

    void copy(const LogitsRow& row) {
        logits_.assign(row.logits, row.logits + row.stride);
        maxima_.assign(row.maxima, row.maxima + row.stride / kRun);
        is_changed_.assign(maxima_.size(), false);
        size_ = row.size;
    }
    void change(int32_t token, float logit) {
        logits_[token] = logit == kExcluded ? kExcluded : std::clamp(logit, -kMost, kMost);
        const int run = token / kRun;
        if (!is_changed_[run]) {
            is_changed_[run] = true;
            runs_.push_back(run);
        }
    }
    LogitsRow changed() {
        for (const int run : runs_) {
            kernel_.run_max(&logits_[size_t(run) * kRun], kRun, &maxima_[run]);
            is_changed_[run] = false;
        }
        runs_.clear();
        return {logits_.data(), maxima_.data(), size_, static_cast<int>(logits_.size())};
    }
    void penalize(const LogitRules& rules, const Prefix& prefix) {
        counts_.resize(logits_.size());
        const size_t length = prefix.window(rules.repeat_last_n);
        for (size_t i = 0; i < length; ++i) {
            const int32_t token = prefix.last(i);
            if (token < size_ && counts_[token]++ == 0) {
                seen_.push_back(token);
            }
        }
        for (const int32_t token : seen_) {
            const int count = std::exchange(counts_[token], 0);
            const float logit = logits_[token];
            if (logit != kExcluded) {
                const float scaled = logit <= 0 ? logit * rules.repeat_penalty : logit / rules.repeat_penalty;
                const float lost = static_cast<float>(count) * rules.frequency_penalty + rules.presence_penalty;
                change(token, std::clamp(scaled, -kMost, kMost) - std::clamp(lost, -kMost, kMost));
            }
        }
        seen_.clear();
    }
    void penalize_repetitions(const LogitRules& rules, const Prefix& prefix) {
        const int n = static_cast<int>(prefix.window(rules.dry_last_n));
        if (n <= rules.dry_allowed_length) {
            return;
        }
        recent_.resize(n);
        for (int i = 0; i < n; ++i) {
            recent_[i] = prefix.last(i);
        }
        const int limit = repetition_limit(rules, n);
        if (limit < rules.dry_allowed_length) {
            return;
        }
        // The Z algorithm: common_[k] is how many of the first tokens equal those from k on.
        common_.assign(n, 0);
        counts_.resize(logits_.size());
        for (int k = 1, left = 0, right = 0; k < n; ++k) {
            int same = k < right ? std::min(right - k, common_[k - left]) : 0;
            while (k + same < n && recent_[same] == recent_[k + same]) {
                ++same;
            }
            common_[k] = same;
            if (k + same > right) {
                left = k;
                right = k + same;
            }
            // The token that came next would make the repetition longer.
            const int32_t token = recent_[k - 1];
            const int length = std::min(same, limit);
            if (length >= rules.dry_allowed_length && token < size_) {
                if (counts_[token] == 0) {
                    seen_.push_back(token);
                }
                counts_[token] = std::max(counts_[token], length + 1);
            }
        }
        for (const int32_t token : seen_) {
            const int length = std::exchange(counts_[token], 0) - 1;
            const auto is_alone = [](const auto& breaker) { return breaker.size() == 1; };
            if (std::ranges::none_of(rules.breakers_from(token), is_alone) && logits_[token] != kExcluded) {
                // Multiplied up, because the C library's pow is not the same everywhere.
                double lost = rules.dry_multiplier;
                for (int i = rules.dry_allowed_length; i < length && lost < kMost && rules.dry_base > 1; ++i) {
                    lost *= rules.dry_base;
                }
                change(token, logits_[token] - static_cast<float>(std::min<double>(lost, kMost)));
            }
        }
        seen_.clear();
    }
    // How many tokens at the end of recent_ come after the last breaker.
    int repetition_limit(const LogitRules& rules, int length) const {
        for (int i = 0; i < length; ++i) {
            int longest = -1;
            for (const std::vector<int32_t>& breaker : rules.breakers_from(recent_[i])) {
                const int n = static_cast<int>(breaker.size()) - 1;
                bool stands = n > longest && n <= i;
                for (int j = 1; stands && j <= n; ++j) {
                    stands = breaker[j] == recent_[i - j];
                }
                longest = stands ? n : longest;
            }
            if (longest >= 0) {
                return i - longest;
            }
        }
        return length;
    }

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
