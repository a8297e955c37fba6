#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace pystaged {

namespace {

// Logits whose sum one thread takes at a time.
constexpr int kSumPart = 32 << 10;

bool better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

// Logits relative to the largest, never NaN.
float relative(float logit, float top, float temperature) {
    return logit == top ? 0 : (logit - top) / temperature;
}

// Finite for the smallest temperature too.
float inverse(float temperature) {
    return std::min(1 / temperature, std::numeric_limits<float>::max());
}

// The tokens of a run that a mask allows, the first in the lowest bit.
uint64_t run_bits(const Mask& mask, int run, int size) {
    static_assert(kRun == 64, "two words of a mask are one run");
    uint64_t bits = 0;
    for (int half = 0; half < 2; ++half) {
        if (2 * run + half < mask.num_words) {
            bits |= uint64_t{mask.words[2 * run + half]} << (32 * half);
        }
    }
    const int have = size - run * kRun;
    return have < kRun ? bits & ((uint64_t{1} << have) - 1) : bits;
}

void keep_best(std::vector<Candidate>& candidates, size_t k) {
    if (candidates.size() > k) {
        std::nth_element(candidates.begin(), candidates.begin() + k, candidates.end(), better);
        candidates.resize(k);
    }
}

}  // namespace

void check(const Sampling& s) {
    const auto refuse = [](const char* what) { throw std::invalid_argument(what); };
    if (!(s.temperature >= 0) || std::isinf(s.temperature)) {
        refuse("temperature must be a number from 0 (greedy) up");
    }
    if (s.top_k < 0) {
        refuse("top_k must be 0 (off) or a positive number of tokens");
    }
    if (!(s.top_p > 0 && s.top_p <= 1)) {
        refuse("top_p must be above 0 and at most 1 (off)");
    }
    if (!(s.min_p >= 0 && s.min_p < 1)) {
        refuse("min_p must be at least 0 (off) and below 1");
    }
}

void check(const Masks& masks, size_t num_rows, int vocab_size) {
    if (masks.num_words == 0) {
        return;
    }
    if (masks.words.size() != num_rows * masks.num_words) {
        throw std::invalid_argument("masks needs one for each of the " + std::to_string(num_rows) +
                                    " rows that are judged");
    }
    for (size_t i = 0; i < num_rows; ++i) {
        const Mask mask = masks.row(i);
        bool any = false;
        for (int run = 0; run * kRun < vocab_size && !any; ++run) {
            any = run_bits(mask, run, vocab_size) != 0;
        }
        if (!any) {
            throw std::invalid_argument("the mask of row " + std::to_string(i) + " allows no token");
        }
    }
}

float gumbel(uint64_t seed, int64_t position, int32_t token) {
    static const Kernel& kernel = find_kernel("");
    float noise;
    kernel.noise(seed, position, &token, 1, &noise);
    return noise;
}

LogitsRow Sampler::masked(const LogitsRow& row, const Mask& mask) {
    if (mask.words == nullptr) {
        return row;
    }
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
    masked_logits_.resize(row.stride);
    masked_maxima_.resize(row.stride / kRun);
    for (int run = 0; run < row.stride / kRun; ++run) {
        const float* from = row.logits + run * kRun;
        float* to = masked_logits_.data() + run * kRun;
        uint64_t bits = run * kRun < row.size ? run_bits(mask, run, row.size) : 0;
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

// The sum of exp((logit - top) * factor), by the same parts whoever takes them.
double Sampler::sum_exp(const LogitsRow& row, float top, float factor, int num_threads) {
    const int parts = (row.stride + kSumPart - 1) / kSumPart;
    sums_.resize(parts);
    ThreadPool::shared().run(parts, num_threads, [&](int i, int) {
        const int first = i * kSumPart;
        sums_[i] = kernel_.sum_exp(row.logits + first, std::min(kSumPart, row.stride - first), top, factor);
    });
    return std::accumulate(sums_.begin(), sums_.end(), 0.0);
}

// kept_ = the k largest logits, best first.
void Sampler::top_logits(const LogitsRow& row, int k) {
    const int num_runs = row.stride / kRun;
    float least = std::numeric_limits<float>::lowest();  // what is masked is less
    if (k < num_runs) {
        // k runs reach this, so at least k logits do.
        run_maxima_.assign(row.maxima, row.maxima + num_runs);
        std::nth_element(run_maxima_.begin(), run_maxima_.begin() + (k - 1), run_maxima_.end(), std::greater<float>());
        least = std::max(least, run_maxima_[k - 1]);
    }
    kept_.clear();
    for (int run = 0; run < num_runs; ++run) {
        if (row.maxima[run] >= least) {
            for (int i = run * kRun; i < std::min(row.size, (run + 1) * kRun); ++i) {
                if (row.logits[i] >= least) {
                    kept_.push_back({i, row.logits[i]});
                }
            }
        }
    }
    keep_best(kept_, static_cast<size_t>(k));
    std::sort(kept_.begin(), kept_.end(), better);
}

float Sampler::log_total() const {
    double total = 0;
    for (const Candidate& c : kept_) {
        total += std::exp(static_cast<double>(c.score));
    }
    return static_cast<float>(std::log(total));
}

// kept_ = what the filters leave, best first, score = (logit - top) / temperature.
void Sampler::filter(const Sampling& s, const LogitsRow& row, float top, int num_threads) {
    const auto scale = [&] {
        for (Candidate& c : kept_) {
            c.score = relative(c.score, top, s.temperature);
        }
    };
    const int all = row.size;
    int k = s.top_k > 0 ? std::min(s.top_k, all) : all;
    if (s.top_p < 1) {
        double total = -1;
        if (s.top_k == 0) {
            total = sum_exp(row, top, inverse(s.temperature), num_threads);
        }
        // Usually a few tokens are enough; look further only when they are not.
        for (int guess = std::min(k, 128);; guess = std::min(k, guess * 8)) {
            top_logits(row, guess);
            scale();
            if (s.top_k > 0 && guess < k) {
                continue;
            }
            const double goal = s.top_p * (total >= 0 ? total : std::exp(static_cast<double>(log_total())));
            double sum = 0;
            size_t n = 0;
            while (n < kept_.size() && sum < goal) {
                sum += std::exp(static_cast<double>(kept_[n++].score));
            }
            if (sum >= goal || guess == k) {
                kept_.resize(std::max<size_t>(n, 1));
                break;
            }
        }
    } else if (s.top_k == 0) {
        // Only min-p is on: its threshold is known beforehand.
        const float least = top + s.temperature * std::log(s.min_p);
        kept_.clear();
        for (int run = 0; run < row.stride / kRun; ++run) {
            if (row.maxima[run] >= least) {
                for (int i = run * kRun; i < std::min(row.size, (run + 1) * kRun); ++i) {
                    if (row.logits[i] >= least) {
                        kept_.push_back({i, row.logits[i]});
                    }
                }
            }
        }
        scale();
        return;
    } else {
        top_logits(row, k);
        scale();
    }
    if (s.min_p > 0) {
        const float least = std::log(s.min_p);
        kept_.erase(std::remove_if(kept_.begin(), kept_.end(), [&](const Candidate& c) { return c.score < least; }),
                    kept_.end());
    }
}

// Adds noise to kept_ from `first` on.
void Sampler::add_noise(const Sampling& s, int64_t position, size_t first) {
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

// kept_ = the k best of the whole vocabulary, score = (logit - top) / temperature + noise. Runs are visited from the
// one that may hold the best, until none can hold one that is kept: for one token about as many as a run has tokens at
// most, whatever the logits are.
void Sampler::perturb_all(const Sampling& s, const LogitsRow& row, int64_t position, int k, float top) {
    constexpr float kNothing = -std::numeric_limits<float>::infinity();
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
    float least = kNothing;  // score of the k-th best so far
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

const std::vector<Candidate>& Sampler::candidates(const Sampling& s, const LogitsRow& row, int64_t position, int k,
                                                  int num_threads) {
    k = std::min(k, row.size);
    const float top = *std::max_element(row.maxima, row.maxima + row.stride / kRun);
    float total = 0;
    if (s.temperature == 0) {
        top_logits(row, k);
        for (Candidate& c : kept_) {
            c.score = relative(c.score, top, 1);
        }
        total = static_cast<float>(std::log(sum_exp(row, top, 1, num_threads)));
    } else if (s.top_k == 0 && s.top_p == 1 && s.min_p == 0) {
        perturb_all(s, row, position, k, top);
        total = static_cast<float>(std::log(sum_exp(row, top, inverse(s.temperature), num_threads)));
    } else {
        filter(s, row, top, num_threads);
        total = log_total();
        add_noise(s, position, 0);
        keep_best(kept_, static_cast<size_t>(k));
    }
    std::sort(kept_.begin(), kept_.end(), better);
    while (!kept_.empty() && std::isinf(kept_.back().score)) {
        kept_.pop_back();  // masked
    }
    for (Candidate& c : kept_) {
        c.score -= total;
    }
    return kept_;
}

int32_t Sampler::choose(const Sampling& s, const LogitsRow& row, int64_t position, int num_threads) {
    const float* best = std::max_element(row.maxima, row.maxima + row.stride / kRun);
    if (s.temperature == 0) {
        const float* run = row.logits + (best - row.maxima) * kRun;
        return static_cast<int32_t>(
            std::min<std::ptrdiff_t>(std::find(run, run + kRun, *best) - row.logits, row.size - 1));
    }
    if (s.top_k == 0 && s.top_p == 1 && s.min_p == 0) {
        perturb_all(s, row, position, 1, *best);
    } else {
        filter(s, row, *best, num_threads);
        add_noise(s, position, 0);
        keep_best(kept_, 1);
    }
    return kept_.empty() ? 0 : kept_.front().token;
}

}  // namespace pystaged
