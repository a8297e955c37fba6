// What the sessions of a model share: the backend and samplers, with the memory they compute in, used by one call at a
// time, and the logits that passes leave.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "machine/pool.h"
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
    static std::shared_ptr<Executor> of(const Model& model) {
        Executors& all = OfProcess<Executors>::get();
        const std::lock_guard<std::mutex> lock(all.mutex);
        std::weak_ptr<Executor>& place = all.by_model[&model];
        std::shared_ptr<Executor> executor = place.lock();
        if (!executor) {
            executor.reset(new Executor(model), [](Executor* made) {
                // Destroying that of a process we were forked from would wait for threads that are not here.
                if (made->is_of(process_id())) {
                    delete made;
                }
            });
            place = executor;
            std::erase_if(all.by_model, [](const auto& each) { return each.second.expired(); });
        }
        return executor;
    }
    // While it is held, no session of the model is opened, so that the model may change. Throws std::invalid_argument
    // where it has some.
    static std::unique_lock<std::mutex> none_of(const Model& model) {
        Executors& all = OfProcess<Executors>::get();
        std::unique_lock<std::mutex> lock(all.mutex);
        const auto found = all.by_model.find(&model);
        require(found == all.by_model.end() || found->second.expired(),
                "a model is changed before the first session is opened, and this model has sessions");
        return lock;
    }

    // While it lives, its thread alone computes. Threads are served in the order they came, so that a long prompt does
    // not starve others. Throws std::runtime_error where this thread is in a pass already.
    class Turn {
    public:
        explicit Turn(Executor& executor) : executor_(executor) {
            require<std::runtime_error>(
                executor.caller_ != std::this_thread::get_id(),
                "the model is in a pass that this call interrupts; in a signal handler, set a flag or raise instead");
            const unsigned turn = executor.next_++;
            for (unsigned served; (served = executor.served_) != turn;) {
                executor.served_.wait(served);
            }
            executor.caller_ = std::this_thread::get_id();
        }
        ~Turn() {
            executor_.caller_ = std::thread::id();
            ++executor_.served_;
            executor_.served_.notify_all();
        }
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
    std::shared_ptr<Logits> make_logits(int num_rows) {
        const size_t floats = num_rows * model_.numbers().logits_stride();
        std::unique_ptr<Logits> logits;
        {
            const std::lock_guard<std::mutex> lock(spare_->mutex);
            auto& all = spare_->logits;
            const auto floats_of = [](const auto& each) { return each->values.size(); };
            std::ranges::sort(all, {}, floats_of);
            spare_->peak = std::max(static_cast<double>(floats), kPeakDecay * spare_->peak);
            while (!all.empty() && floats_of(all.back()) > 2 * spare_->peak) {
                all.pop_back();
                --spare_->made;
            }
            // The smallest that is large enough, or else the largest.
            if (!all.empty()) {
                const auto fits = std::ranges::lower_bound(all, floats, {}, floats_of);
                const auto found = fits == all.end() ? all.end() - 1 : fits;
                logits = std::move(*found);
                all.erase(found);
            } else {
                logits = std::make_unique<Logits>();
                all.reserve(++spare_->made);  // so that giving memory back never allocates
            }
        }
        logits->num_rows = num_rows;
        if (logits->values.size() < floats) {
            logits->values.resize(floats);
            logits->maxima.resize(floats / kRun);
        }
        // Whoever holds them last may be in a child of fork(), where a mutex can be locked for ever.
        return {logits.release(), [spare = spare_](Logits* used) {
                    std::unique_ptr<Logits> owned(used);
                    const std::unique_lock<std::mutex> lock(spare->mutex, std::try_to_lock);
                    if (lock) {
                        spare->logits.push_back(std::move(owned));
                    }
                }};
    }
    // Whether the pass had no room for the row.
    bool is_left_out(const Logits& logits, int row) const {
        return logits.maxima[row * model_.numbers().logits_stride() / kRun] == -INFINITY;
    }
    // Throws ModelError where the row is not finite: only of rows that are used, as others may be of rejected guesses.
    LogitsRow row(const Logits& logits, int row) const {
        const size_t stride = model_.numbers().logits_stride();
        const float* maxima = logits.maxima.data() + row * stride / kRun;
        const bool finite = std::all_of(maxima, maxima + stride / kRun, [](float x) { return std::isfinite(x); });
        require<ModelError>(finite, is_left_out(logits, row)
                                        ? "a row was left out: llama.cpp has 256 ids for texts and leaves"
                                        : "the logits of a pass are not finite; the model's file is damaged, get it "
                                          "again, or its numbers are too large here");
        return {logits.values.data() + row * stride, maxima, model_.numbers().vocab_rows, static_cast<int>(stride)};
    }
    void find_candidates(const std::vector<Judged>& rows) {
        const auto raw = [](const Judged& row) { return !row.sampling; };
        const bool greedy =
            std::ranges::all_of(rows, [&](const Judged& row) { return raw(row) || row.sampling->temperature == 0; });
        const bool all_raw = std::ranges::all_of(rows, raw);
        const size_t worth = all_raw ? kLargestWorthSharing : kLogitsWorthSharing;
        const bool quick = greedy && rows.size() * model_.numbers().logits_stride() < worth;
        // One row is shared out by its logits, several are by rows.
        const int threads = quick ? 1 : model_.num_threads_for(rows.size()), in_row = rows.size() == 1 ? threads : 1;
        ThreadPool::shared().run(static_cast<int>(rows.size()), threads, [&](int i, int worker) {
            const Judged& row = rows[i];
            Sampler& sampler = samplers_[worker];
            const auto& found = row.sampling ? sampler.candidates(*row.sampling, sampler.masked(row.logits, row.mask),
                                                                  row.position, row.k, in_row, row.prefix)
                                             : sampler.largest(row.logits, row.k);
            for (int j = 0; j < row.k; ++j) {
                const bool have = static_cast<size_t>(j) < found.size();
                row.tokens[j] = have ? found[j].token : -1;
                row.scores[j] = have ? found[j].score : -INFINITY;
            }
        });
    }

private:
    // Greedy candidates in fewer logits are found faster than a second thread is woken; so are the largest of many
    // more, for which most logits need not be read.
    static constexpr size_t kLogitsWorthSharing = 128 << 10, kLargestWorthSharing = 16 * kLogitsWorthSharing;
    // By pass, of the largest one lately. Memory for more than twice of that is given back.
    static constexpr double kPeakDecay = 0.99;

    struct Executors {
        std::mutex mutex;
        std::map<const Model*, std::weak_ptr<Executor>> by_model;
    };

    explicit Executor(const Model& model)
        : model_(model),
          process_(process_id()),
          backend_(model.llama() ? make_llama_pass(model) : make_packed_pass(model)),
          samplers_(model.num_threads(), Sampler(model.kernel())),
          spare_(std::make_shared<Spare>()) {}

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

    std::atomic<unsigned> next_{0}, served_{0};  // turns
    std::atomic<std::thread::id> caller_{};      // whose turn it is
};

}  // namespace pystaged
