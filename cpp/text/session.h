// The context of one text: evaluates trees of tokens, chooses the accepted path and commits it.
//
// It holds the committed tokens, and after them the pending rows of the current tree, numbered from 0 in the order of
// their evaluation. A call that fails changes neither.
//
// Calls of one session from several threads wait for each other, and passes of a model's sessions take turns; see
// work.h for passes that several share. A call from inside another one of the same thread (a signal handler during a
// prefill), and one in a child of fork() that the parent made in the middle of one, throw std::runtime_error.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "machine/pool.h"
#include "text/executor.h"
#include "text/hidden_rows.h"

namespace pystaged {

// The path that the model's own tokens take through a tree.
struct Followed {
    std::vector<int32_t> path;    // pending rows, the root first
    std::vector<int32_t> tokens;  // the model's own token after each row of the path; the last is the bonus token
    // Where the sampling asks for log-probabilities, for each row of the path that of its token, then the likeliest.
    std::vector<std::vector<Candidate>> logprobs;
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

// The experts that rows use, [rows][ExpertNumbers::num_bytes()]: bit l * count + e of a row is set where it uses expert
// e of the l-th layer that has any. `distinct`: how many the whole pass used, over all layers and texts; of a call of
// several passes, the last.
struct UsedExperts {
    std::vector<uint8_t> bits;
    int distinct = 0;
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

    static constexpr int kDefaultContext = 8192;
    // Rows beyond the context, so that a tree at its very end still has room for branches.
    static constexpr int kSpareRows = 512;

    Text(std::shared_ptr<const Model> of, int num_positions)
        : model(std::move(of)),
          context(checked_context(*model, num_positions)),
          executor(Executor::of(*model)),
          state(executor->backend().make_state(context + kSpareRows, context)) {}

    static int checked_context(const Model& model, int context) {
        const int most = model.numbers().max_context;
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
        const int most = executor->backend().max_rows();
        require(n <= most, "a block has at most ", most, " rows, not ", n);
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
    void drop_from(size_t first) { pending.resize(std::min(first, pending.size())); }
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
                result.logprobs.push_back(sampler.log_probabilities(logits, token, sampling.logprobs, num_threads));
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
        drop_from(0);
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
    HiddenRows hidden;    // see Session::hidden()
    UsedExperts experts;  // see Session::experts()
};

class Session {
public:
    // One call on some sessions: their locks and those of their targets, and the floating-point environment it computes
    // in. Who computes is Executor::Turn's matter.
    class Turn {
    public:
        explicit Turn(Session& session) : Turn(std::vector<Session*>{&session}) {}
        explicit Turn(std::vector<Session*> sessions);
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;

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
    Session(std::shared_ptr<const Model> model, int context, std::shared_ptr<Session> target = nullptr);

    // Of a draft that reads its target's hidden states: the k likeliest next tokens after each of these rows, best
    // first, as the draft's head numbers them, and their log-probabilities. `before` has the token before each, or
    // nothing where the draft has no Markov weights.
    Outcome likeliest(const std::vector<int32_t>& rows, const std::vector<int32_t>& before, int k);
    // Walks from row `root` for as long as the model's own token is among a row's children, and has one after it.
    // Throws std::invalid_argument where rules and masks leave none after the root.
    Followed follow(const Sampling& sampling, int root);

    // Keeps these pending rows, a path from the committed end on, and drops the rest.
    void commit(const std::vector<int32_t>& path);
    // Drops the pending rows.
    void discard() { OpenTurn(*this).text().drop_from(0); }
    // Recurrent layers are to keep their states after so many tokens when the text reaches them, for rewind() and
    // fork(); see TextState.
    void keep_states(std::vector<int> lengths, int most, int anchor);
    // The longest beginning of the text, of `length` tokens at most, that it can go back to: layers with a window do
    // not keep everything behind it, see KeptCells, and recurrent ones only some states.
    int reachable(int length) { return OpenTurn(*this).text().checked_reachable(length); }
    // Goes back to the first `length` committed tokens, or as many of them as are reachable, and drops all else; gives
    // memory back where that is much. Returns how many are left; the caller reads the others again.
    int rewind(int length);
    // Another session that begins with the first `length` committed tokens, or as many of them as are reachable;
    // nothing is computed.
    std::unique_ptr<Session> fork(int length);
    // Goes on as if the context held `length` tokens, all like the last one, without computing them: for timing alone.
    // What is evaluated behind them takes the time that it would take and means nothing; rewind(0) ends the pretence.
    void stretch(int length);
    // Frees the context; every later call throws std::invalid_argument.
    void close();

    // Copies one row's logits, out[vocab_size].
    void logits(int row, float* out);
    // What the model taps, [taps][width], of the rows that the last call committed, if that was Work::verify or the
    // model taps all rows; of the last row of a reading, if it taps that; else of none.
    HiddenRows hidden();
    // Of these pending rows, which were judged, or the model taps all.
    HiddenRows hidden(const std::vector<int32_t>& rows) { return OpenTurn(*this).text().hidden_of(rows); }
    // Those of the rows of the last call that evaluated any; none unless the model is a mixture of experts. The last
    // layer of a row that was only read uses none.
    UsedExperts experts() { return Turn(*this).text().experts; }
    std::vector<int32_t> tokens() { return Turn(*this).text().committed; }
    // Bytes that the keys and values of the committed tokens take.
    size_t num_bytes();
    int num_pending() { return static_cast<int>(Turn(*this).text().pending.size()); }
    bool closed() { return !Turn(*this).text().state; }
    int context() const { return text_.context; }
    const Model& model() const { return *text_.model; }

private:
    void enter();
    void leave();

    // The process in which a thread has its turn, or 0. One word, so that a child of fork() finds a whole turn or none.
    std::atomic<int> process_{0};
    std::atomic<std::thread::id> caller_{};  // whose turn it is
    std::shared_ptr<Session> target_;  // of a draft without keys and values, until it is closed, else none; atomic
    Text text_;
};

}  // namespace pystaged
