#include "text/executor.h"

#include <algorithm>
#include <cmath>
#include <map>

namespace pystaged {

namespace {

// Greedy candidates in fewer logits are found faster than a second thread is woken; so are the largest of many more,
// for which most logits need not be read.
constexpr size_t kLogitsWorthSharing = 128 << 10, kLargestWorthSharing = 16 * kLogitsWorthSharing;

struct Executors {
    std::mutex mutex;
    std::map<const Model*, std::weak_ptr<Executor>> by_model;
};

// By pass, of the largest one lately. Memory for more than twice of that is given back.
constexpr double kPeakDecay = 0.99;

}  // namespace

Executor::Executor(const Model& model)
    : model_(model),
      process_(process_id()),
      backend_(model.llama() ? make_llama_pass(model) : make_packed_pass(model)),
      samplers_(model.num_threads(), Sampler(model.kernel())),
      spare_(std::make_shared<Spare>()) {}

std::shared_ptr<Executor> Executor::of(const Model& model) {
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

std::unique_lock<std::mutex> Executor::none_of(const Model& model) {
    Executors& all = OfProcess<Executors>::get();
    std::unique_lock<std::mutex> lock(all.mutex);
    const auto found = all.by_model.find(&model);
    require(found == all.by_model.end() || found->second.expired(),
            "a model is changed before the first session is opened, and this model has sessions");
    return lock;
}

Executor::Turn::Turn(Executor& executor) : executor_(executor) {
    std::unique_lock<std::mutex> lock(executor.mutex_);
    require<std::runtime_error>(
        executor.caller_ != std::this_thread::get_id(),
        "the model is in a pass that this call interrupts; in a signal handler, set a flag or raise instead");
    const uint64_t turn = executor.next_++;
    executor.called_.wait(lock, [&] { return executor.served_ == turn; });
    executor.caller_ = std::this_thread::get_id();
}

Executor::Turn::~Turn() {
    const std::lock_guard<std::mutex> lock(executor_.mutex_);
    executor_.caller_ = std::thread::id();
    ++executor_.served_;
    executor_.called_.notify_all();
}

std::shared_ptr<Logits> Executor::make_logits(int num_rows) {
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

LogitsRow Executor::row(const Logits& logits, int row) const {
    const size_t stride = model_.numbers().logits_stride();
    const float* maxima = logits.maxima.data() + row * stride / kRun;
    require<ModelError>(std::all_of(maxima, maxima + stride / kRun, [](float value) { return std::isfinite(value); }),
                        "the logits of a pass are not finite; the model's file is damaged, get it again, or its "
                        "numbers are too large here");
    return {logits.values.data() + row * stride, maxima, model_.numbers().vocab_rows, static_cast<int>(stride)};
}

void Executor::find_candidates(const std::vector<Judged>& rows) {
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

}  // namespace pystaged
