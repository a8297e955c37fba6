#include "session.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include "error.h"
#include "pass/device_pass.h"
#include "pass/packed_pass.h"
#include "thread_pool.h"

namespace pystaged {

namespace {

// Cells beyond the context, so that a tree at its very end still has room for branches.
constexpr int kSpareCells = 512;
// Greedy candidates in fewer logits are found faster than a second thread is woken.
constexpr size_t kLogitsWorthSharing = 128 << 10;

// How long a prefill goes on before it asks again whether it is interrupted.
constexpr auto kUninterrupted = std::chrono::milliseconds(50);

int checked_context(const Model& model, int context) {
    const int most = model.numbers().max_context;
    if (context < 0 || context > most) {
        throw std::invalid_argument("n_ctx must be between 1 and the model's " + std::to_string(most) + ", not " +
                                    std::to_string(context));
    }
    return context == 0 ? std::min(most, Session::kDefaultContext) : context;
}

void check_finite(const float* x, size_t n) {
    if (!std::all_of(x, x + n, [](float value) { return std::isfinite(value); })) {
        throw ModelError("the logits of a pass are not finite; the model's file is damaged, get it again");
    }
}

// The form that fits where the weights are.
std::unique_ptr<Executor> make_executor(const Model& model, int num_cells, int context) {
    if (model.device_memory()) {
        return std::make_unique<DevicePass>(model, num_cells, context);
    }
    return std::make_unique<PackedPass>(model, num_cells, context);
}

}  // namespace

// The lock of one call, and the floats it computes with.
class Session::Turn {
public:
    explicit Turn(Session& session) : session_(session) {
        if (session.caller_ == std::this_thread::get_id()) {
            throw std::runtime_error(
                "the session is in a call that this one interrupts; in a signal handler, set a flag or raise instead");
        }
        const int process = getpid(), other = session.process_;
        if (other != 0 && other != process) {
            throw std::runtime_error("the process forked while the session was in a call; open another session");
        }
        session.mutex_.lock();
        session.caller_ = std::this_thread::get_id();
        session.process_ = process;
    }
    ~Turn() {
        session_.process_ = 0;
        session_.caller_ = std::thread::id();
        session_.mutex_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

private:
    Session& session_;
    FloatEnvironment floats_;
};

Session::Session(std::shared_ptr<const Model> model, int context)
    : model_(std::move(model)),
      context_(checked_context(*model_, context)),
      executor_(make_executor(*model_, context_ + kSpareCells, context_)),
      samplers_(model_->num_threads(), Sampler(model_->kernel())) {}

// As early as possible before a pass.
void Session::wake_workers() const {
    if (model_->num_threads() > 1 && !model_->device_memory()) {
        ThreadPool::shared().wake();
    }
}

void Session::check_open() const {
    if (!executor_) {
        throw std::invalid_argument("the session is closed");
    }
}

void Session::check_tokens(const std::vector<int32_t>& tokens) const {
    const int size = model_->numbers().vocab_size;
    for (const int32_t token : tokens) {
        if (token < 0 || token >= size) {
            throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                        std::to_string(size));
        }
    }
}

void Session::check_nothing_pending(const char* call) const {
    if (!pending_.empty()) {
        throw std::invalid_argument(std::string(call) +
                                    " needs a session without pending rows; commit or discard them first");
    }
}

const Session::Row& Session::checked_row(int row) const {
    if (row < 0 || static_cast<size_t>(row) >= pending_.size()) {
        throw std::invalid_argument("row " + std::to_string(row) + " is not among the " +
                                    std::to_string(pending_.size()) + " pending rows");
    }
    return pending_[row];
}

void Session::prefill(const std::vector<int32_t>& tokens, const std::function<void()>& interrupted) {
    wake_workers();
    const Turn turn(*this);
    check_open();
    check_tokens(tokens);
    check_nothing_pending("prefill");
    std::vector<int32_t> parents(tokens.size());
    std::iota(parents.begin(), parents.end(), -1);
    // Between layers only where they take long: asking may mean waiting for an interpreter that is busy.
    auto asked = std::chrono::steady_clock::now();
    const std::function<void()> seldom = [&] {
        if (std::chrono::steady_clock::now() - asked > kUninterrupted) {
            interrupted();
            asked = std::chrono::steady_clock::now();
        }
    };
    try {
        append(tokens, parents);
        const size_t most = executor_->max_rows();
        for (size_t first = 0; first < tokens.size(); first += most) {
            if (first > 0) {
                interrupted();
            }
            compute(first, std::min(tokens.size(), first + most), 0, &seldom);
        }
        committed_.insert(committed_.end(), tokens.begin(), tokens.end());
    } catch (...) {
        drop_from(0);
        throw;
    }
    drop_from(0);
}

void Session::evaluate(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, int num_logits) {
    wake_workers();
    const Turn turn(*this);
    check_open();
    evaluate_rows(tokens, parents, num_logits);
}

void Session::evaluate_rows(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, int num_logits) {
    check_tokens(tokens);
    if (tokens.empty() || tokens.size() != parents.size()) {
        throw std::invalid_argument("evaluate needs at least one token and as many parents as tokens, not " +
                                    std::to_string(tokens.size()) + " and " + std::to_string(parents.size()));
    }
    const int n = static_cast<int>(tokens.size());
    if (num_logits < -1 || num_logits > n) {
        throw std::invalid_argument("num_logits must be between 0 and the number of tokens");
    }
    const size_t start = pending_.size(), end = start + n;
    const size_t judged = end - (num_logits < 0 ? n : num_logits);
    const int slots = num_logits_;
    read_logits();
    try {
        append(tokens, parents);
        const size_t most = executor_->max_rows();
        for (size_t first = start; first < end; first += most) {
            const size_t last = std::min(end, first + most);
            compute(first, last, static_cast<int>(last - std::clamp(judged, first, last)), nullptr);
        }
    } catch (...) {
        num_logits_ = slots;
        num_unread_ = 0;
        drop_from(start);
        throw;
    }
}

void Session::append(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) {
    const int committed = static_cast<int>(committed_.size());
    for (size_t i = 0; i < tokens.size(); ++i) {
        const int index = static_cast<int>(pending_.size()), parent = parents[i];
        if (parent < -1 || parent >= index) {
            throw std::invalid_argument("row " + std::to_string(index) + " has parent " + std::to_string(parent) +
                                        "; a parent is -1 or an earlier row");
        }
        Row row{tokens[i], parent, committed, committed, {}};
        if (parent >= 0) {
            const Row& before = pending_[parent];
            row.position = before.position + 1;
            row.direct = before.direct;
            row.tail = before.tail;
        }
        const int cell = committed + index;
        if (row.position >= context_) {
            throw ContextFullError("the context of " + std::to_string(context_) + " tokens is full");
        }
        if (cell >= executor_->num_cells()) {
            throw ContextFullError("the tree has more rows than the context has room for; at most " +
                                   std::to_string(executor_->num_cells() - committed) + " fit now");
        }
        if (row.tail.empty() && cell == row.position) {
            row.direct = row.position + 1;
        } else {
            row.tail.push_back(cell);
        }
        pending_.push_back(std::move(row));
    }
}

void Session::compute(size_t first, size_t last, int num_logits, const std::function<void()>* interrupted) {
    const int n = static_cast<int>(last - first);
    std::vector<int32_t> tokens(n), positions(n);
    std::vector<RowContext> contexts(n);
    for (int i = 0; i < n; ++i) {
        const Row& row = pending_[first + i];
        tokens[i] = row.token;
        positions[i] = row.position;
        contexts[i] = {row.position + 1, row.direct, row.tail.data()};
    }
    read_logits();
    reserve_logits(num_logits);
    const size_t slot = num_logits_, stride = executor_->logits_stride();
    executor_->compute({n, tokens.data(), positions.data(), contexts.data(),
                        static_cast<int>(committed_.size() + first), num_logits, logits_.data() + slot * stride,
                        maxima_.data() + slot * stride / kRun, interrupted});
    num_unread_ = num_logits;
    if (const size_t size = executor_->shortlist_size(); size > 0 && num_logits > 0) {
        executor_->read_shortlist(&shortlist_tokens_[num_logits_ * size], &shortlist_logits_[num_logits_ * size]);
        check_finite(&shortlist_logits_[num_logits_ * size], num_logits * size);
    }
    for (int i = 0; i < num_logits; ++i) {
        pending_[last - num_logits + i].logits = num_logits_++;
    }
    if (executor_->shortlist_size() == 0) {
        read_logits();
    }
}

// Brings back the logits that are still on the device, before another pass overwrites them or because they are needed.
void Session::read_logits() {
    if (num_unread_ > 0) {
        const size_t stride = executor_->logits_stride(), first = num_logits_ - num_unread_;
        float* maxima = maxima_.data() + first * stride / kRun;
        executor_->read_logits(logits_.data() + first * stride, maxima);
        check_finite(maxima, num_unread_ * stride / kRun);
    }
    num_unread_ = 0;
}

// Room for `num_rows` more rows of logits behind those in use.
void Session::reserve_logits(int num_rows) {
    const size_t stride = executor_->logits_stride();
    const int needed = num_logits_ + num_rows;
    if (needed > num_slots_) {
        logits_.resize(needed * stride);
        maxima_.resize(needed * stride / kRun);
        shortlist_tokens_.resize(needed * size_t(executor_->shortlist_size()));
        shortlist_logits_.resize(shortlist_tokens_.size());
        num_slots_ = needed;
    }
}

void Session::drop_from(size_t first) {
    pending_.resize(std::min(first, pending_.size()));
    if (pending_.empty()) {
        num_logits_ = num_unread_ = 0;
    }
}

int Session::slot_of(int row) const {
    const int slot = checked_row(row).logits;
    if (slot < 0) {
        throw std::invalid_argument("row " + std::to_string(row) + " was evaluated without logits");
    }
    return slot;
}

LogitsRow Session::logits_row(int row) {
    const int slot = slot_of(row);
    if (slot >= num_logits_ - num_unread_) {
        read_logits();
    }
    const size_t stride = executor_->logits_stride();
    return {logits_.data() + slot * stride, maxima_.data() + slot * stride / kRun, model_->numbers().vocab_size,
            static_cast<int>(stride)};
}

// Where the shortlist holds all that the sampling can choose, it alone is needed.
LogitsRow Session::row_to_choose_from(const Sampling& sampling, int row) {
    const int size = executor_->shortlist_size();
    const bool enough = sampling.temperature == 0 || (sampling.top_k > 0 && sampling.top_k <= size);
    return size > 0 && enough ? shortlisted_row(row) : logits_row(row);
}

LogitsRow Session::shortlisted_row(int row) {
    const int size = executor_->shortlist_size(), stride = static_cast<int>(executor_->logits_stride());
    const size_t first = size_t(slot_of(row)) * size;
    sparse_logits_.resize(stride, -INFINITY);
    sparse_maxima_.resize(stride / kRun, -INFINITY);
    for (const int32_t token : sparse_tokens_) {
        sparse_logits_[token] = sparse_maxima_[token / kRun] = -INFINITY;
    }
    sparse_tokens_.assign(&shortlist_tokens_[first], &shortlist_tokens_[first] + size);
    for (int i = 0; i < size; ++i) {
        const int32_t token = sparse_tokens_[i];
        sparse_logits_[token] = shortlist_logits_[first + i];
        sparse_maxima_[token / kRun] = std::max(sparse_maxima_[token / kRun], sparse_logits_[token]);
    }
    return {sparse_logits_.data(), sparse_maxima_.data(), model_->numbers().vocab_size, stride};
}

void Session::candidates(const std::vector<Sampling>& sampling, const std::vector<int32_t>& rows, int k,
                         int32_t* tokens, float* scores) {
    const Turn turn(*this);
    check_open();
    if (sampling.empty() || (sampling.size() != 1 && sampling.size() != rows.size())) {
        throw std::invalid_argument("candidates needs one sampling, or one for each row");
    }
    std::vector<LogitsRow> logits;
    for (const int32_t row : rows) {
        logits.push_back(logits_row(row));
    }
    const bool quick = sampling[0].temperature == 0 && rows.size() * executor_->logits_stride() < kLogitsWorthSharing;
    // One row is shared out by its logits, several are by rows.
    const int threads = quick ? 1 : model_->num_threads(), in_row = rows.size() == 1 ? threads : 1;
    ThreadPool::shared().run(static_cast<int>(rows.size()), threads, [&](int i, int worker) {
        const Sampling& own = sampling[sampling.size() == 1 ? 0 : i];
        const auto& found = samplers_[worker].candidates(own, logits[i], pending_[rows[i]].position + 1, k, in_row);
        for (int j = 0; j < k; ++j) {
            const bool have = static_cast<size_t>(j) < found.size();
            const size_t at = size_t(i) * k + j;
            tokens[at] = have ? found[j].token : -1;
            scores[at] = have ? found[j].score : -INFINITY;
        }
    });
}

Followed Session::verify(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents,
                         const Sampling& sampling) {
    wake_workers();
    const Turn turn(*this);
    check_open();
    check_nothing_pending("verify");
    try {
        evaluate_rows(tokens, parents, -1);
        Followed result = follow_from(sampling, 0);
        commit_path(result.path);
        return result;
    } catch (...) {
        drop_from(0);
        throw;
    }
}

Followed Session::follow(const Sampling& sampling, int root) {
    const Turn turn(*this);
    check_open();
    return follow_from(sampling, root);
}

Followed Session::follow_from(const Sampling& sampling, int root) {
    checked_row(root);
    Followed result;
    for (int row = root; row >= 0;) {
        const int32_t token = samplers_[0].choose(sampling, row_to_choose_from(sampling, row),
                                                  pending_[row].position + 1, model_->num_threads());
        result.path.push_back(row);
        result.tokens.push_back(token);
        const int parent = row;
        row = -1;
        for (size_t child = parent + 1; child < pending_.size(); ++child) {
            if (pending_[child].parent == parent && pending_[child].token == token) {
                row = static_cast<int>(child);
                break;
            }
        }
    }
    return result;
}

void Session::commit(const std::vector<int32_t>& path) {
    const Turn turn(*this);
    check_open();
    commit_path(path);
}

void Session::commit_path(const std::vector<int32_t>& path) {
    for (size_t i = 0; i < path.size(); ++i) {
        if (checked_row(path[i]).parent != (i == 0 ? -1 : path[i - 1])) {
            throw std::invalid_argument("row " + std::to_string(path[i]) + " does not continue the path to commit");
        }
    }
    const int committed = static_cast<int>(committed_.size());
    // Rows only move towards the front, so going along the path never overwrites one that is still to move.
    std::vector<std::pair<int, int>> moves;
    for (int i = 0; i < static_cast<int>(path.size()); ++i) {
        if (path[i] != i) {
            moves.emplace_back(committed + path[i], committed + i);
        }
    }
    committed_.reserve(committed_.size() + path.size());
    executor_->move(moves);
    for (const int32_t row : path) {
        committed_.push_back(pending_[row].token);
    }
    drop_from(0);
}

void Session::discard() {
    const Turn turn(*this);
    check_open();
    drop_from(0);
}

void Session::truncate(int length) {
    const Turn turn(*this);
    check_open();
    if (length < 0 || static_cast<size_t>(length) > committed_.size()) {
        throw std::invalid_argument("cannot truncate " + std::to_string(committed_.size()) + " tokens to " +
                                    std::to_string(length));
    }
    drop_from(0);
    committed_.resize(length);
}

void Session::stretch(int length) {
    const Turn turn(*this);
    check_open();
    check_nothing_pending("stretch");
    const int committed = static_cast<int>(committed_.size());
    if (committed == 0 || length < committed || length > context_) {
        throw std::invalid_argument("cannot stretch " + std::to_string(committed) + " tokens to " +
                                    std::to_string(length) + " of " + std::to_string(context_));
    }
    // Copies, because memory that nobody has written to is not there, and takes no time to read.
    std::vector<std::pair<int, int>> copies;
    for (int cell = committed; cell < length; ++cell) {
        copies.emplace_back(committed - 1, cell);
    }
    executor_->move(copies);
    committed_.resize(length, committed_.back());
}

void Session::close() {
    const Turn turn(*this);
    executor_.reset();
    logits_ = {};
    pending_.clear();
    committed_.clear();
}

void Session::logits(int row, float* out) {
    const Turn turn(*this);
    check_open();
    const LogitsRow logits = logits_row(row);
    std::copy_n(logits.logits, logits.size, out);
}

std::vector<int32_t> Session::tokens() {
    const Turn turn(*this);
    return committed_;
}

int Session::num_pending() {
    const Turn turn(*this);
    return static_cast<int>(pending_.size());
}

bool Session::closed() {
    const Turn turn(*this);
    return !executor_;
}

}  // namespace pystaged
