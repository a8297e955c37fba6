#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace pystaged {

namespace {

constexpr float kMostNoise = 22.9f;

struct Philox {
    uint32_t word[4];
};

// Four noise words for tokens 4 * group to 4 * group + 3.
Philox philox(uint64_t seed, int64_t position, uint32_t group) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    uint32_t c0 = group, c1 = 0;
    uint32_t c2 = static_cast<uint32_t>(position), c3 = static_cast<uint32_t>(static_cast<uint64_t>(position) >> 32);
    for (int i = 0; i < 10; ++i) {
        const uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

float noise_of(uint32_t word) {
    return static_cast<float>(-std::log(-std::log((word + 0.5) * 0x1p-32)));
}

// The least word whose noise may reach `noise`; a few words too low, never too high.
uint32_t least_word(double noise) {
    const double u = std::exp(-std::exp(-(noise - 1e-4)));
    return u >= 1 ? std::numeric_limits<uint32_t>::max() - 1
                  : static_cast<uint32_t>(std::max(0.0, std::floor(u * 0x1p32) - 2));
}

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

float gumbel(uint64_t seed, int64_t position, int32_t token) {
    const auto id = static_cast<uint32_t>(token);
    return noise_of(philox(seed, position, id / 4).word[id % 4]);
}

// kept_ = the k largest logits, best first.
void Sampler::top_logits(const LogitsRow& row, int k) {
    const int num_runs = row.stride / kRun;
    float least = -std::numeric_limits<float>::infinity();
    if (k < num_runs) {
        // k runs reach this, so at least k logits do.
        run_maxima_.assign(row.maxima, row.maxima + num_runs);
        std::nth_element(run_maxima_.begin(), run_maxima_.begin() + (k - 1), run_maxima_.end(), std::greater<float>());
        least = run_maxima_[k - 1];
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
void Sampler::filter(const Sampling& s, const LogitsRow& row, float top) {
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
            total = kernel_.sum_exp(row.logits, row.stride, top, inverse(s.temperature));
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

// kept_ = its k best with noise added.
void Sampler::perturb(const Sampling& s, int64_t position, int k) {
    for (Candidate& c : kept_) {
        c.score += gumbel(s.seed, position, c.token);
    }
    keep_best(kept_, static_cast<size_t>(k));
}

// The same over the whole vocabulary. Noise is bounded, so most tokens are passed over unperturbed.
void Sampler::perturb_all(const Sampling& s, const LogitsRow& row, int64_t position, int k, float top) {
    const auto scaled = [&](float logit) { return relative(logit, top, s.temperature); };
    const int num_runs = row.stride / kRun;
    runs_.resize(num_runs);
    for (int i = 0; i < num_runs; ++i) {
        runs_[i] = i;
    }
    std::sort(runs_.begin(), runs_.end(), [&](int a, int b) { return row.maxima[a] > row.maxima[b]; });
    kept_.clear();
    float least = -std::numeric_limits<float>::infinity();  // score of the k-th best so far
    for (const int run : runs_) {
        const float best = scaled(row.maxima[run]);
        if (best + kMostNoise < least) {
            break;
        }
        const uint32_t word = std::isinf(least) ? 0 : least_word(static_cast<double>(least) - best);
        for (int i = run * kRun; i < std::min(row.size, (run + 1) * kRun); i += 4) {
            const Philox noise = philox(s.seed, position, static_cast<uint32_t>(i) / 4);
            for (int j = 0; j < std::min(4, row.size - i); ++j) {
                if (noise.word[j] >= word) {
                    const Candidate c{i + j, scaled(row.logits[i + j]) + noise_of(noise.word[j])};
                    if (c.score >= least) {
                        kept_.push_back(c);
                    }
                }
            }
        }
        keep_best(kept_, static_cast<size_t>(k));
        if (kept_.size() == static_cast<size_t>(k)) {
            least = std::max_element(kept_.begin(), kept_.end(), better)->score;
        }
    }
}

const std::vector<Candidate>& Sampler::candidates(const Sampling& s, const LogitsRow& row, int64_t position, int k) {
    k = std::min(k, row.size);
    const float top = *std::max_element(row.maxima, row.maxima + row.stride / kRun);
    float total = 0;
    if (s.temperature == 0) {
        top_logits(row, k);
        for (Candidate& c : kept_) {
            c.score = relative(c.score, top, 1);
        }
        total = static_cast<float>(std::log(kernel_.sum_exp(row.logits, row.stride, top, 1)));
    } else if (s.top_k == 0 && s.top_p == 1 && s.min_p == 0) {
        perturb_all(s, row, position, k, top);
        total = static_cast<float>(std::log(kernel_.sum_exp(row.logits, row.stride, top, inverse(s.temperature))));
    } else {
        filter(s, row, top);
        total = log_total();
        perturb(s, position, k);
    }
    std::sort(kept_.begin(), kept_.end(), better);
    for (Candidate& c : kept_) {
        c.score -= total;
    }
    return kept_;
}

int32_t Sampler::choose(const Sampling& s, const LogitsRow& row, int64_t position) {
    const float* best = std::max_element(row.maxima, row.maxima + row.stride / kRun);
    if (s.temperature == 0) {
        const float* run = row.logits + (best - row.maxima) * kRun;
        return static_cast<int32_t>(
            std::min<std::ptrdiff_t>(std::find(run, run + kRun, *best) - row.logits, row.size - 1));
    }
    if (s.top_k == 0 && s.top_p == 1 && s.min_p == 0) {
        perturb_all(s, row, position, 1, *best);
    } else {
        filter(s, row, *best);
        perturb(s, position, 1);
    }
    return kept_.empty() ? 0 : kept_.front().token;
}

}  // namespace pystaged
