// A pass over packed weights, on the CPU: every operation runs at once and shares its work over the thread pool, five
// joins a layer, so that a busy machine does not stall at a spinning barrier.
#pragma once

#include <functional>
#include <vector>

#include "machine/memory.h"
#include "pass/attention.h"
#include "pass/backend.h"
#include "pass/walk.h"
#include "state/packed_state.h"
#include "weights/product.h"

namespace pystaged {

class PackedPass : public Backend {
public:
    explicit PackedPass(const Model& model);

    // About what the values of a pass take, and a few rows of logits.
    static double bytes(const Hyperparameters& numbers);

    // So many that weights come from memory and are unpacked for next to nothing, and few enough that their values take
    // little memory.
    static constexpr int kMaxRows = 256;

    std::unique_ptr<TextState> make_state(int num_rows, int context) override;
    int max_rows() const override { return kMaxRows; }
    void compute(const Pass& pass) override;

    // Rows of floats, and what is still to be done to them or was done already.
    struct Value {
        const float* rows = nullptr;  // [n][stride], zero behind the last column
        int n = 0;
        size_t stride = 0;
        const Norm* norm = nullptr;  // applied by what reads it
        bool handed = false;         // quantized into handed_
    };

    // A text's rows of a pass.
    struct Text {
        PackedState* state;
        int num_committed;
        int first;  // of its pending rows, that is in the pass with all behind it
        bool is_reading;
        std::vector<int> rows;  // of the pass, by pending row, -1 for those that are not in it
        Walk walk;              // where layers are delta nets

        // Calls act(row of the pass, pending row), in order.
        template <class Act>
        void for_rows(const Act& act) const {
            for (int pending = first; pending < static_cast<int>(rows.size()); ++pending) {
                act(rows[pending], pending);
            }
        }
    };

    // The operations of run_transformer().
    Value embed(int num_rows);
    Value tail(Value x, int first_row) const;
    Value norm(Value x, const Norm& norm) const;
    void check_interruption() const;
    Value branch(const Attention& attention, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const LatentAttention& attention, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const ShortConvolution& mixer, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const DeltaNet& mixer, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const StateSpace& mixer, const Value& x, const Value& input, int layer, int first_row);
    Value branch(const Dense& dense, const Value& x, const Value& input, const Norm& norm);
    Value branch(const Experts& experts, const Value& x, const Value& input, const Norm& norm);
    Value finish(const Value& x, int layer);
    void tap(const Value& x, int layer);
    Value logits(const Value& x);
    Value context(int num_rows);

    void add_markov(const int32_t* before, int n, float* logits, float* maxima) override;

private:
    // Memory for quantized rows.
    struct Quantized {
        Lines<int8_t> quants;
        Lines<BlockFactors> factors;

        void resize(size_t values);
        QuantizedRows rows(int n, Packing packing);
    };
    // Angles of a pass's rows.
    struct Rotation {
        size_t half = 0;
        double amplitude = 1;
        std::vector<float> cosines, sines;  // [rows][half]

        void set(const Pass& pass, bool windowed);
    };

    // What a thread needs for a delta net.
    struct DeltaScratch {
        Lines<float> tiles;
        std::vector<DeltaStep> steps;
    };

    // What attention does in a layer, and to which rows; norms, queries, keys and values are not set.
    AttentionLayer attention_layer(int layer) const;
    AttentionRows attention_rows(const Value& input, int layer, int first_row) const;
    // Writes keys and values of the rows of latent attention.
    void store_latents(const LatentAttention& attention, const AttentionRows& rows, int n);
    // Of a text, one head.
    void run_space(const StateSpace& mixer, const Text& text, int layer, int head, int first_row,
                   DeltaScratch& scratch);
    // Computes a tile of the state at the committed end, and copies the tile of the state before the pass's rows.
    template <class StepOf>
    void make_tile(RecurrentState& state, size_t tile, int keys, const StepOf& step, DeltaScratch& scratch);
    // Applies the steps of the text's walk to that copy, and writes the tile at each stop of a reading. of_pass(row,
    // step) completes the step of a row of the pass.
    template <class StepOf, class OfPass>
    void walk_tile(const Text& text, RecurrentState& state, size_t tile, int keys, const StepOf& step,
                   DeltaScratch& scratch, const OfPass& of_pass);
    // Memory of texts and threads, before anything is applied; of a head of so many keys, 0 where there are no tiles.
    void reserve_recurrent(int layer, int keys);
    // Of a text, what one head's state reads and is changed by: of queries, of keys or of values, in this order.
    void prepare_delta(const DeltaNet& mixer, const Text& text, int layer, int head);
    // Of a text, one head of values.
    void run_delta(const DeltaNet& mixer, const Text& text, int layer, int value_head, int first_row,
                   DeltaScratch& scratch);
    // The products of a dense network before its last matrix: `up`, after `gate` where that is apart. They write n rows
    // to `out`, and quantized to `handed` unless that is null.
    void open(const Dense& dense, const Activations& of_gate, const Activations& of_up, float* out, float* gates,
              const QuantizedRows* handed, Product& gate, Product& up) const;
    // What the expert that all rows share adds to a row: branch_, multiplied by shared_gates_ where it has a gate.
    void run_shared(const Experts& experts, const Value& input);
    // Chooses each row's experts by the router's numbers in scores_, and gathers the rows by expert.
    void choose(const Experts& experts, int n);
    // Products of matrices with the same rows, side by side; `finish` as Product has it, called with a place in a row.
    Value products(const std::vector<Linear>& matrices, const Value& x, size_t stride, int part = 0,
                   const std::function<void(size_t at, int row, int end)>& finish = {});
    // x + norm(W y + b), scaled as the model has it.
    Value add(const Value& x, const Value& y, const Linear& linear, const Norm& norm);

    // A draft's first rows, of an embedding's rows and hidden ones: join() makes one row of both; beside() makes the
    // hidden ones the residual stream, and the first layer reads both.
    Value join(int num_rows);
    Value beside(const Value& x);
    // Of a draft without keys and values, what it hands on of its last rows.
    void hand_on(const Value& x);
    // Writes a token's row of the embedding, scaled.
    void embed_token(int32_t token, float* out) const;
    // The hidden states that a draft reads of its target, as rows of its own width: those of pass_->inputs[rows[i]].
    void read_features(const std::vector<int>& rows, float* out, size_t stride);

    // Few values are not worth sharing: on a busy machine a join may wait for a thread that has lost its core.
    int threads_for(size_t num_values) const { return num_values < 16 << 10 ? 1 : num_threads_; }
    // Memory and threads for so many rows.
    void make_room(int num_rows);
    std::vector<Activations> activations(const Value& x, const std::vector<const Linear*>& matrices);
    void apply(const Norm& norm, const float* row, int cols, float* out) const;
    float* next_rows();
    Epilogue epilogue(const Linear& linear, float* out, size_t stride) const;
    // W x alone in a join; `maxima` as Product has them.
    void multiply_by(const Linear& linear, const Value& x, const Epilogue& result, float* maxima = nullptr);
    // What tokens mean to each layer, of the rows of x.
    void read_layer_embeddings(const Value& x);
    // Of a layer, [rows][padded width of such an embedding].
    float* layer_inputs(int layer);
    // For `next`, that alone reads a result of n rows; null where it takes floats.
    const QuantizedRows* hand_to(const Linear& next, int n);

    int room_ = 0;         // rows there is memory for
    int num_threads_ = 1;  // of the pass in hand
    size_t product_stride_ = 0;
    bool has_gate_ = false;
    const Pass* pass_ = nullptr;
    std::vector<Text> texts_;
    std::vector<int> ancestors_;  // [rows][taps - 1] where layers are recurrent, the nearest first
    Rotation rotation_, windowed_rotation_;
    std::vector<float> row_scales_;

    // Of the residual stream: a row may still be read after its successor is written.
    Lines<float> stream_[3];
    int in_stream_ = 0;
    Lines<float> normed_, products_, mixed_, gate_, hidden_, branch_, fused_, features_, layer_inputs_;
    std::vector<Quantized> inputs_;  // of one operation, one for each way to quantize them
    Quantized handed_;               // what the operation before has quantized already
    QuantizedRows handed_rows_;
    AttentionScratch attention_scratch_;
    // Of latent attention. Each head's part is multiplied apart: [heads][rows][...] of `head_inputs_`.
    Lines<float> ranks_, queries_, heads_, head_inputs_;
    Quantized quantized_heads_;
    std::vector<DeltaScratch> delta_scratch_;  // [threads]
    Lines<float> reading_inputs_;              // of a recurrent layer, of rows that are read
    // Of a mixture of experts. A place is a row at one of its experts; those of an expert lie side by side.
    struct Chosen {
        int expert;
        float weight;
        int place = 0;
    };
    struct Group {
        int expert, first = 0, n = 0;  // its places
        QuantizedRows inputs[2], handed;
    };
    int mixture_ = 0;                           // how many layers of the pass have chosen experts
    std::vector<Chosen> chosen_;                // [rows][used], in the order of selection
    std::vector<Group> groups_;                 // of experts that have rows
    std::vector<std::pair<int, int>> rows_at_;  // of each place, the row and its group
    Lines<float> scores_, gathered_, expert_hidden_, expert_gates_, expert_out_, shared_gates_;
    Quantized expert_inputs_[2], expert_handed_;
    std::vector<float> unit_;  // weights of a norm that makes a delta net's keys as long as 1
};

}  // namespace pystaged
