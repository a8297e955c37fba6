// Passes by libllama, for every model that it has, on any device: not exact.
//
// One of its contexts holds all texts, each under a sequence id of its own. The leaves of a tree have further ones, so
// that each is a sequence that begins with the text; a row carries the ids of all leaves below it. There are 256: rows
// that lead to no leaf with an id are left out, and their logits are -inf. Texts with recurrent layers are chains: each
// has one id, and a second one for a copy of its state from before the rows of a draft model's proposal.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "machine/pool.h"
#include "pass/backend.h"
#include "state/kept_states.h"
#include "weights/product.h"

namespace pystaged {

namespace {

constexpr int kMostIds = 256;    // of libllama
constexpr int kCells = 256;      // a context has whole runs of them
constexpr size_t kFewRows = 16;  // that may be read once more beside a text's own rows
constexpr llama_state_seq_flags kPartial = LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY;

size_t begins_alike(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
    return std::mismatch(a.begin(), a.begin() + std::min(a.size(), b.size()), b.begin()).first - a.begin();
}

// As libllama takes it.
struct Batch {
    std::vector<llama_token> tokens;
    std::vector<llama_pos> positions;
    std::vector<int32_t> num_ids;
    std::vector<std::vector<llama_seq_id>> held_ids;
    std::vector<llama_seq_id*> ids;
    std::vector<int8_t> outputs;

    // Returns where it is.
    int add(int32_t token, int position, std::vector<llama_seq_id> of, bool is_output) {
        tokens.push_back(token);
        positions.push_back(position);
        num_ids.push_back(static_cast<int32_t>(of.size()));
        held_ids.push_back(std::move(of));
        ids.push_back(held_ids.back().data());
        outputs.push_back(is_output);
        return static_cast<int>(tokens.size()) - 1;
    }
};

struct LlamaText;

// Rows of a text in a pass.
struct Part {
    LlamaText* text;
    int first;  // of its pending rows
    bool is_reading;
    std::vector<int> rows;  // of the pass
    bool rolled_back = false;

    int num_judged(const Pass& pass) const {
        const auto is_judged = [&](int row) { return row >= pass.num_rows - pass.num_logits; };
        return static_cast<int>(std::ranges::count_if(rows, is_judged));
    }
};

struct LlamaPass : Backend {
    explicit LlamaPass(const Model& model)
        : Backend(model),
          process_(process_id()),
          is_recurrent_(model.llama()->is_recurrent()),
          is_guarded_(model.llama()->has_windows() && !is_recurrent_),
          num_back_(model.llama()->num_back()) {}
    ~LlamaPass() override {
        const LogCapture quiet;
        context_.reset();
    }

    // The first makes the context: of so many positions for all texts as Model::reserve() says, else twice its own.
    std::unique_ptr<TextState> make_state(int num_rows, int context) override;
    void compute(const Pass& pass) override;

    using Backend::model_;
    std::vector<Part> parts_of(const Pass& pass) const;
    std::vector<std::vector<int>> go_on(Part& part, const Pass& pass, Batch& batch);
    // In one batch of libllama.
    void compute(const Pass& pass, Part* parts, size_t num_parts);
    void write_outputs(const Pass& pass, const std::vector<int>& rows, const std::vector<int>& at) {
        const Hyperparameters& h = model_.numbers();
        const int first_judged = pass.num_rows - pass.num_logits;
        std::vector<std::pair<int, const float*>> judged;
        for (const int row : rows) {
            float* const embedding = pass.rows[row].embedding;
            if (embedding && at[row] >= 0) {
                std::copy_n(llama_get_embeddings_ith(context_.get(), at[row]), h.width, embedding);
            }
            if (row >= first_judged) {
                const float* values = at[row] < 0 ? nullptr : llama_get_logits_ith(context_.get(), at[row]);
                judged.emplace_back(row - first_judged, values);
            }
        }
        const size_t vocab = h.vocab_size, stride = h.logits_stride();
        const int count = static_cast<int>(judged.size());
        ThreadPool::shared().run(count, model_.num_threads_for(count), [&](int i, int) {
            const auto& [index, values] = judged[i];
            float *logits = pass.logits + index * stride, *maxima = pass.maxima + index * stride / kRun;
            if (values) {
                std::copy_n(values, vocab, logits);
                find_maxima(model_.kernel(), logits, static_cast<int>(vocab), static_cast<int>(stride), maxima);
            } else {
                std::fill_n(logits, stride, -INFINITY);
                std::fill_n(maxima, stride / kRun, -INFINITY);
            }
        });
    }
    // Throws std::runtime_error in a child of fork().
    void check_process() const {
        require<std::runtime_error>(process_ == process_id(),
                                    "the process forked since the session was opened; open another session");
    }
    // Takes the ids of texts that are gone; the caller has texts_mutex_.
    void free_released() {
        for (const int id : std::exchange(released_, {})) {
            llama_memory_seq_rm(memory_, id, -1, -1);
            free_ids_.push_back(id);
        }
    }
    // An id that no text uses, perhaps an idle leaf's; -1 where there is none.
    int take_id();
    void decode(Batch& batch);
    // Computes the first `length` tokens of a text, without outputs; libllama may hold the first of them already.
    void read(LlamaText& text, const std::vector<int32_t>& tokens, size_t length);
    static bool is_interrupted(void* self) {
        auto& pass = *static_cast<LlamaPass*>(self);
        try {
            if (pass.interrupted_ && !pass.interruption_) {
                pass.interrupted_thread_ = std::this_thread::get_id();
                (*pass.interrupted_)();
            }
        } catch (...) {
            pass.interruption_ = std::current_exception();
        }
        pass.interrupted_thread_ = std::thread::id();
        return pass.interruption_ != nullptr;
    }

    // Whether the caller is a signal handler that interrupts a pass.
    bool interrupts() const { return interrupted_thread_ == std::this_thread::get_id(); }
    std::unique_lock<std::mutex> lock() {
        require<std::runtime_error>(
            !interrupts(),
            "the model is in a pass that this call interrupts; in a signal handler, set a flag or raise instead");
        return process_ == process_id() ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();
    }

    std::mutex mutex_;        // of the context, of ids and of all texts
    std::mutex texts_mutex_;  // of texts_ and released_
    std::vector<LlamaText*> texts_;
    std::vector<int> released_;  // ids of texts that are gone
    const int process_;
    const bool is_recurrent_, is_guarded_;
    const int num_back_;
    LlamaContextPtr context_;
    llama_memory_t memory_ = nullptr;
    std::vector<int> free_ids_;
    const std::function<void()>* interrupted_ = nullptr;
    std::atomic<std::thread::id> interrupted_thread_{};
    std::exception_ptr interruption_;
};

struct LlamaText : TextState {
    // A sequence of libllama: the first `length` committed tokens, and the pending rows to `tail`, -1 for none.
    struct Sequence {
        int id;
        int length = 0, tail = -1;
        bool is_leaf = false;  // of the pending rows
    };
    struct Row {
        int32_t token, parent, position;
        int id = -1;  // of a sequence that has it, -1 where it was left out
    };

    LlamaText(LlamaPass& pass, int num_rows) : pass_(pass), num_rows_(num_rows) {
        int id = pass.take_id();
        if (pass.is_guarded_ && id >= 0 && (guard_ = pass.take_id()) < 0) {
            pass.free_ids_.push_back(std::exchange(id, -1));
        }
        require<DeviceError>(id >= 0, "llama.cpp has room for the states of no more texts at once; end one first");
        sequences_.push_back({id});
        const std::lock_guard<std::mutex> lock(pass.texts_mutex_);
        pass.texts_.push_back(this);
    }
    ~LlamaText() override {
        if (pass_.process_ != process_id()) {
            return;  // a child of fork(), where somebody may hold the lock for ever
        }
        // Not mutex_: a pass that has it may wait for Python, which may be waiting here.
        const std::lock_guard<std::mutex> lock(pass_.texts_mutex_);
        for (const Sequence& sequence : sequences_) {
            pass_.released_.push_back(sequence.id);
        }
        for (const int id : {shadow_, guard_}) {
            if (id >= 0) {
                pass_.released_.push_back(id);
            }
        }
        pass_.texts_.erase(std::find(pass_.texts_.begin(), pass_.texts_.end(), this));
    }
    int num_committed() const { return static_cast<int>(committed_.size()); }
    // Committed tokens, and pending rows up to one.
    std::vector<int32_t> tokens_to(int row) const {
        std::vector<int32_t> tokens = committed_;
        for (; row >= 0; row = rows_[row].parent) {
            tokens.push_back(rows_[row].token);
        }
        std::reverse(tokens.begin() + committed_.size(), tokens.end());
        return tokens;
    }
    // Forgets all that libllama had of it.
    void forget() {
        const auto give_back = [&](int id) {
            llama_memory_seq_rm(pass_.memory_, id, -1, -1);
            pass_.free_ids_.push_back(id);
        };
        for (size_t i = 1; i < sequences_.size(); ++i) {
            give_back(sequences_[i].id);
        }
        if (shadow_ >= 0) {
            give_back(std::exchange(shadow_, -1));
            shadow_length_ = 0;
        }
        sequences_.resize(1);
        sequences_[0] = {sequences_[0].id};
        for (Row& row : rows_) {
            row.id = -1;
        }
        held_.clear();
        last_rows_ = 0;
        kept_.cut(0);
    }
    void drop(int first) override {
        if (pass_.process_ != process_id() || pass_.interrupts()) {
            return;  // in a child of fork() nothing is here to drop, in a signal handler nothing has been computed
        }
        const std::lock_guard<std::mutex> lock(pass_.mutex_);
        drop_rows(first);
    }
    void drop_rows(int first) {
        unguard(num_committed() + first);
        kept_.cut(num_committed() + first);
        for (Sequence& sequence : sequences_) {
            if (sequence.tail < first) {
                continue;
            }
            while (sequence.tail >= first) {
                sequence.tail = rows_[sequence.tail].parent;
            }
            const int end = sequence.tail < 0 ? num_committed() : rows_[sequence.tail].position + 1;
            llama_memory_seq_rm(pass_.memory_, sequence.id, end, -1);
            sequence.is_leaf = sequence.tail >= 0;
        }
        rows_.resize(std::min<size_t>(first, rows_.size()));
    }
    void guard(int first, int last) {
        if (guard_ >= 0) {
            llama_memory_seq_cp(pass_.memory_, sequences_[0].id, guard_, first, last);
        }
    }
    void unguard(int first) {
        if (guard_ >= 0) {
            llama_memory_seq_rm(pass_.memory_, guard_, first, -1);
        }
    }
    // The index of a sequence that ends with a pending row, or the committed tokens; -1 where there is none.
    int sequence_behind(int row) {
        if (row >= 0 && rows_[row].id < 0) {
            return -1;
        }
        const auto find = [&](const auto& fits) {
            return static_cast<int>(std::ranges::find_if(sequences_, fits) - sequences_.begin());
        };
        int found = find([&](const Sequence& s) { return s.is_leaf && s.tail == row; });
        const bool is_there = found < static_cast<int>(sequences_.size());
        found = is_there ? found : find([](const Sequence& s) { return !s.is_leaf; });
        if (found == static_cast<int>(sequences_.size())) {
            const int id = pass_.take_id();
            if (id < 0) {
                return -1;
            }
            sequences_.push_back({id});
        }
        Sequence& sequence = sequences_[found];
        const int length = num_committed();
        if (sequence.length < length) {
            llama_memory_seq_cp(pass_.memory_, sequences_[0].id, sequence.id, sequence.length, length);
            sequence.length = length;
        }
        if (row >= 0 && !is_there) {
            llama_memory_seq_cp(pass_.memory_, rows_[row].id, sequence.id, length, rows_[row].position + 1);
        }
        sequence.is_leaf = true;
        return found;
    }
    // Reads what libllama lacks of the committed tokens. Sequence ids for pending rows from `first` on, none for those
    // that are left out.
    std::vector<std::vector<int>> find_ids(int first) {
        pass_.read(*this, committed_, committed_.size());
        const int end = static_cast<int>(rows_.size());
        std::vector<std::vector<int>> ids(end - first);
        std::vector<char> has_children(end - first);
        for (int row = first; row < end; ++row) {
            if (rows_[row].parent >= first) {
                has_children[rows_[row].parent - first] = true;
            }
        }
        for (int leaf = first; leaf < end; ++leaf) {
            int behind = leaf;
            while (behind >= first) {
                behind = rows_[behind].parent;
            }
            const int index = has_children[leaf - first] ? -1 : sequence_behind(behind);
            if (index < 0) {
                continue;
            }
            Sequence& sequence = sequences_[index];
            sequence.tail = leaf;
            for (int row = leaf; row >= first; row = rows_[row].parent) {
                ids[row - first].push_back(sequence.id);
                if (rows_[row].id < 0) {
                    rows_[row].id = sequence.id;
                }
            }
        }
        return ids;
    }
    void keep(int length, const std::vector<int32_t>& path, bool) override {
        pass_.check_process();
        const auto lock = pass_.lock();
        const int end = length + static_cast<int>(path.size());
        Sequence& own = sequences_[0];
        const int last = path.empty() ? -1 : path.back(), source = last < 0 ? own.id : rows_[last].id;
        if (!pass_.is_recurrent_ && own.length == length) {
            if (own.tail != last) {
                llama_memory_seq_rm(pass_.memory_, own.id, source == own.id ? end : length, -1);
            }
            if (source >= 0 && source != own.id) {
                llama_memory_seq_cp(pass_.memory_, source, own.id, length, end);
            }
            own.length = source >= 0 ? end : length;
            guard(length, own.length);
            for (size_t i = 1; i < sequences_.size(); ++i) {
                if (sequences_[i].is_leaf) {
                    llama_memory_seq_rm(pass_.memory_, sequences_[i].id, length, -1);
                    sequences_[i].is_leaf = false;
                }
            }
        }
        for (Sequence& sequence : sequences_) {
            sequence.tail = -1;
        }
        for (const int32_t row : path) {
            committed_.push_back(rows_[row].token);
        }
        rows_.clear();
    }
    int reachable(int length) const override {
        if (!pass_.is_recurrent_ || pass_.process_ != process_id()) {
            return length;
        }
        const auto lock = pass_.lock();
        const int held = static_cast<int>(held_.size()), most = std::min(pass_.num_back_, last_rows_ - 1);
        const bool is_near = held <= length || held - length <= most;
        if (is_near && begins_alike(held_, committed_) >= static_cast<size_t>(std::min(held, length))) {
            return length;
        }
        const int alike = static_cast<int>(std::min(begins_alike(held_, committed_), static_cast<size_t>(length)));
        return std::max(kept_.reachable(alike), shadow_length_ <= alike ? shadow_length_ : 0);
    }
    int cut(int length) override {
        pass_.check_process();
        length = reachable(length);
        const auto lock = pass_.lock();
        drop_rows(0);
        committed_.resize(length);
        kept_.cut(length);
        unguard(length);
        for (Sequence& sequence : sequences_) {
            if (sequence.length > length) {
                llama_memory_seq_rm(pass_.memory_, sequence.id, length, -1);
                sequence.length = length;
            }
        }
        return length;
    }
    int copy(const TextState& other, int length) override {
        const auto& from = static_cast<const LlamaText&>(other);
        length = from.reachable(length);
        const auto lock = pass_.lock();
        committed_.assign(from.committed_.begin(), from.committed_.begin() + length);
        if (&from.pass_ != &pass_) {
            return length;  // in a child of fork(), where nothing has been read
        }
        if (!pass_.is_recurrent_) {
            sequences_[0].length = std::min(length, from.sequences_[0].length);
            llama_memory_seq_cp(pass_.memory_, from.sequences_[0].id, sequences_[0].id, 0, sequences_[0].length);
            guard(0, sequences_[0].length);
            return length;
        }
        // States at other lengths are found there when the next pass is computed.
        llama_memory_seq_cp(pass_.memory_, from.sequences_[0].id, sequences_[0].id, -1, -1);
        held_ = from.held_;
        from.last_rows_ = 0;  // libllama would take rows back for both
        kept_.set(from.kept_.all());
        return length;
    }
    int room() const override { return num_rows_; }
    // Kept states are in this machine's memory, not the device's.
    void keep_states(const std::vector<int>& lengths, int most, int anchor) override {
        const auto lock = pass_.lock();
        kept_.ask(lengths, most, anchor);
    }
    // The next pass reads the added tokens.
    void stretch(int, int longer) override {
        pass_.check_process();
        const auto lock = pass_.lock();
        committed_.resize(longer, committed_.back());
    }
    size_t num_bytes(int length) const override {
        const Model& model = pass_.model_;
        const auto lock = pass_.lock();
        return model.cell_bytes() * length + model.state_bytes() + kept_.all().size() * model.kept_state_bytes();
    }
    // Of recurrent layers: makes the text's own sequence one that begins like these tokens. Returns whether libllama
    // took back the last rows.
    bool go_back(const std::vector<int32_t>& tokens) {
        const int id = sequences_[0].id, length = static_cast<int>(begins_alike(held_, tokens));
        const int rows = static_cast<int>(held_.size()) - length;
        if (rows == 0) {
            return false;
        }
        const bool is_near = rows <= std::min(pass_.num_back_, std::exchange(last_rows_, 0) - 1);
        if (is_near && llama_memory_seq_rm(pass_.memory_, id, length, -1)) {
            end_at(length);
            return true;
        }
        const int kept = kept_.reachable(length);
        if (shadow_length_ <= length && shadow_length_ > kept) {
            llama_memory_seq_rm(pass_.memory_, id, -1, -1);
            llama_memory_seq_cp(pass_.memory_, shadow_, id, -1, -1);
            end_at(shadow_length_);
            return false;
        }
        const KeptStates::Values* values = kept_.at(kept);
        const size_t bytes = values ? values->size() * sizeof(float) : 0;
        const auto* data = values ? reinterpret_cast<const uint8_t*>(values->data()) : nullptr;
        if (values && llama_state_seq_set_data_ext(pass_.context_.get(), data, bytes, id, kPartial) > 0 &&
            llama_memory_seq_rm(pass_.memory_, id, kept, -1)) {
            end_at(kept);
            return false;
        }
        llama_memory_seq_rm(pass_.memory_, id, -1, -1);
        end_at(0);
        return false;
    }
    void end_at(int length) {
        held_.resize(length);
        if (shadow_length_ > length) {
            shadow_length_ = 0;  // which nobody goes back to
        }
    }
    void cast_shadow() {
        shadow_ = shadow_ < 0 ? pass_.take_id() : shadow_;
        if (shadow_ >= 0) {
            llama_memory_seq_rm(pass_.memory_, shadow_, -1, -1);
            llama_memory_seq_cp(pass_.memory_, sequences_[0].id, shadow_, -1, -1);
            shadow_length_ = static_cast<int>(held_.size());
            last_rows_ = 0;
        }
    }
    void keep_state() {
        const int id = sequences_[0].id;
        const size_t bytes = llama_state_seq_get_size_ext(pass_.context_.get(), id, kPartial);
        auto values = std::make_shared<KeptStates::Values>((bytes + sizeof(float) - 1) / sizeof(float));
        auto* data = reinterpret_cast<uint8_t*>(values->data());
        if (llama_state_seq_get_data_ext(pass_.context_.get(), data, bytes, id, kPartial) == bytes) {
            kept_.keep({static_cast<int>(held_.size()), std::move(values)});
        }
    }

    LlamaPass& pass_;
    const int num_rows_;
    std::vector<int32_t> committed_;
    std::vector<Row> rows_;            // pending
    std::vector<Sequence> sequences_;  // the text's own first
    // Of recurrent layers: all tokens that libllama has of the text's own sequence, and how many of them the last pass
    // read.
    std::vector<int32_t> held_;
    mutable int last_rows_ = 0;
    // Where layers have windows, a second id of what is read or committed: libllama gives a cell of one id that a
    // window hides to other rows, but the text may go back to it.
    int guard_ = -1;
    int shadow_ = -1, shadow_length_ = 0;  // a copy of the text's own sequence when it had so many tokens
    KeptStates kept_;                      // of recurrent layers, as libllama writes them
};

std::unique_ptr<TextState> LlamaPass::make_state(int num_rows, int) {
    const auto own = lock();
    if (!context_) {
        const LogCapture quiet;
        const int num_ids = is_recurrent_ ? LlamaModel::kMostStates : kMostIds;
        const int reserved = model_.num_reserved(), cells = std::max(num_rows, reserved > 0 ? reserved : 2 * num_rows);
        context_ = model_.llama()->make_context(padded(cells, kCells), 2 * kMostPassRows, num_ids, num_back_);
        memory_ = llama_get_memory(context_.get());
        llama_set_abort_callback(context_.get(), is_interrupted, this);
        for (int id = num_ids - 1; id >= 0; --id) {
            free_ids_.push_back(id);
        }
    }
    return std::make_unique<LlamaText>(*this, num_rows);
}

int LlamaPass::take_id() {
    const std::lock_guard<std::mutex> lock(texts_mutex_);
    free_released();
    for (auto text = texts_.begin(); free_ids_.empty() && text != texts_.end(); ++text) {
        auto& sequences = (*text)->sequences_;
        if (sequences.size() > 1 && !sequences.back().is_leaf) {
            llama_memory_seq_rm(memory_, sequences.back().id, -1, -1);
            free_ids_.push_back(sequences.back().id);
            sequences.pop_back();
        }
    }
    if (free_ids_.empty()) {
        return -1;
    }
    const int id = free_ids_.back();
    free_ids_.pop_back();
    return id;
}

// After an error, or after an interruption of recurrent layers, nobody knows what libllama holds: it forgets all texts,
// and they are read again. A full context (status 1) changes nothing.
void LlamaPass::decode(Batch& batch) {
    const int num_rows = static_cast<int>(batch.tokens.size());
    if (num_rows == 0) {
        return;
    }
    const llama_batch rows{num_rows,         batch.tokens.data(), nullptr, batch.positions.data(), batch.num_ids.data(),
                           batch.ids.data(), batch.outputs.data()};
    std::string said;
    int status = 0;
    {
        LogCapture log;
        try {
            status = llama_decode(context_.get(), rows);
            llama_synchronize(context_.get());
        } catch (const std::exception& error) {
            said = error.what();
            status = -1;
        } catch (...) {  // of a C++ library of libllama's own
            status = -1;
        }
        said = said.empty() ? log.first_error() : said;
    }
    if (status == 0) {
        return;
    }
    if (status < 0 || (status == 2 && is_recurrent_)) {
        const std::lock_guard<std::mutex> lock(texts_mutex_);
        for (LlamaText* text : texts_) {
            text->forget();
        }
        llama_memory_clear(memory_, false);
    }
    if (interruption_) {
        std::rethrow_exception(std::exchange(interruption_, nullptr));
    }
    require<DeviceError>(status != 1, "the context of ", llama_n_ctx(context_.get()),
                         " tokens for all texts is full; end one, or give them more memory (kv_memory, --kv-memory)");
    throw DeviceError("a pass of llama.cpp failed" + (said.empty() ? "" : ": " + said));
}

void LlamaPass::read(LlamaText& text, const std::vector<int32_t>& tokens, size_t length) {
    LlamaText::Sequence& own = text.sequences_[0];
    const auto has = [&] { return is_recurrent_ ? text.held_.size() : static_cast<size_t>(own.length); };
    while (has() < length) {
        const size_t first = has();
        size_t last = std::min(first + kMostPassRows, length);
        const std::vector<int>& asked = text.kept_.asked();
        const auto next = std::upper_bound(asked.begin(), asked.end(), static_cast<int>(first));
        last = next == asked.end() ? last : std::min(last, static_cast<size_t>(*next));
        Batch batch;
        for (size_t i = first; i < last; ++i) {
            batch.add(tokens[i], static_cast<int>(i), {own.id}, false);
        }
        try {
            decode(batch);
        } catch (...) {
            if (!is_recurrent_) {
                llama_memory_seq_rm(memory_, own.id, own.length, -1);
            }
            throw;
        }
        if (!is_recurrent_) {
            own.length = static_cast<int>(last);
            text.guard(static_cast<int>(first), own.length);
            continue;
        }
        text.held_.insert(text.held_.end(), tokens.begin() + first, tokens.begin() + last);
        text.last_rows_ = 0;
        if (text.kept_.is_asked(static_cast<int>(last))) {
            text.keep_state();
        }
    }
}

void LlamaPass::compute(const Pass& pass) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const LogCapture quiet;
    interrupted_ = pass.interrupted;
    interruption_ = nullptr;
    {
        const std::lock_guard<std::mutex> texts(texts_mutex_);
        free_released();
    }
    std::vector<Part> parts = parts_of(pass);
    // Recurrent texts are computed one by one: a batch of several makes libllama move their last states to other cells,
    // but not the earlier states that a text may go back to.
    const size_t at_once = is_recurrent_ ? 1 : parts.size();
    try {
        for (size_t first = 0; first < parts.size(); first += at_once) {
            compute(pass, &parts[first], at_once);
        }
    } catch (...) {
        for (const Part& part : parts) {
            part.text->drop_rows(part.first);
            if (part.rolled_back) {  // libllama took rows back, and a copy of the text would not know that
                part.text->forget();
            }
        }
        throw;
    }
}

void LlamaPass::compute(const Pass& pass, Part* parts, size_t num_parts) {
    std::vector<int> at(pass.num_rows, -1);  // in the batch
    Batch batch;
    for (Part* part = parts; part < parts + num_parts; ++part) {
        const auto ids = is_recurrent_ ? go_on(*part, pass, batch) : part->text->find_ids(part->first);
        for (size_t i = 0; i < part->rows.size(); ++i) {
            const int row = part->rows[i];
            if (!ids[i].empty()) {
                const bool is_output = pass.embeds || row >= pass.num_rows - pass.num_logits;
                at[row] = batch.add(pass.rows[row].token, pass.rows[row].position, ids[i], is_output);
            }
        }
    }
    llama_set_embeddings(context_.get(), pass.embeds);
    decode(batch);
    for (Part* part = parts; part < parts + num_parts; ++part) {
        part->rolled_back = false;
        if (LlamaText& text = *part->text; is_recurrent_) {
            const size_t before = text.held_.size();
            text.held_ = text.tokens_to(static_cast<int>(text.rows_.size()) - 1);
            text.last_rows_ = static_cast<int>(text.held_.size() - before);
        } else if (part->is_reading) {
            text.guard(text.num_committed() + part->first, text.num_committed() + static_cast<int>(text.rows_.size()));
        }
        write_outputs(pass, part->rows, at);
    }
}

// Appends the rows to those that are pending.
std::vector<Part> LlamaPass::parts_of(const Pass& pass) const {
    std::vector<Part> parts;
    for (const Segment& segment : pass.segments) {
        auto* text = static_cast<LlamaText*>(segment.state);
        text->pass_.check_process();
        auto part = std::ranges::find(parts, text, &Part::text);
        if (part == parts.end()) {
            text->drop_rows(segment.first_pending);
            part = parts.insert(part, {text, segment.first_pending, segment.is_reading, {}});
        }
        for (int row = segment.first_row; row < segment.first_row + segment.num_rows; ++row) {
            text->rows_.push_back({pass.rows[row].token, pass.rows[row].parent, pass.rows[row].position});
            part->rows.push_back(row);
        }
    }
    return parts;
}

// Of a text with recurrent layers, whose rows are a chain: goes back to where that begins, and reads what is missing.
std::vector<std::vector<int>> LlamaPass::go_on(Part& part, const Pass& pass, Batch& batch) {
    LlamaText& text = *part.text;
    const int behind = text.rows_[part.first].parent, id = text.sequences_[0].id;
    std::vector<int32_t> tokens = text.tokens_to(behind);
    const size_t begin = tokens.size();
    part.rolled_back = text.go_back(tokens);
    if (!part.is_reading && behind >= 0 && !part.rolled_back && text.shadow_length_ < text.num_committed()) {
        text.cast_shadow();
    }
    for (const int row : part.rows) {
        tokens.push_back(pass.rows[row].token);
    }
    // A state can be kept only at the end of a pass, so read up to the last length at which one is asked for.
    size_t read_to = begin - text.held_.size() > kFewRows ? begin : text.held_.size();
    for (const int asked : text.kept_.asked()) {
        const bool is_judged = asked > static_cast<int>(tokens.size()) - part.num_judged(pass);
        if (part.is_reading && !pass.embeds && asked > static_cast<int>(begin) && !is_judged) {
            read_to = std::max<size_t>(read_to, asked);
        }
    }
    read(text, tokens, read_to);
    for (size_t i = text.held_.size(); i < begin; ++i) {
        batch.add(tokens[i], static_cast<int>(i), {id}, pass.embeds);
    }
    std::vector<std::vector<int>> ids(part.rows.size(), {id});
    for (size_t i = begin; i < text.held_.size(); ++i) {
        ids[i - begin].clear();
    }
    return ids;
}

}  // namespace

std::unique_ptr<Backend> make_llama_pass(const Model& model) {
    return std::make_unique<LlamaPass>(model);
}

}  // namespace pystaged
