// A model: hyperparameters and weights, immutable and shared by any number of sessions. Weights are packed for our
// kernels, or libllama has them.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "llama/llama_model.h"
#include "machine/topology.h"
#include "model/hyperparameters.h"
#include "model/weights.h"
#include "weights/packed_file.h"

namespace pystaged {

// How a draft that reads hidden states may differ from what its file says, or does not say.
struct DraftForm {
    bool other_pairs = false;  // rotary positions turn the other pairs
    bool other_feedback =
        false;  // of EAGLE-3: rows read normed states of the draft where they read others, and vice versa
};

// What is found out of a model while it is loaded.
struct ModelFacts {
    std::string name;  // its file's
    size_t file_bytes = 0;
    // Bytes of weights that one pass reads, and multiply-adds of one of its rows, attention aside.
    size_t weight_bytes = 0, num_weights = 0;
    // Bytes that matrices take in memory, and what loading them took besides at most, the system's cache aside.
    size_t matrix_bytes = 0, buffer_bytes = 0;
    // Whether packed weights are mapped, and why not where there is a file.
    bool is_mapped = false;
    std::string packed_problem;
    // ggml's names of the matrices' types and how many bytes each takes, the most first.
    std::vector<std::pair<std::string, size_t>> weight_types;
};

class Loader;

class Model {
public:
    // Loads a GGUF file, or the first of several that belong together; `kernel` as in find_kernel(), `num_threads` 0
    // for as many as choose_cores() says. Throws ModelError for a file that is damaged or incomplete,
    // UnsupportedModelError where our kernels do not compute it; std::invalid_argument for the rest. Weights are packed
    // for the kernels where there are no `devices`; else libllama loads them as LlamaModel has it. `kv` is how sessions
    // store keys and values; libllama does as F16 alone. `packed` is a file of save_packed(), or where one will be: it
    // is mapped instead of packing where it has this model's weights. With `target`, the file is loaded as a draft of
    // that target: it reads the target's hidden states, and borrows its embedding and head where it has none of its
    // own. Of a model's own file, the MTP layer is then loaded.
    Model(const std::string& path, const std::string& kernel, int num_threads, const Devices& devices = {},
          const std::function<void()>& progress = {}, KvType kv = KvType::f16, const std::string& packed = "",
          std::shared_ptr<const Model> target = nullptr, DraftForm form = {});

    const Family& family() const { return *family_; }
    const Hyperparameters& numbers() const { return numbers_; }
    const Kernel& kernel() const { return kernel_; }
    int num_threads() const { return threads_.many; }
    // In a pass of so many rows.
    int num_threads_for(size_t rows) const { return rows < kAllCoresRows ? threads_.few : threads_.many; }
    KvType kv_type() const { return kv_type_; }
    // From now on sessions hand out the hidden states behind these layers, which rise from 1 on: of rows that are
    // judged, with `last_row` also of the last row of a reading, which is then judged, too; or of all, those of prompts
    // too. Throws std::invalid_argument where there are no such layers, and where libllama has them. As cut_head(),
    // only before sessions are opened: see Executor::none_of().
    void tap(std::vector<int> layers, bool all_rows = false, bool last_row = false);
    // From now on a draft that borrows a head has logits of its first `rows` tokens alone; it reads the target's
    // weights where they lie. Does nothing for a draft with a head of its own, or fewer rows.
    void cut_head(int rows);
    const std::vector<int>& taps() const { return taps_; }
    bool taps_all_rows() const { return taps_all_rows_; }
    bool taps_last_row() const { return taps_last_row_; }
    // Whether all rows go through the last layer that mixes, those without logits too.
    bool taps_end() const { return taps_all_rows_ && !taps_.empty() && taps_.back() > numbers_.last_mixing; }
    // Numbers that sessions hand out of a row.
    size_t state_size() const {
        return taps_.size() * (numbers_.hidden_width > 0 ? numbers_.hidden_width : numbers_.width);
    }
    const ModelFacts& facts() const { return facts_; }
    // Writes packed weights into a file that exists; see PackedFile::write(). Throws std::logic_error for a model that
    // was loaded without the name of such a file.
    void save_packed(const std::string& path, const std::function<void()>& check_interrupt) const;
    // Bytes of keys and values that one token of a context takes, and those of them that are in layers with a window;
    // see KeptCells::most(). libllama keeps all.
    size_t cell_bytes() const { return llama_ ? llama_->cell_bytes() : numbers_.cell_bytes(kv_type_); }
    size_t windowed_cell_bytes() const { return llama_ ? 0 : numbers_.cell_bytes(kv_type_, true); }
    // Most bytes that recurrent layers take for a text of any length, and those of each earlier state that they keep to
    // go back to.
    size_t state_bytes() const {
        return llama_ ? (1 + llama_->num_back()) * llama_->state_bytes() : numbers_.state_bytes();
    }
    size_t kept_state_bytes() const { return llama_ ? llama_->state_bytes() : numbers_.kept_state_bytes(); }
    // Rows of a text's trees that may be pending: with recurrent layers, which keep their inputs, not any number.
    int most_pending() const;
    // Whether the rows of a tree that are evaluated together must be a chain: libllama's recurrent layers have no order
    // of rows but that of time.
    bool is_chained() const { return llama_ && llama_->is_recurrent(); }

    // Null where the weights are packed.
    const LlamaModel* llama() const { return llama_.get(); }
    // libllama's context has room for so many tokens of all texts together, at least; as cut_head(), before sessions.
    void reserve(int num_cells) {
        require(num_cells >= 0 && num_cells <= 1 << 30, "room for 0 to 2^30 tokens can be reserved");
        num_reserved_ = num_cells;
    }
    int num_reserved() const { return num_reserved_; }

    const Weights& weights() const { return weights_; }
    // What a draft may borrow of its target.
    const Linear& token_embedding() const {
        return weights_.token_embedding.present() ? weights_.token_embedding : target_->token_embedding();
    }
    const Linear& head() const {
        return weights_.head.present() ? weights_.head : target_ ? target_->head() : weights_.token_embedding;
    }
    const Vector& head_bias() const {
        return target_ && !weights_.head.present() ? target_->head_bias() : weights_.head_bias;
    }
    const Norm& output_norm() const {
        return weights_.output_norm.present() ? weights_.output_norm : target_->output_norm();
    }
    const Vector& rope_factors(int context) const;    // for sessions of that many positions; perhaps none
    const Model& target() const { return *target_; }  // of a draft that reads hidden states
    bool borrows_cells() const { return family_->reads == Reads::joined_with_cells; }

private:
    void load_llama(const GgufFile& file, const Devices& devices, const std::function<void()>& progress);
    void load_packed(Loader& loader, const std::string& packed);
    size_t count(const TensorView& tensor, bool is_read);

    const Kernel& kernel_;
    Cores threads_;
    KvType kv_type_;
    Family own_family_;         // of a draft that reads hidden states, or a model of libllama's
    std::string architecture_;  // the latter's name
    const Family* family_ = nullptr;
    Hyperparameters numbers_;
    ModelFacts facts_;
    PackedContent content_;
    Memory arena_;
    std::unique_ptr<LlamaModel> llama_;
    int num_reserved_ = 0;
    std::shared_ptr<const Model> target_;
    Weights weights_;
    std::vector<int> taps_;
    bool taps_all_rows_ = false, taps_last_row_ = false;
};

}  // namespace pystaged
