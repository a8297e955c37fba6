#include "text/work.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace pystaged {

// How long passes go on before they ask again whether they are interrupted.
constexpr auto kUninterrupted = std::chrono::milliseconds(50);

// Each of them once.
static std::vector<Session*> checked_sessions(const std::vector<const Work*>& works) {
    std::vector<Session*> sessions;
    for (const Work* work : works) {
        const auto known = std::ranges::find(sessions, work->session);
        require(known == sessions.end(), "works ", known - sessions.begin(), " and ", sessions.size(),
                " are of one session; a pass takes one work of each");
        require(&work->session->model() == &works[0]->session->model(), "works 0 and ", sessions.size(),
                " are of different models; run those of each model apart");
        sessions.push_back(work->session);
    }
    return sessions;
}

static bool is_block(const Work& work) {
    return work.kind == Work::Kind::propose && work.session->model().family().reads == Reads::as_context;
}

static bool reads_target(const Work& work) {
    return !work.hidden.of_draft && work.hidden.width == size_t(work.session->model().numbers().features_width());
}

// Throws std::invalid_argument where the hidden rows are not those that the session's model reads.
static void check_hidden(const Work& work) {
    const Hyperparameters& h = work.session->model().numbers();
    const Reads reads = work.session->model().family().reads;
    require(reads != Reads::joined_with_cells || work.kind == Work::Kind::propose,
            "a draft without keys and values of its own reads and verifies no text");
    require(reads != Reads::as_context || work.kind != Work::Kind::verify, "a draft of blocks verifies no trees");
    const size_t n = work.tokens.size(), given = work.hidden.rows.size(), width = work.hidden.width;
    const size_t wanted = reads == Reads::nothing || is_block(work) ? 0 : n;
    bool fits = width == size_t(h.hidden_width);  // of rows that are joined with tokens, whoever computed them
    std::string read = std::to_string(h.hidden_width);
    if (reads == Reads::beside_tokens) {
        fits = reads_target(work) || (work.hidden.of_draft && fits);
        read = say(h.features_width(), " or ", read);
    } else if (reads == Reads::as_context) {
        fits = reads_target(work);
        read = std::to_string(h.features_width());
    }
    require(given == wanted && (wanted == 0 || fits), "the model reads ", wanted == 0 && n > 0 ? "no" : read,
            " numbers of another one's hidden states with each token; there are ", given, " rows of ", width, " for ",
            n, " tokens");
}

static void check_judged(const Work& work) {
    require(work.k == 0 || work.samplings.size() == 1 || work.samplings.size() == size_t(work.num_judged),
            "candidates need one sampling, or one for each judged row");
    check(work.masks, work.num_judged, work.session->model().numbers().vocab_size);
}

// The works of one call, with their sessions locked. What was not finished is undone.
class Run {
public:
    explicit Run(const std::vector<const Work*>& works)
        : turn_(checked_sessions(works)), executor_(turn_.texts()[0]->executor) {
        for (size_t i = 0; i < works.size(); ++i) {
            Text& text = *turn_.texts()[i];
            tasks_.push_back({*works[i], text, text.pending.size()});
        }
    }
    ~Run() {
        for (const Task& task : tasks_) {
            if (!finished_) {
                task.text.drop_from(task.start);
            }
        }
    }

    void append() {
        for (const auto& [work, text, start] : tasks_) {
            text.check_open();
            if (work.kind == Work::Kind::rank) {
                check_judged(work);
                continue;
            }
            text.check_tokens(work.tokens);
            if (work.kind != Work::Kind::propose || is_block(work)) {
                const bool reads = work.kind == Work::Kind::read;
                text.check_nothing_pending(reads ? "reading tokens" : is_block(work) ? "a block" : "verify");
            }
            const size_t n = work.tokens.size(), judged = work.num_judged;
            require((n > 0 || work.kind == Work::Kind::read) && n == work.parents.size(),
                    "a tree needs at least one token and as many parents as tokens, not ", n, " and ",
                    work.parents.size());
            require(work.num_judged >= 0 && judged <= n, "num_judged must be between 0 and the number of tokens");
            check_judged(work);
            check_hidden(work);
        }
        for (const auto& [work, text, start] : tasks_) {
            const Model& model = *text.model;
            if (work.kind == Work::Kind::rank) {
                continue;
            }
            if (is_block(work)) {
                text.append_block(work.tokens);
            } else if (text.target) {
                text.append_behind_target(work.tokens, work.parents);
            } else {
                text.append(work.tokens, work.parents, work.kind == Work::Kind::read);
            }
            for (size_t i = start; i < text.pending.size(); ++i) {
                text.pending[i].of_target = model.family().reads != Reads::nothing && reads_target(work);
            }
            // To the last of the rows.
            const auto give = [&pending = text.pending](const auto& rows, auto Text::Row::* place) {
                for (size_t i = 0, first = pending.size() - rows.size(); i < rows.size(); ++i) {
                    pending[first + i].*place = rows[i];
                }
            };
            give(work.hidden.rows, &Text::Row::input);
            if (work.embeds) {
                const size_t width = padded(model.numbers().width, kBlock);
                give(HiddenRows::make(work.tokens.size(), width), &Text::Row::embedding);
            }
            if (model.state_size() > 0) {
                const size_t kept = model.taps_all_rows() ? work.tokens.size() : work.num_judged;
                give(HiddenRows::make(kept, model.state_size()), &Text::Row::hidden);
            }
        }
    }
    void compute(const std::function<void()>& interrupted) {
        // Between layers only where they take long: asking may mean waiting for an interpreter that is busy.
        auto asked = std::chrono::steady_clock::now();
        const std::function<void()> seldom = [&] {
            if (std::chrono::steady_clock::now() - asked > kUninterrupted) {
                interrupted();
                asked = std::chrono::steady_clock::now();
            }
        };
        bool first = true;
        for (const std::vector<Piece>& pieces : split()) {
            if (interrupted && !std::exchange(first, false)) {
                interrupted();
            }
            const Executor::Turn computing(*executor_);
            compute_pass(pieces, interrupted ? &seldom : nullptr);
        }
    }
    std::vector<Outcome> finish() {
        std::vector<Outcome> outcomes(tasks_.size());
        {
            const Executor::Turn computing(*executor_);
            follow(outcomes);
            find_candidates(outcomes);
        }
        std::vector<HiddenRows> hidden(tasks_.size());
        for (size_t i = 0; i < tasks_.size(); ++i) {
            const auto& [work, text, start] = tasks_[i];
            const Model& model = *text.model;
            std::vector<int32_t>& path = outcomes[i].followed.path;
            const bool was_read = work.kind == Work::Kind::read, verified = work.kind == Work::Kind::verify;
            if (was_read) {
                path = in_order(static_cast<int>(work.tokens.size()));
            }
            if (work.embeds) {
                outcomes[i].embeddings.width = model.numbers().width;
                for (const int32_t row : path) {
                    outcomes[i].embeddings.rows.push_back(text.pending[row].embedding);
                }
            }
            if (was_read && model.taps_last_row() && !model.taps_all_rows() && !path.empty()) {
                hidden[i] = text.hidden_of({path.back()});
            } else if (model.state_size() > 0 && (verified || (model.taps_all_rows() && was_read))) {
                hidden[i] = text.hidden_of(path);
                if (path.size() < work.tokens.size()) {
                    hidden[i] = hidden[i].copied();
                }
            }
            text.committed.reserve(text.committed.size() + path.size());
        }
        // Nothing fails from here on.
        finished_ = true;
        for (size_t i = 0; i < tasks_.size(); ++i) {
            const Work::Kind kind = tasks_[i].work.kind;
            const std::vector<int32_t>& path = outcomes[i].followed.path;
            if (kind == Work::Kind::read || kind == Work::Kind::verify) {
                tasks_[i].text.commit(path, kind == Work::Kind::read && !path.empty(), std::move(hidden[i]));
            }
        }
        return outcomes;
    }

private:
    struct Task {
        const Work& work;
        Text& text;
        size_t start;  // of the work's rows among those pending
    };
    // Pending rows [first, last) of a text, perhaps of a reading; those from `judged` on get logits.
    struct Piece {
        Text* text;
        bool is_reading;
        size_t first, judged, last;
    };

    // Into as few passes as there can be.
    std::vector<std::vector<Piece>> split() const {
        std::vector<std::vector<Piece>> passes;
        size_t room = 0;
        const auto add = [&](const Task& task) {
            const size_t end = task.text.pending.size(), judged = end - task.work.num_judged;
            for (size_t first = task.start, last; first < end; first = last) {
                if (room == 0 || (is_block(task.work) && room < end - first)) {
                    passes.emplace_back();
                    room = kMostPassRows;
                }
                last = std::min(end, first + room);
                const bool is_reading = task.work.kind == Work::Kind::read;
                passes.back().push_back({&task.text, is_reading, first, std::clamp(judged, first, last), last});
                room -= last - first;
            }
        };
        // Rows of blocks are computed otherwise than context, and a block in one pass.
        for (const bool blocks : {false, true}) {
            for (const Task& task : tasks_) {
                if (is_block(task.work) == blocks) {
                    add(task);
                }
            }
            room = 0;
        }
        return passes;
    }
    // A pass computes logits of its last rows alone, so the rows of all texts that need none come first: a text may
    // have two segments.
    void compute_pass(const std::vector<Piece>& pieces, const std::function<void()>* interrupted) {
        std::vector<Piece> spans = pieces;
        for (size_t i = 0; pieces.size() > 1 && i < pieces.size(); ++i) {
            spans[i].last = pieces[i].judged;
            spans.push_back(pieces[i]);
            spans.back().first = pieces[i].judged;
        }
        Pass pass;
        std::vector<PassRow> rows;
        std::vector<RowContext> contexts;
        for (const Piece& span : spans) {
            Text& text = *span.text;
            if (span.first == span.last) {
                continue;
            }
            const int num_rows = static_cast<int>(span.last - span.first);
            pass.segments.push_back({text.state.get(), pass.num_rows, num_rows, static_cast<int>(text.committed.size()),
                                     static_cast<int>(span.first), span.is_reading,
                                     text.target ? text.target->state.get() : nullptr});
            pass.num_rows += num_rows;
            pass.num_logits += static_cast<int>(span.last - span.judged);
            for (size_t i = span.first; i < span.last; ++i) {
                const Text::Row& row = text.pending[i];
                rows.push_back({row.token, row.position, row.parent, row.hidden.get(), row.embedding.get(),
                                row.input.get(), row.of_target});
                const int length = text.target ? row.direct : std::max(row.position + 1, row.direct);
                contexts.push_back({length, row.direct, row.tail.data()});
                pass.embeds = pass.embeds || row.embedding;
            }
        }
        pass.rows = rows.data();
        pass.contexts = contexts.data();
        const Text& any = *pieces[0].text;  // of one model
        pass.is_context = any.model->family().reads == Reads::as_context && any.pending[pieces[0].first].input;
        pass.interrupted = interrupted;
        std::shared_ptr<Logits> logits;
        if (pass.num_logits > 0) {
            logits = executor_->make_logits(pass.num_logits);
            pass.logits = logits->values.data();
            pass.maxima = logits->maxima.data();
        }
        executor_->backend().compute(pass);
        int slot = 0;
        for (const Piece& span : spans) {
            for (size_t i = span.judged; i < span.last; ++i) {
                span.text->pending[i].logits = logits;
                span.text->pending[i].slot = slot++;
            }
        }
    }
    // One tree is shared out by its rows' logits, several are by trees.
    void follow(std::vector<Outcome>& outcomes) {
        std::vector<size_t> trees;
        bool greedy = true;
        for (size_t i = 0; i < tasks_.size(); ++i) {
            if (tasks_[i].work.kind == Work::Kind::verify) {
                trees.push_back(i);
                greedy = greedy && tasks_[i].work.samplings[0].temperature == 0;
            }
        }
        const int all = tasks_[0].text.model->num_threads_for(trees.size());
        const int threads = trees.size() > 1 && !greedy ? all : 1;
        ThreadPool::shared().run(static_cast<int>(trees.size()), threads, [&](int i, int worker) {
            const auto& [work, text, start] = tasks_[trees[i]];
            outcomes[trees[i]].followed = text.follow(work.samplings[0], work.masks, 0, worker, threads > 1 ? 1 : all);
        });
    }
    void find_candidates(std::vector<Outcome>& outcomes) {
        std::vector<Judged> rows;
        for (size_t i = 0; i < tasks_.size(); ++i) {
            const auto& [work, text, start] = tasks_[i];
            Outcome& outcome = outcomes[i];
            outcome.tokens.resize(size_t(work.num_judged) * work.k);
            outcome.scores.resize(outcome.tokens.size());
            for (int j = 0; work.k > 0 && j < work.num_judged; ++j) {
                const int last = static_cast<int>(text.pending.size()) - work.num_judged + j;
                const int row = work.kind == Work::Kind::rank ? work.rows[j] : last;
                int32_t* tokens = &outcome.tokens[size_t(j) * work.k];
                float* scores = &outcome.scores[size_t(j) * work.k];
                const bool verified = work.kind == Work::Kind::verify;
                try {
                    const Sampling* sampling = verified ? nullptr : &work.samplings[work.samplings.size() == 1 ? 0 : j];
                    const Mask mask = verified ? Mask() : work.masks.row(j);
                    rows.push_back(text.judged(row, sampling, mask, work.k, tokens, scores));
                } catch (const ModelError&) {
                    const Text::Row& judged = text.pending[row];
                    if (!verified && !executor_->is_left_out(*judged.logits, judged.slot)) {
                        throw;  // a guess that is verified need not be finite
                    }
                    std::fill_n(tokens, work.k, -1);
                    std::fill_n(scores, work.k, -INFINITY);
                }
            }
        }
        executor_->find_candidates(rows);
    }

    const Session::Turn turn_;
    const std::shared_ptr<Executor> executor_;  // none where the first session is closed
    std::vector<Task> tasks_;
    bool finished_ = false;
};

std::vector<Outcome> run(const std::vector<const Work*>& works, const std::function<void()>& interrupted) {
    if (works.empty()) {
        return {};
    }
    const Model& model = works[0]->session->model();
    if (!model.llama()) {
        size_t rows = 0;
        for (const Work* work : works) {
            rows += work->tokens.size();
        }
        ThreadPool::shared().wake(model.num_threads_for(rows));  // as early as possible before a pass
    }
    Run run(works);
    run.append();
    run.compute(interrupted);
    return run.finish();
}

}  // namespace pystaged
