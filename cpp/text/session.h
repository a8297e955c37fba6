// The context of one text: evaluates trees of tokens, chooses the accepted path and commits it.
//
// It holds the committed tokens, and after them the pending rows of the current tree, numbered from 0 in the order of
// their evaluation. A call that fails changes neither.
//
// Calls of one session from several threads wait for each other, and passes of a model's sessions take turns; see
// work.h for passes that several share. A call from inside another one of the same thread (a signal handler during a
// prefill), and one in a child of fork() that the parent made in the middle of one, throw std::runtime_error.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "text/executor.h"
#include "text/hidden_rows.h"

namespace pystaged {

// The path that the model's own tokens take through a tree.
struct Followed {
    std::vector<int32_t> path;    // pending rows, the root first
    std::vector<int32_t> tokens;  // the model's own token after each row of the path; the last is the bonus token
    // [path][1 + Sampling::logprobs] where the sampling asks for log-probabilities: of the token, then of the
    // likeliest.
    std::vector<Candidate> logprobs;
};

// The result of a Work; see work.h.
struct Outcome {
    Followed followed;  // of a tree that was verified
    // [rows][k], best first: the candidates after each judged row of a proposal, or the tokens of the largest logits of
    // each row of a verified tree.
    std::vector<int32_t> tokens;
    std::vector<float> scores;  // of the candidates, or these logits
    HiddenRows embeddings;      // of a reading that embeds
};

// A text: its committed tokens and the pending rows after them. Only Session::Turn gives access to it.
struct Text {
    struct Row {
        int32_t token, parent, position;
        int direct;  // see RowContext
        std::vector<int32_t> tail{};
        std::shared_ptr<Logits> logits{};      // or none
        int slot = 0;                          // in them
        std::shared_ptr<float> hidden{};       // or none
        std::shared_ptr<const float> input{};  // another model's hidden states, or none
        bool of_target = false;                // see Pass
        std::shared_ptr<float> embedding{};    // or none
    };

    static constexpr int kDefaultContext = 8192, kMostContext = 1 << 29;
    // Rows beyond the context, so that a tree at its very end still has room for branches.
    static constexpr int kSpareRows = 512;

    Text(std::shared_ptr<const Model> of, int num_positions)
        : model(std::move(of)),
          context(checked_context(*model, num_positions)),
          executor(Executor::of(*model)),
          state(executor->backend().make_state(context + kSpareRows, context)) {}

    static int checked_context(const Model& model, int context) {
        const int most = std::min(model.numbers().max_context, kMostContext);
        require(context >= 0 && context <= most, "n_ctx must be between 1 and the model's ", most, ", not ", context);
        return context == 0 ? std::min(most, kDefaultContext) : context;
    }
    static void check_parent(int row, int parent) {
        require(parent >= -1 && parent < row, "row ", row, " has parent ", parent,
                "; a parent is -1 or an earlier row");
    }
    void check_open() const { require(state != nullptr, "the session is closed"); }
    void check_tokens(const std::vector<int32_t>& tokens) const {
        const int size = model->numbers().vocab_size;
        for (const int32_t token : tokens) {
            require(token >= 0 && token < size, "token ", token, " is outside the vocabulary of ", size);
        }
    }
    void check_nothing_pending(const char* call) const {
        require(pending.empty(), call, " needs a session without pending rows; commit or discard them first");
    }
    // For a row there.
    void check_room(int position) const {
        require<ContextFullError>(position < context, "the context of ", context, " tokens is full");
    }
    int checked_reachable(int length) const {
        require(length >= 0 && size_t(length) <= committed.size(), "cannot rewind ", committed.size(), " tokens to ",
                length);
        return state->reachable(length);
    }
    const Row& checked_row(int row) const {
        require(row >= 0 && size_t(row) < pending.size(), "row ", row, " is not among the ", pending.size(),
                " pending rows");
        return pending[row];
    }
    void append(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents, bool are_read) {
        const int start = static_cast<int>(committed.size());
        for (size_t i = 0; i < tokens.size(); ++i) {
            const int index = static_cast<int>(pending.size()), parent = parents[i];
            check_parent(index, parent);
            Row row{tokens[i], parent, start, start};
            if (parent >= 0) {
                const Row& before = pending[parent];
                row.position = before.position + 1;
                row.direct = before.direct;
                row.tail = before.tail;
            }
            require(index < model->most_pending() || are_read, "a model with recurrent layers has ",
                    model->most_pending(), " pending rows at most; commit or discard some before more are evaluated");
            require(i == 0 || parent == index - 1 || !model->is_chained(),
                    "llama.cpp evaluates chains of a model with recurrent layers: row ", index, " has parent ", parent,
                    ", not the row before it");
            const int cell = start + index;
            check_room(row.position);
            require<ContextFullError>(cell < state->room(),
                                      "the tree has more rows than the context has room for; at most ",
                                      state->room() - start, " fit now");
            if (row.tail.empty() && cell == row.position) {
                row.direct = row.position + 1;
            } else {
                row.tail.push_back(cell);
            }
            pending.push_back(std::move(row));
        }
    }
    // Rows at the next positions that see the context and each other, those before them or all.
    void append_block(const std::vector<int32_t>& tokens) {
        const int start = static_cast<int>(committed.size()), n = static_cast<int>(tokens.size());
        require(n <= kMostPassRows, "a block has at most ", kMostPassRows, " rows, not ", n);
        check_room(start + n - 1);
        for (int i = 0; i < n; ++i) {
            const int seen = start + (model->numbers().is_causal ? i + 1 : n);
            pending.push_back({tokens[i], i - 1, start + i, seen});
        }
    }
    // Rows at the position behind the target's text that see its cells, and not each other.
    void append_behind_target(const std::vector<int32_t>& tokens, const std::vector<int32_t>& parents) {
        require(target->state != nullptr, "the session of the draft's target is closed");
        const int length = static_cast<int>(target->committed.size());
        require(length > 0, "the session of the draft's target has no tokens to attend to");
        check_room(length);
        for (size_t i = 0; i < tokens.size(); ++i) {
            const int index = static_cast<int>(pending.size());
            check_parent(index, parents[i]);
            require<ContextFullError>(index < state->room(), "a tree has at most ", state->room(), " rows here");
            pending.push_back({tokens[i], parents[i], length, length});
        }
    }
    void drop_from(size_t first) {
        pending.resize(std::min(first, pending.size()));
        if (state) {
            state->drop(static_cast<int>(first));
        }
    }
    Followed follow(const Sampling& sampling, const Masks& masks, int root, int worker, int num_threads) {
        checked_row(root);
        Sampler& sampler = executor->sampler(worker);
        Followed result;
        for (int row = root; row >= 0;) {
            const Mask mask = masks.row(row);
            LogitsRow logits;
            try {
                logits = logits_row(row);
            } catch (const ModelError&) {
                if (row == root) {
                    throw;
                }
                break;  // see below
            }
            const int32_t token = sampler.choose(sampling, sampler.masked(logits, mask), pending[row].position + 1,
                                                 num_threads, prefix(&sampling, row));
            if (token < 0) {
                require(row != root,
                        "logit_bias, min_tokens, ignore_eos and the grammar together exclude all tokens there are; "
                        "allow one at least");
                break;  // the text may end before this row is judged, so that it is the root's turn to throw
            }
            result.path.push_back(row);
            result.tokens.push_back(token);
            if (sampling.logprobs >= 0) {
                const auto& found = sampler.log_probabilities(logits, token, sampling.logprobs, num_threads);
                result.logprobs.insert(result.logprobs.end(), found.begin(), found.end());
            }
            const int parent = row;
            row = -1;
            for (size_t child = parent + 1; child < pending.size(); ++child) {
                if (pending[child].parent == parent && pending[child].token == token) {
                    row = static_cast<int>(child);
                    break;
                }
            }
        }
        return result;
    }
    // Commits a path, for which there is room in `committed`: nothing fails.
    void commit(const std::vector<int32_t>& path, bool was_read, HiddenRows kept) {
        state->keep(static_cast<int>(committed.size()), path, was_read);
        for (const int32_t row : path) {
            committed.push_back(pending[row].token);
        }
        hidden = std::move(kept);
        pending.clear();
    }
    HiddenRows hidden_of(const std::vector<int32_t>& rows) const {
        HiddenRows found{model->state_size(), {}, model->family().reads != Reads::nothing};
        for (const int32_t row : rows) {
            found.rows.push_back(checked_row(row).hidden);
            require(found.rows.back() != nullptr, "nothing was kept of the hidden states of row ", row);
        }
        return found;
    }
    LogitsRow logits_row(int row) {
        const Row& judged = checked_row(row);
        require(judged.logits != nullptr, "row ", row, " was evaluated without logits");
        return executor->row(*judged.logits, judged.slot);
    }
    Judged judged(int row, const Sampling* sampling, const Mask& mask, int k, int32_t* tokens, float* scores) {
        return {logits_row(row), mask, pending[row].position + 1, sampling, k, tokens, scores, prefix(sampling, row)};
    }
    // The tokens up to and including a row's, where there are rules.
    Prefix prefix(const Sampling* sampling, int row) const {
        Prefix result;
        if (sampling && sampling->rules) {
            result.text = committed.data();
            result.length = committed.size();
            for (int i = row; i >= 0; i = pending[i].parent) {
                result.path.push_back(pending[i].token);
            }
        }
        return result;
    }

    std::shared_ptr<const Model> model;
    const Text* target = nullptr;  // whose keys and values its rows attend to, of a draft without its own
    int context;
    std::shared_ptr<Executor> executor;
    std::unique_ptr<TextState> state;  // null once closed
    std::vector<int32_t> committed;
    std::vector<Row> pending;
    HiddenRows hidden;  // see Session::hidden()
};

class Session : public std::enable_shared_from_this<Session> {
public:
    // One call on some sessions: their locks and those of their targets, and the floating-point environment it computes
    // in. Who computes is Executor::Turn's matter.
    class Turn {
    public:
        explicit Turn(Session& session) : Turn(std::vector<Session*>{&session}) {}
        // In the order of their addresses, so that two calls never wait for each other.
        explicit Turn(std::vector<Session*> sessions) : Turn() {
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
        ~Turn() {
            for (Session* session : entered_) {
                session->leave();
            }
        }

        // Of each session, in the order they were named.
        const std::vector<Text*>& texts() const { return texts_; }
        // That of one session.
        Text& text() const { return *texts_[0]; }

    private:
        Turn() = default;

        std::vector<std::shared_ptr<Session>> targets_;  // of drafts, which another thread may be about to close
        std::vector<Session*> entered_;
        std::vector<Text*> texts_;
        FloatEnvironment floats_;
    };

    // On one session, which must be open.
    struct OpenTurn : Turn {
        explicit OpenTurn(Session& session) : Turn(session) { text().check_open(); }
    };

    // `context` positions, 0 for as many as the model was trained for, but no more than the default; more than it
    // was trained for are refused with std::invalid_argument. A draft without keys and values of its own needs the
    // session of its target, whose committed text all its rows see, at the position behind it; it commits nothing.
    Session(std::shared_ptr<const Model> model, int context, std::shared_ptr<Session> target = nullptr)
        : target_(checked_target(*model, std::move(target))), text_(std::move(model), context) {
        text_.target = target_ ? &target_->text_ : nullptr;
    }

    // Of a draft that reads its target's hidden states: the k likeliest next tokens after each of these rows, best
    // first, as the draft's head numbers them, and their log-probabilities. `before` has the token before each, or
    // nothing where the draft has no Markov weights.
    Outcome likeliest(const std::vector<int32_t>& rows, const std::vector<int32_t>& before, int k) {
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
    // Walks from row `root` for as long as the model's own token is among a row's children, and has one after it.
    // Throws std::invalid_argument where rules and masks leave none after the root.
    Followed follow(const Sampling& sampling, int root) {
        const OpenTurn turn(*this);
        const Executor::Turn computing(*text_.executor);
        return text_.follow(sampling, {}, root, 0, text_.model->num_threads_for(1));
    }

    // Keeps these pending rows, a path from the committed end on, and drops the rest.
    void commit(const std::vector<int32_t>& path) {
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
    // Drops the pending rows.
    void discard() { OpenTurn(*this).text().drop_from(0); }
    // Recurrent layers are to keep their states after so many tokens when the text reaches them, for rewind() and
    // fork(); see TextState.
    void keep_states(std::vector<int> lengths, int most, int anchor) {
        const OpenTurn turn(*this);
        require(most >= 0, "most must be at least 0, not ", most);
        std::ranges::sort(lengths);
        lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
        text_.state->keep_states(lengths, most, anchor);
    }
    // The longest beginning of the text, of `length` tokens at most, that it can go back to: layers with a window do
    // not keep everything behind it, see KeptCells, and recurrent ones only some states.
    int reachable(int length) { return OpenTurn(*this).text().checked_reachable(length); }
    // Goes back to the first `length` committed tokens, or as many of them as are reachable, and drops all else; gives
    // memory back where that is much. Returns how many are left; the caller reads the others again.
    int rewind(int length) {
        const OpenTurn turn(*this);
        const int reached = text_.state->cut(text_.checked_reachable(length));
        text_.pending.clear();
        text_.hidden = {};
        text_.committed.resize(reached);
        return reached;
    }
    // Another session that begins with the first `length` committed tokens, or as many of them as are reachable;
    // nothing is computed.
    std::unique_ptr<Session> fork(int length) {
        const OpenTurn turn(*this);
        require(length >= 0 && size_t(length) <= text_.committed.size(), "cannot fork after ", length, " tokens of ",
                text_.committed.size());
        auto session = std::make_unique<Session>(text_.model, text_.context, target_);
        const int reached = session->text_.state->copy(*text_.state, length);
        session->text_.committed.assign(text_.committed.begin(), text_.committed.begin() + reached);
        return session;
    }
    // Goes on as if the context held `length` tokens, all like the last one, without computing them: for timing alone.
    // What is evaluated behind them takes the time that it would take and means nothing; rewind(0) ends the pretence.
    void stretch(int length) {
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
    // Frees the context; every later call throws std::invalid_argument.
    void close() {
        const Turn turn(*this);
        text_.pending = {};
        text_.committed = {};
        text_.hidden = {};
        text_.state.reset();
        text_.executor.reset();
        text_.target = nullptr;
        std::atomic_store(&target_, std::shared_ptr<Session>());
    }

    // Copies one row's logits, out[vocab_size].
    void logits(int row, float* out) {
        const OpenTurn turn(*this);
        const Executor::Turn computing(*text_.executor);
        const LogitsRow logits = text_.logits_row(row);
        std::copy_n(logits.logits, logits.size, out);
    }
    // What the model taps, [taps][width], of the rows that the last call committed, if that was Work::verify or the
    // model taps all rows; of the last row of a reading, if it taps that; else of none.
    HiddenRows hidden() {
        const Turn turn(*this);
        HiddenRows found = text_.hidden;
        found.width = text_.model->state_size();
        return found;
    }
    // Of these pending rows, which were judged, or the model taps all.
    HiddenRows hidden(const std::vector<int32_t>& rows) { return OpenTurn(*this).text().hidden_of(rows); }
    std::vector<int32_t> tokens() { return Turn(*this).text().committed; }
    // Bytes that the keys and values of the committed tokens take.
    size_t num_bytes() {
        const OpenTurn turn(*this);
        return text_.state->num_bytes(static_cast<int>(text_.committed.size()));
    }
    int num_pending() { return static_cast<int>(Turn(*this).text().pending.size()); }
    bool closed() { return !Turn(*this).text().state; }
    int context() const { return text_.context; }
    const Model& model() const { return *text_.model; }

private:
    // The session whose keys and values a draft attends to, or none where it has its own.
    static std::shared_ptr<Session> checked_target(const Model& model, std::shared_ptr<Session> target) {
        if (!model.borrows_cells()) {
            return nullptr;
        }
        require(target != nullptr, "a draft without keys and values of its own needs its target's session");
        require(&target->model() == &model.target(), "the session is of another model than the draft's target");
        return target;
    }
    void enter() {
        require<std::runtime_error>(
            caller_ != std::this_thread::get_id(),
            "the session is in a call that this one interrupts; in a signal handler, set a flag or raise instead");
        const int process = process_id();
        for (int holder = 0; !process_.compare_exchange_strong(holder, process); holder = 0) {
            require<std::runtime_error>(holder == process,
                                        "the process forked while the session was in a call; open another session");
            process_.wait(holder);
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
    void leave() {
        caller_ = std::thread::id();
        process_ = 0;
        process_.notify_all();
    }

    // The process in which a thread has its turn, or 0. One word, so that a child of fork() finds a whole turn or none.
    std::atomic<int> process_{0};
    std::atomic<std::thread::id> caller_{};  // whose turn it is
    std::shared_ptr<Session> target_;  // of a draft without keys and values, until it is closed, else none; atomic
    Text text_;
};

}  // namespace pystaged
