// Passes by libllama, for every model that it has, on any device: not exact.
//
// One of its contexts holds all texts, each under a sequence id of its own. The leaves of a tree have further ones, so
// that each is a sequence that begins with the text; a row carries the ids of all leaves below it. There are 256: rows
// that lead to no leaf with an id are left out, and their logits are not finite. Texts with recurrent layers are
// chains: each has one id, and a second one for a copy of its state from before the rows of a draft.
#pragma once

#include <exception>
#include <mutex>

#include "pass/backend.h"
#include "state/kept_states.h"

namespace pystaged {

class LlamaPass;

class LlamaText : public TextState {
public:
    LlamaText(LlamaPass& pass, int num_rows);
    ~LlamaText() override;

    int room() const override { return num_rows_; }
    void keep(int length, const std::vector<int32_t>& path, bool was_read) override;
    // Kept states are in this machine's memory, not the device's.
    void keep_states(const std::vector<int>& lengths, int most, int anchor) override {
        kept_.ask(lengths, most, anchor);
    }
    int reachable(int length) const override;
    int cut(int length) override;
    int copy(const TextState& from, int length) override;
    // The next pass reads the added tokens.
    void stretch(int length, int longer) override;
    size_t num_bytes(int length) const override;

private:
    friend class LlamaPass;

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

    // Committed tokens, and pending rows up to one.
    std::vector<int32_t> tokens_to(int row) const;
    // Forgets pending rows from there on, or all that libllama had of it.
    void drop(int first);
    void forget();
    // Reads what libllama lacks of the committed tokens. Sequence ids for pending rows from `first` on, none for those
    // that are left out.
    std::vector<std::vector<int>> find_ids(int first);
    // The index of a sequence that ends with a pending row, or the committed tokens; -1 where there is none.
    int sequence_behind(int row);
    // Of recurrent layers: makes the text's own sequence one that begins like these tokens. Returns whether libllama
    // took back the last rows.
    bool go_back(const std::vector<int32_t>& tokens);
    void end_at(int length);
    void cast_shadow();
    void keep_state();
    void has_read();

    LlamaPass& pass_;
    const int num_rows_;
    std::vector<int32_t> committed_;
    std::vector<Row> rows_;            // pending
    std::vector<Sequence> sequences_;  // the text's own first
    // Of recurrent layers: all tokens that libllama has of the text's own sequence, and how many of them the last pass
    // read.
    std::vector<int32_t> held_;
    mutable int last_rows_ = 0;
    int shadow_ = -1, shadow_length_ = 0;  // a copy of the text's own sequence when it had so many tokens
    KeptStates kept_;                      // of recurrent layers, as libllama writes them
};

class LlamaPass : public Backend {
public:
    static constexpr int kMaxRows = 256;

    explicit LlamaPass(const Model& model);
    ~LlamaPass() override;

    // The first makes the context: of so many positions for all texts as Model::reserve() says.
    std::unique_ptr<TextState> make_state(int num_rows, int context) override;
    int max_rows() const override { return kMaxRows; }
    void compute(const Pass& pass) override;

private:
    friend class LlamaText;
    struct Batch;
    struct Part;

    std::vector<Part> parts_of(const Pass& pass) const;
    std::vector<std::vector<int>> go_on(Part& part, const Pass& pass, Batch& batch);
    // In one batch of libllama.
    void compute(const Pass& pass, Part* parts, size_t num_parts);
    void write_outputs(const Pass& pass, const std::vector<int>& rows, const std::vector<int>& at);
    // Throws std::runtime_error in a child of fork().
    void check_process() const;
    // Takes the ids of texts that are gone; the caller has texts_mutex_.
    void free_released();
    // An id that no text uses, perhaps an idle leaf's; -1 where there is none.
    int take_id();
    void decode(const Batch& batch);
    // Computes the first `length` tokens of a text, without outputs; libllama may hold the first of them already.
    void read(LlamaText& text, const std::vector<int32_t>& tokens, size_t length);
    static bool is_interrupted(void* self);

    std::mutex mutex_;        // of the context, of ids and of all texts
    std::mutex texts_mutex_;  // of texts_ and released_
    std::vector<LlamaText*> texts_;
    std::vector<int> released_;  // ids of texts that are gone
    const int process_;
    const bool is_recurrent_;
    const int num_back_;
    LlamaContextPtr context_;
    llama_memory_t memory_ = nullptr;
    std::vector<int> free_ids_;
    const std::function<void()>* interrupted_ = nullptr;
    std::exception_ptr interruption_;
};

}  // namespace pystaged
