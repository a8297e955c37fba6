#include "text/session.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace pystaged {

namespace {

// Where threads wait for sessions that others are in.
struct Waiting {
    std::mutex mutex;
    std::condition_variable left;
};

// The session whose keys and values a draft attends to, or none where it has its own.
std::shared_ptr<Session> checked_target(const Model& model, std::shared_ptr<Session> target) {
    if (!model.borrows_cells()) {
        return nullptr;
    }
    require(target != nullptr, "a draft without keys and values of its own needs its target's session");
    require(&target->model() == &model.target(), "the session is of another model than the draft's target");
    return target;
}

}  // namespace

// In the order of their addresses, so that two calls never wait for each other.
Session::Turn::Turn(std::vector<Session*> sessions) : Turn() {
    const size_t num_texts = sessions.size();
    for (size_t i = 0; i < num_texts; ++i) {
        texts_.push_back(&sessions[i]->text_);
        const std::shared_ptr<Session> target = std::atomic_load(&sessions[i]->target_);
        if (target && std::ranges::find(sessions, target.get()) == sessions.end()) {
            sessions.push_back(target.get());
            targets_.push_back(target);
        }
    }
    std::ranges::sort(sessions);
    entered_.reserve(sessions.size());
    for (Session* session : sessions) {
        session->enter();
        entered_.push_back(session);
    }
}

Session::Turn::~Turn() {
    for (Session* session : entered_) {
        session->leave();
    }
}

void Session::enter() {
    require<std::runtime_error>(
        caller_ != std::this_thread::get_id(),
        "the session is in a call that this one interrupts; in a signal handler, set a flag or raise instead");
    const int process = process_id();
    const auto take = [&] {
        int holder = 0;
        const bool taken = process_.compare_exchange_strong(holder, process);
        require<std::runtime_error>(taken || holder == process,
                                    "the process forked while the session was in a call; open another session");
        return taken;
    };
    if (!take()) {
        Waiting& waiting = OfProcess<Waiting>::get();
        std::unique_lock<std::mutex> lock(waiting.mutex);
        waiting.left.wait(lock, take);
    }
    caller_ = std::this_thread::get_id();
    if (text_.executor && !text_.executor->is_of(process)) {
        // It may have been in a pass when the process forked.
        try {
            text_.executor = Executor::of(*text_.model);
        } catch (...) {
            leave();
            throw;
        }
    }
}

void Session::leave() {
    caller_ = std::thread::id();
    process_ = 0;
    Waiting& waiting = OfProcess<Waiting>::get();
    {
        const std::lock_guard<std::mutex> lock(waiting.mutex);
    }  // whoever found it taken waits by now
    waiting.left.notify_all();
}

Session::Session(std::shared_ptr<const Model> model, int context, std::shared_ptr<Session> target)
    : target_(checked_target(*model, std::move(target))), text_(std::move(model), context) {
    text_.target = target_ ? &target_->text_ : nullptr;
}

Outcome Session::likeliest(const std::vector<int32_t>& rows, const std::vector<int32_t>& before, int k) {
    const OpenTurn turn(*this);
    const bool has_markov = text_.model->numbers().markov_rank > 0;
    require(before.size() == (has_markov ? rows.size() : 0),
            has_markov ? "the token before each row is needed, because the draft has Markov weights"
                       : "the draft has no Markov weights to read tokens before rows");
    text_.check_tokens(before);
    const int n = static_cast<int>(rows.size());
    const Executor::Turn computing(*text_.executor);
    const size_t stride = text_.model->numbers().logits_stride();
    const std::shared_ptr<Logits> logits = text_.executor->make_logits(n);
    for (int i = 0; i < n; ++i) {
        const LogitsRow row = text_.logits_row(rows[i]);
        std::copy_n(row.logits, stride, logits->values.data() + i * stride);
        std::copy_n(row.maxima, stride / kRun, logits->maxima.data() + i * stride / kRun);
    }
    if (has_markov) {
        text_.executor->backend().add_markov(before.data(), n, logits->values.data(), logits->maxima.data());
    }
    Outcome best;
    for (int i = 0; i < n; ++i) {
        const auto& found = text_.executor->sampler(0).log_probabilities(text_.executor->row(*logits, i), 0, k, 1);
        for (int j = 1; j <= k; ++j) {  // the first one is the token that was asked for, 0
            best.tokens.push_back(found[j].token);
            best.scores.push_back(found[j].score);
        }
    }
    return best;
}

Followed Session::follow(const Sampling& sampling, int root) {
    const OpenTurn turn(*this);
    const Executor::Turn computing(*text_.executor);
    return text_.follow(sampling, {}, root, 0, text_.model->num_threads_for(1));
}

void Session::commit(const std::vector<int32_t>& path) {
    const OpenTurn turn(*this);
    require((!text_.target && text_.model->family().reads != Reads::as_context) || path.empty(),
            "rows of a draft of this kind are no context; discard them");
    for (size_t i = 0; i < path.size(); ++i) {
        require(text_.checked_row(path[i]).parent == (i == 0 ? -1 : path[i - 1]), "row ", path[i],
                " does not continue the path to commit");
    }
    text_.committed.reserve(text_.committed.size() + path.size());
    HiddenRows hidden = text_.model->taps_all_rows() ? text_.hidden_of(path) : HiddenRows();
    text_.commit(path, false, std::move(hidden));
}

void Session::keep_states(std::vector<int> lengths, int most, int anchor) {
    const OpenTurn turn(*this);
    require(most >= 0, "most must be at least 0, not ", most);
    std::ranges::sort(lengths);
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    text_.state->keep_states(lengths, most, anchor);
}

int Session::rewind(int length) {
    const OpenTurn turn(*this);
    const int reached = text_.state->cut(text_.checked_reachable(length));
    text_.drop_from(0);
    text_.hidden = {};
    text_.committed.resize(reached);
    return reached;
}

std::unique_ptr<Session> Session::fork(int length) {
    const OpenTurn turn(*this);
    require(length >= 0 && size_t(length) <= text_.committed.size(), "cannot fork after ", length, " tokens of ",
            text_.committed.size());
    auto session = std::make_unique<Session>(text_.model, text_.context, target_);
    const int reached = session->text_.state->copy(*text_.state, length);
    session->text_.committed.assign(text_.committed.begin(), text_.committed.begin() + reached);
    return session;
}

void Session::stretch(int length) {
    const OpenTurn turn(*this);
    text_.check_nothing_pending("stretch");
    const int committed = static_cast<int>(text_.committed.size());
    require(committed > 0 && length >= committed && length <= text_.context, "cannot stretch ", committed,
            " tokens to ", length, " of ", text_.context);
    text_.committed.reserve(length);
    text_.state->stretch(committed, length);
    text_.hidden = {};
    text_.committed.resize(length, text_.committed.back());
}

void Session::close() {
    const Turn turn(*this);
    text_.pending = {};
    text_.committed = {};
    text_.hidden = {};
    text_.state.reset();
    text_.executor.reset();
    text_.target = nullptr;
    std::atomic_store(&target_, std::shared_ptr<Session>());
}

void Session::logits(int row, float* out) {
    const OpenTurn turn(*this);
    const Executor::Turn computing(*text_.executor);
    const LogitsRow logits = text_.logits_row(row);
    std::copy_n(logits.logits, logits.size, out);
}

HiddenRows Session::hidden() {
    const Turn turn(*this);
    HiddenRows found = text_.hidden;
    found.width = text_.model->state_size();
    return found;
}

size_t Session::num_bytes() {
    const OpenTurn turn(*this);
    return text_.state->num_bytes(static_cast<int>(text_.committed.size()));
}

}  // namespace pystaged
