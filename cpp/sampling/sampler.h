// The target's token at a position, and a draft's guesses at it: a pure function of logits, seed and position.
//
// A token is drawn by the Gumbel-max rule, argmax of log p + g, where the noise g(seed, position, token) is shared by
// every model and every node of the tree at that position (arXiv 2408.07978, 2506.05632). At temperature 0 there is no
// noise. Ties go to the lowest id.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "machine/math.h"
#include "machine/pool.h"
#include "sampling/logit_rules.h"

namespace pystaged {

// Applied in this order: rules, temperature, top-k, typical, top-p, min-p, XTC; as in llama.cpp but for the
// temperature, which comes first as in Hugging Face transformers, or last as there.
struct Sampling {
    float temperature = 0;  // 0 is greedy
    int top_k = 0;          // 0 keeps all
    float top_p = 1;        // keeps the fewest tokens that have at least this probability together
    float min_p = 0;        // keeps tokens at least this likely relative to the likeliest
    uint64_t seed = 0;
    float typical_p = 1;  // keeps the fewest tokens above this together, those first whose surprise is near the mean
    // With this probability, of the tokens that are at least as likely as the threshold only the least likely is kept.
    float xtc_probability = 0, xtc_threshold = 0.1f;
    bool temperature_last = false;
    std::shared_ptr<LogitRules> rules = nullptr;  // or none
    int logprobs = -1;  // of how many of the likeliest tokens verifying tells log-probabilities; -1 for none at all
};

// Throws std::invalid_argument, naming the field.
inline void check(const Sampling& s) {
    require(s.temperature >= 0 && !std::isinf(s.temperature), "temperature must be a number from 0 (greedy) up");
    require(s.top_k >= 0, "top_k must be 0 (off) or a positive number of tokens");
    require(s.top_p > 0 && s.top_p <= 1, "top_p must be above 0 and at most 1 (off)");
    require(s.min_p >= 0 && s.min_p < 1, "min_p must be at least 0 (off) and below 1");
    require(s.typical_p > 0 && s.typical_p <= 1, "typical_p must be above 0 and at most 1 (off)");
    require(s.xtc_probability >= 0 && s.xtc_probability <= 1, "xtc_probability must be between 0 (off) and 1");
    require(s.xtc_threshold >= 0 && s.xtc_threshold <= 1, "xtc_threshold must be between 0 and 1; above 0.5 it is off");
}

// Gumbel noise of one token, as kernels/noise.h defines it; within [-3.15, 27.04].
inline float gumbel(uint64_t seed, int64_t position, int32_t token) {
    static const Kernel& kernel = find_kernel("");
    float noise;
    kernel.noise(seed, position, &token, 1, &noise);
    return noise;
}

// The tokens that a row may be followed by, a bit each; those beyond the last word may not. Without words all may.
struct Mask {
    const uint32_t* words = nullptr;
    int num_words = 0;

    // The tokens of a run that it allows, the first in the lowest bit.
    uint64_t run_bits(int run, int size) const {
        static_assert(kRun == 64, "two words of a mask are one run");
        uint64_t bits = 0;
        for (int half = 0; half < 2; ++half) {
            if (2 * run + half < num_words) {
                bits |= uint64_t{words[2 * run + half]} << (32 * half);
            }
        }
        const int have = size - run * kRun;
        return have < kRun ? bits & ((uint64_t{1} << have) - 1) : bits;
    }
};

// Of several rows.
struct Masks {
    std::vector<uint32_t> words;  // [rows][num_words]
    int num_words = 0;

    Mask row(size_t i) const { return num_words > 0 ? Mask{&words[i * num_words], num_words} : Mask{}; }
};

// Throws std::invalid_argument where there are masks, but not one for each row that allows a token of the vocabulary.
inline void check(const Masks& masks, size_t num_rows, int vocab_size) {
    if (masks.num_words == 0) {
        return;
    }
    require(masks.words.size() == num_rows * masks.num_words, "masks needs one for each of the ", num_rows,
            " rows that are judged");
    for (size_t i = 0; i < num_rows; ++i) {
        const Mask mask = masks.row(i);
        bool any = false;
        for (int run = 0; run * kRun < vocab_size && !any; ++run) {
            any = mask.run_bits(run, vocab_size) != 0;
        }
        require(any, "the mask of row ", i, " allows no token");
    }
}

struct Candidate {
    int32_t token;
    float score;
};

class Sampler {
public:
    explicit Sampler(const Kernel& kernel) : kernel_(kernel), ruled_(kernel) {}

    // The row with -inf for what its mask forbids, before all else that the sampling does; until the next such call.
    LogitsRow masked(const LogitsRow& row, const Mask& mask) {
        if (mask.words == nullptr) {
            return row;
        }
        masked_logits_.resize(row.stride);
        masked_maxima_.resize(row.stride / kRun);
        for (int run = 0; run < row.stride / kRun; ++run) {
            const float* from = row.logits + run * kRun;
            float* to = masked_logits_.data() + run * kRun;
            uint64_t bits = run * kRun < row.size ? mask.run_bits(run, row.size) : 0;
            float top = kNothing;
            if (bits == ~uint64_t{0}) {
                std::copy_n(from, kRun, to);
                top = row.maxima[run];
            } else {
                std::fill_n(to, kRun, kNothing);
                for (int i = 0; bits != 0; ++i, bits >>= 1) {
                    if (bits & 1) {
                        to[i] = from[i];
                        top = std::max(top, from[i]);
                    }
                }
            }
            masked_maxima_[run] = top;
        }
        return {masked_logits_.data(), masked_maxima_.data(), row.size, row.stride};
    }
    // The token at `position`, given the logits of the row before it; the prefix is for rules. Inside a task of the
    // thread pool `num_threads` must be 1. -1 where rules and a mask exclude all tokens.
    int32_t choose(const Sampling& s, const LogitsRow& logits, int64_t position, int num_threads,
                   const Prefix& prefix = {}) {
        LogitsRow row = s.rules ? ruled_.apply(*s.rules, logits, prefix) : logits;
        if (s.rules && top_of(row) == kNothing) {
            return -1;
        }
        const Choice choice = narrow(s, row, position, num_threads);
        if (choice == Choice::likeliest) {
            const float* best = std::max_element(row.maxima, row.maxima + row.stride / kRun);
            const float* run = row.logits + (best - row.maxima) * kRun;
            return static_cast<int32_t>(
                std::min<std::ptrdiff_t>(std::find(run, run + kRun, *best) - row.logits, row.size - 1));
        }
        if (choice == Choice::all) {
            perturb_all(s, row, position, 1, top_of(row));
        } else {
            if (s.temperature > 0) {
                add_noise(s, position, 0);
            }
            keep_best(kept_, 1);
        }
        return kept_.empty() ? 0 : kept_.front().token;
    }
    // The k likeliest outcomes of choose() as this row sees it, best first: score is log p + g, or log p when greedy.
    // Fewer than k where filters or a mask leave fewer.
    const std::vector<Candidate>& candidates(const Sampling& s, const LogitsRow& logits, int64_t position, int k,
                                             int num_threads, const Prefix& prefix = {}) {
        LogitsRow row = s.rules ? ruled_.apply(*s.rules, logits, prefix) : logits;
        k = std::min(k, row.size);
        if (top_of(row) == kNothing) {  // masks may exclude all tokens of a cut head, rules all there are
            kept_.clear();
            return kept_;
        }
        const Choice choice = narrow(s, row, position, num_threads);
        float total = 0;
        if (choice == Choice::likeliest) {
            const float top = top_of(row);
            top_logits(row, k);
            scale(kept_, top, 1);
            total = static_cast<float>(own_log(sum_exp(row, top, 1, num_threads)));
        } else if (choice == Choice::all) {
            const float top = top_of(row);
            perturb_all(s, row, position, k, top);
            total = static_cast<float>(own_log(sum_exp(row, top, inverse(s.temperature), num_threads)));
        } else {
            total = log_total(kept_);
            if (s.temperature > 0) {
                add_noise(s, position, 0);
            }
            keep_best(kept_, static_cast<size_t>(k));
        }
        std::sort(kept_.begin(), kept_.end(), better);
        while (!kept_.empty() && std::isinf(kept_.back().score)) {
            kept_.pop_back();  // a tiny temperature made it so
        }
        for (Candidate& c : kept_) {
            c.score -= total;
        }
        return kept_;
    }
    // Log-probabilities as the row itself has them, of a token and then of the k likeliest, best first.
    const std::vector<Candidate>& log_probabilities(const LogitsRow& row, int32_t token, int k, int num_threads) {
        const float top = top_of(row), total = static_cast<float>(own_log(sum_exp(row, top, 1, num_threads)));
        kept_.clear();
        if (k > 0) {
            top_logits(row, std::min(k, row.size));
        }
        kept_.insert(kept_.begin(), {token, row.logits[token]});
        scale(kept_, top, 1);
        for (Candidate& c : kept_) {
            c.score -= total;
        }
        return kept_;
    }
    // The k largest logits, best first; ties by the lower id.
    const std::vector<Candidate>& largest(const LogitsRow& row, int k) {
        top_logits(row, std::min(k, row.size));
        return kept_;
    }

private:
    // Logits whose sum one thread takes at a time.
    static constexpr int kSumPart = 32 << 10;
    static constexpr float kNothing = -std::numeric_limits<float>::infinity();

    // The noise of this token, which no vocabulary has, is the coin of XTC.
    static constexpr int32_t kCoin = std::numeric_limits<int32_t>::max();

    static float top_of(const LogitsRow& row) { return *std::max_element(row.maxima, row.maxima + row.stride / kRun); }
    static bool better(const Candidate& a, const Candidate& b) {
        return a.score > b.score || (a.score == b.score && a.token < b.token);
    }
    // Logits relative to the largest, never NaN.
    static float relative(float logit, float top, float temperature) {
        return logit == top ? 0 : (logit - top) / temperature;
    }
    // Finite for the smallest temperature too.
    static float inverse(float temperature) { return std::min(1 / temperature, std::numeric_limits<float>::max()); }
    static void keep_best(std::vector<Candidate>& candidates, size_t k) {
        if (candidates.size() > k) {
            std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), better);
            candidates.resize(k);
        }
    }
    // kept = the logits from `least` on; what is masked is less than any.
    static void keep_from(const LogitsRow& row, float least, std::vector<Candidate>& kept) {
        least = std::max(least, std::numeric_limits<float>::lowest());
        kept.clear();
        for (int run = 0; run < row.stride / kRun; ++run) {
            if (row.maxima[run] >= least) {
                for (int i = run * kRun; i < std::min(row.size, (run + 1) * kRun); ++i) {
                    if (row.logits[i] >= least) {
                        kept.push_back({i, row.logits[i]});
                    }
                }
            }
        }
    }
    // The sum of exp(score).
    static double total_of(const std::vector<Candidate>& kept) {
        double total = 0;
        for (const Candidate& c : kept) {
            total += own_exp(c.score);
        }
        return total;
    }
    static float log_total(const std::vector<Candidate>& kept) { return static_cast<float>(own_log(total_of(kept))); }
    static void scale(std::vector<Candidate>& kept, float top, float temperature) {
        for (Candidate& c : kept) {
            c.score = relative(c.score, top, temperature);
        }
    }
    // Keeps the first whose probabilities add up to `goal`, at least one; returns whether they do.
    static bool keep_top(std::vector<Candidate>& kept, double goal) {
        double sum = 0;
        size_t n = 0;
        while (n < kept.size() && sum < goal) {
            sum += own_exp(kept[n++].score);
        }
        if (sum < goal) {
            return false;
        }
        kept.resize(std::max<size_t>(n, 1));
        return true;
    }
    // Keeps those whose surprise, -log p, is nearest to the mean of it, until they have more than this probability.
    static void keep_typical(std::vector<Candidate>& kept, float typical_p) {
        const double all = total_of(kept), log_all = own_log(all);
        double entropy = 0;
        for (const Candidate& c : kept) {
            if (c.score != kNothing) {
                entropy += own_exp(c.score) / all * (log_all - c.score);
            }
        }
        const auto oddity = [&](const Candidate& c) { return std::abs(log_all - c.score - entropy); };
        // A heap, because often a few are enough.
        const auto later = [&](const Candidate& a, const Candidate& b) {
            const double x = oddity(a), y = oddity(b);
            return x > y || (x == y && better(b, a));
        };
        std::make_heap(kept.begin(), kept.end(), later);
        auto end = kept.end();
        for (double sum = 0; end != kept.begin() && sum <= typical_p * all; --end) {
            std::pop_heap(kept.begin(), end, later);
            sum += own_exp((end - 1)->score);
        }
        kept.erase(kept.begin(), end);
        std::sort(kept.begin(), kept.end(), better);
    }
    // How many candidates, best first, XTC excludes.
    static size_t count_top(const std::vector<Candidate>& kept, float threshold, double total) {
        size_t n = 0;
        while (n + 1 < kept.size() && own_exp(kept[n + 1].score) >= threshold * total) {
            ++n;
        }
        return n;
    }

    // What there is to choose from: the likeliest token, all of them, or those in kept_.
    enum class Choice { likeliest, all, kept };

    // Applies temperature and filters: what is left is in kept_, with score (logit - top) / temperature, or in the row.
    Choice narrow(const Sampling& s, LogitsRow& row, int64_t position, int num_threads) {
        const bool greedy = s.temperature == 0;
        if (greedy && !s.temperature_last) {
            return Choice::likeliest;
        }
        const float temperature = s.temperature_last ? 1 : s.temperature;
        const bool exclude = excludes_top(s, position);
        if (s.top_k == 0 && s.top_p == 1 && s.min_p == 0 && s.typical_p == 1) {
            if (exclude) {
                row = without_top(s, row, temperature, num_threads);
            }
            return greedy ? Choice::likeliest : Choice::all;
        }
        if (greedy && !exclude && s.typical_p == 1) {
            return Choice::likeliest;  // which all other filters keep
        }
        filter(s, row, top_of(row), temperature, num_threads);
        if (exclude) {
            std::sort(kept_.begin(), kept_.end(), better);
            kept_.erase(kept_.begin(), kept_.begin() + count_top(kept_, s.xtc_threshold, total_of(kept_)));
        }
        if (s.temperature_last && !kept_.empty()) {
            scale(kept_, std::min_element(kept_.begin(), kept_.end(), better)->score, greedy ? 1 : s.temperature);
        }
        return Choice::kept;
    }
    // The coin of XTC: uniform, as -log(-log u) of it is Gumbel noise.
    bool excludes_top(const Sampling& s, int64_t position) const {
        if (s.xtc_probability == 0 || s.xtc_threshold > 0.5f) {
            return false;
        }
        float noise;
        kernel_.noise(s.seed, position, &kCoin, 1, &noise);
        return noise <= -own_log(-own_log(s.xtc_probability));
    }
    // The row as XTC leaves it.
    LogitsRow without_top(const Sampling& s, const LogitsRow& row, float temperature, int num_threads) {
        const float top = top_of(row), most = 1 / s.xtc_threshold;  // no more tokens can be as likely as that
        top_logits(row, most < static_cast<float>(row.size - 2) ? static_cast<int>(most) + 2 : row.size);
        scale(kept_, top, temperature);
        kept_.resize(count_top(kept_, s.xtc_threshold, sum_exp(row, top, inverse(temperature), num_threads)));
        tokens_.clear();
        for (const Candidate& c : kept_) {
            tokens_.push_back(c.token);
        }
        return tokens_.empty() ? row : ruled_.exclude(row, tokens_);
    }
    // kept_ = the k largest logits, best first.
    void top_logits(const LogitsRow& row, int k) {
        const int num_runs = row.stride / kRun;
        float least = std::numeric_limits<float>::lowest();
        if (k < num_runs) {
            // k runs reach this, so at least k logits do.
            run_maxima_.assign(row.maxima, row.maxima + num_runs);
            std::nth_element(run_maxima_.begin(), run_maxima_.begin() + (k - 1), run_maxima_.end(), std::greater());
            least = run_maxima_[k - 1];
        }
        keep_from(row, least, kept_);
        keep_best(kept_, static_cast<size_t>(k));
        std::sort(kept_.begin(), kept_.end(), better);
    }
    // kept_ = what the filters but XTC leave, score = (logit - top) / temperature.
    void filter(const Sampling& s, const LogitsRow& row, float top, float temperature, int num_threads) {
        const int all = row.size;
        int k = s.top_k > 0 ? std::min(s.top_k, all) : all;
        if (s.typical_p < 1) {
            if (k < all) {
                top_logits(row, k);
            } else {
                keep_from(row, std::numeric_limits<float>::lowest(), kept_);
            }
            scale(kept_, top, temperature);
            keep_typical(kept_, s.typical_p);
            if (s.top_p < 1) {
                keep_top(kept_, s.top_p * total_of(kept_));
            }
        } else if (s.top_p < 1) {
            double total = -1;
            if (s.top_k == 0) {
                total = sum_exp(row, top, inverse(temperature), num_threads);
            }
            // Usually a few tokens are enough; look further only when they are not.
            for (int guess = std::min(k, 128);; guess = std::min(k, guess * 8)) {
                top_logits(row, guess);
                scale(kept_, top, temperature);
                if (s.top_k > 0 && guess < k) {
                    continue;
                }
                if (keep_top(kept_, s.top_p * (total >= 0 ? total : own_exp(log_total(kept_)))) || guess == k) {
                    break;
                }
            }
        } else if (s.top_k == 0) {
            // Only min-p is on: its threshold is known beforehand.
            keep_from(row, top + temperature * static_cast<float>(own_log(s.min_p)), kept_);
            scale(kept_, top, temperature);
            return;
        } else {
            top_logits(row, k);
            scale(kept_, top, temperature);
        }
        if (s.min_p > 0 && !kept_.empty()) {
            const float least = kept_.front().score + static_cast<float>(own_log(s.min_p));
            std::erase_if(kept_, [&](const Candidate& c) { return c.score < least; });
        }
    }
    // Adds noise to kept_ from `first` on.
    void add_noise(const Sampling& s, int64_t position, size_t first) {
        tokens_.clear();
        for (size_t i = first; i < kept_.size(); ++i) {
            tokens_.push_back(kept_[i].token);
        }
        noise_.resize(tokens_.size());
        kernel_.noise(s.seed, position, tokens_.data(), static_cast<int>(tokens_.size()), noise_.data());
        for (size_t i = first; i < kept_.size(); ++i) {
            kept_[i].score += noise_[i - first];
        }
    }
    // kept_ = the k best of the whole vocabulary, score = (logit - top) / temperature + noise. Runs are visited from
    // the one that may hold the best, until none can hold one that is kept: for one token about as many as a run has
    // tokens at most, whatever the logits are.
    void perturb_all(const Sampling& s, const LogitsRow& row, int64_t position, int k, float top) {
        const auto scaled = [&](float logit) { return relative(logit, top, s.temperature); };
        const int num_runs = row.stride / kRun;
        run_noise_.resize(padded(num_runs, kLanes));
        kernel_.run_noise(s.seed, position, static_cast<int>(run_noise_.size()), run_noise_.data());
        bounds_.assign(padded(num_runs, kRun), kNothing);
        for (int run = 0; run < num_runs; ++run) {
            bounds_[run] = scaled(row.maxima[run]) + run_noise_[run];
        }
        tops_.resize(bounds_.size() / kRun);
        kernel_.run_max(bounds_.data(), static_cast<int>(bounds_.size()), tops_.data());
        kept_.clear();
        float least = std::numeric_limits<float>::lowest();  // score of the k-th best so far
        for (int visited = 0; visited < num_runs; ++visited) {
            const auto best = std::max_element(tops_.begin(), tops_.end());
            float* bounds = &bounds_[(best - tops_.begin()) * kRun];
            float* bound = std::max_element(bounds, bounds + kRun);
            if (*bound == kNothing || *bound < least) {
                break;
            }
            const int run = static_cast<int>(bound - bounds_.data());
            *bound = kNothing;
            kernel_.run_max(bounds, kRun, &*best);
            const size_t before = kept_.size();
            for (int i = run * kRun; i < std::min(row.size, (run + 1) * kRun); ++i) {
                const float score = scaled(row.logits[i]);
                if (score + run_noise_[run] >= least) {
                    kept_.push_back({i, score});
                }
            }
            add_noise(s, position, before);
            if (kept_.size() >= static_cast<size_t>(k)) {
                keep_best(kept_, static_cast<size_t>(k));
                least = std::max_element(kept_.begin(), kept_.end(), better)->score;
            }
        }
    }
    // The sum of exp((logit - top) * factor), by the same parts whoever takes them.
    double sum_exp(const LogitsRow& row, float top, float factor, int num_threads) {
        const int parts = (row.stride + kSumPart - 1) / kSumPart;
        sums_.resize(parts);
        ThreadPool::shared().run(parts, num_threads, [&](int i, int) {
            const int first = i * kSumPart;
            sums_[i] = kernel_.sum_exp(row.logits + first, std::min(kSumPart, row.stride - first), top, factor);
        });
        return std::accumulate(sums_.begin(), sums_.end(), 0.0);
    }

    const Kernel& kernel_;
    RuledRow ruled_;
    Lines<float> masked_logits_, masked_maxima_;
    std::vector<Candidate> kept_;  // score is the logit, then (logit - top) / temperature, then with noise
    std::vector<float> run_maxima_;
    std::vector<float> run_noise_;      // the most that a run's tokens have
    std::vector<float> bounds_, tops_;  // of the scores of each run's tokens, and their maxima by kRun
    std::vector<int32_t> tokens_;
    std::vector<float> noise_;  // theirs
    std::vector<double> sums_;
};

}  // namespace pystaged
