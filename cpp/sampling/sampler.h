// The target's token at a position, and a draft's guesses at it: a pure function of logits, seed and position.
//
// A token is drawn by the Gumbel-max rule, argmax of log p + g, where the noise g(seed, position, token) is shared by
// every model and every node of the tree at that position (arXiv 2408.07978, 2506.05632). At temperature 0 there is no
// noise. Ties go to the lowest id.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "machine/memory.h"
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
    std::shared_ptr<const LogitRules> rules = nullptr;  // or none
    int logprobs = -1;  // of how many of the likeliest tokens verifying tells log-probabilities; -1 for none at all
};

// Throws std::invalid_argument, naming the field.
void check(const Sampling& sampling);

// Gumbel noise of one token, as kernels/noise.h defines it; within [-3.15, 27.04].
float gumbel(uint64_t seed, int64_t position, int32_t token);

// The tokens that a row may be followed by, a bit each; those beyond the last word may not. Without words all may.
struct Mask {
    const uint32_t* words = nullptr;
    int num_words = 0;
};

// Of several rows.
struct Masks {
    std::vector<uint32_t> words;  // [rows][num_words]
    int num_words = 0;

    Mask row(size_t i) const { return num_words > 0 ? Mask{&words[i * num_words], num_words} : Mask{}; }
};

// Throws std::invalid_argument where there are masks, but not one for each row that allows a token of the vocabulary.
void check(const Masks& masks, size_t num_rows, int vocab_size);

struct Candidate {
    int32_t token;
    float score;
};

class Sampler {
public:
    explicit Sampler(const Kernel& kernel) : kernel_(kernel), ruled_(kernel) {}

    // The row with -inf for what its mask forbids, before all else that the sampling does; until the next such call.
    LogitsRow masked(const LogitsRow& row, const Mask& mask);
    // The token at `position`, given the logits of the row before it; the prefix is for rules. Inside a task of the
    // thread pool `num_threads` must be 1. -1 where rules and a mask exclude all tokens.
    int32_t choose(const Sampling& sampling, const LogitsRow& row, int64_t position, int num_threads,
                   const Prefix& prefix = {});
    // The k likeliest outcomes of choose() as this row sees it, best first: score is log p + g, or log p when greedy.
    // Fewer than k where filters or a mask leave fewer.
    const std::vector<Candidate>& candidates(const Sampling& sampling, const LogitsRow& row, int64_t position, int k,
                                             int num_threads, const Prefix& prefix = {});
    // Log-probabilities as the row itself has them, of a token and then of the k likeliest, best first.
    const std::vector<Candidate>& log_probabilities(const LogitsRow& row, int32_t token, int k, int num_threads);
    // The k largest logits, best first; ties by the lower id.
    const std::vector<Candidate>& largest(const LogitsRow& row, int k);

private:
    // What there is to choose from: the likeliest token, all of them, or those in kept_.
    enum class Choice { likeliest, all, kept };

    Choice narrow(const Sampling& sampling, LogitsRow& row, int64_t position, int num_threads);
    bool excludes_top(const Sampling& sampling, int64_t position) const;
    LogitsRow without_top(const Sampling& sampling, const LogitsRow& row, float temperature, int num_threads);
    void top_logits(const LogitsRow& row, int k);
    void filter(const Sampling& sampling, const LogitsRow& row, float top, float temperature, int num_threads);
    void add_noise(const Sampling& sampling, int64_t position, size_t first);
    void perturb_all(const Sampling& sampling, const LogitsRow& row, int64_t position, int k, float top);
    double sum_exp(const LogitsRow& row, float top, float factor, int num_threads);

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
