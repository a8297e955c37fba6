// What the sessions of a model share: the backend and samplers, with the memory they compute in, used by one call at a
// time, and the logits that passes leave.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pass/backend.h"
#include "sampling/sampler.h"

namespace pystaged {

// The logits of the rows that a pass judges, of whichever texts.
struct Logits {
    int num_rows = 0;
    Lines<float> values;  // [rows][logits stride]
    Lines<float> maxima;  // [rows][logits stride / kRun]
};

// A judged row, and where its candidates go: the k likeliest next tokens, best first, short rows filled up with token
// -1 and score -inf.
struct Judged {
    LogitsRow logits;
    Mask mask;
    int64_t position;          // of the next token
    const Sampling* sampling;  // none for the largest logits as they are
    int k;
    int32_t* tokens;  // [k]
    float* scores;    // [k]
    Prefix prefix;    // where the sampling has rules
};

class Executor {
public:
    // A model's own, made when the first session asks for it and gone with the last; of this process, not of the one
    // that it was forked from.
    static std::shared_ptr<Executor> of(const Model& model);
    // While it is held, no session of the model is opened, so that the model may change. Throws std::invalid_argument
    // where it has some.
    static std::unique_lock<std::mutex> none_of(const Model& model);

    // While it lives, its thread alone computes. Threads are served in the order they came, so that a long prompt does
    // not starve others. Throws std::runtime_error where this thread is in a pass already.
    class Turn {
    public:
        explicit Turn(Executor& executor);
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

    private:
        Executor& executor_;
    };

    bool is_of(int process) const { return process == process_; }
    Backend& backend() { return *backend_; }
    // One for each thread of the pool.
    Sampler& sampler(int worker) { return samplers_[worker]; }
    // Memory for so many rows, reused when nobody holds it any more.
    std::shared_ptr<Logits> make_logits(int num_rows);
    // Throws ModelError where the row is not finite: only of rows that are used, as others may be of rejected guesses.
    LogitsRow row(const Logits& logits, int row) const;
    void find_candidates(const std::vector<Judged>& rows);

private:
    explicit Executor(const Model& model);

    struct Spare {
        std::mutex mutex;
        size_t made = 0;
        double peak = 0;  // floats of the largest pass lately
        std::vector<std::unique_ptr<Logits>> logits;
    };

    const Model& model_;
    int process_;
    std::unique_ptr<Backend> backend_;
    std::vector<Sampler> samplers_;
    std::shared_ptr<Spare> spare_;

    std::mutex mutex_;
    std::condition_variable called_;
    uint64_t next_ = 0, served_ = 0;  // turns
    std::thread::id caller_;          // whose turn it is
};

}  // namespace pystaged
