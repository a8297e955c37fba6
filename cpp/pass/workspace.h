// What the operations of a pass over packed weights share: the pass and its texts, memory, products and norms.
#pragma once

#include <array>
#include <vector>

#include "machine/pool.h"
#include "pass/arena.h"
#include "pass/attention.h"
#include "pass/backend.h"
#include "pass/walk.h"
#include "state/packed_state.h"
#include "weights/product.h"

namespace pystaged {

// Rows of floats, and what is still to be done to them or was done already.
struct Value {
    const float* rows = nullptr;  // [n][stride], zero behind the last column
    int n = 0;
    size_t stride = 0;
    const Norm* norm = nullptr;  // applied by what reads it
    QuantizedRows handed = {};   // the rows already quantized for the matrices that read them, or none

    Value from(int row) const { return {rows + row * stride, n - row, stride, norm, {}}; }
    // An absent norm is none at all.
    Value normed(const Norm& by) const { return {rows, n, stride, by.present() ? &by : nullptr, {}}; }
};

// Matrices that multiply the same rows, perhaps absent, and the rows as each of them takes them.
using Matrices = std::array<const Linear*, 4>;
using Inputs = std::array<Activations, 4>;

// A text's rows of a pass.
struct TextRows {
    PackedState* state;
    int num_committed, first;  // committed rows; the pass has all pending rows from `first` on
    bool is_reading;
    std::vector<int> rows;  // of the pass, by pending row, -1 for those that are not in it
    Walk walk;              // where layers are delta nets or Mamba-2

    // Calls act(row of the pass, pending row), in order.
    template <class Act>
    void for_rows(const Act& act) const {
        for (int pending = first; pending < static_cast<int>(rows.size()); ++pending) {
            act(rows[pending], pending);
        }
    }
};

struct Workspace {
    explicit Workspace(const Model& model);

    // Before the operations of a pass, and after.
    void begin(const Pass& pass);
    void end();
    // Before operations without a pass, of so many rows.
    void begin(int num_rows);

    // Calls act(i, worker) for n rows of so many values, by several threads where that is worth it: on a busy machine a
    // join may wait for a thread that has lost its core.
    template <class Act>
    void for_rows(int n, size_t values, const Act& act) const {
        ThreadPool::shared().run(n, n * values < 16 << 10 ? 1 : num_threads, act);
    }
    float* take(int rows, size_t stride) { return arena.take(rows, stride); }
    // Rows of the residual stream: a row may still be read after its successor is written.
    float* next_rows() { return stream[in_stream = (in_stream + 1) % 3]; }

    // Memory for rows that are to be quantized for a matrix; none where that takes floats.
    QuantizedRows quantized(const Linear& next, int n, size_t cols);
    Inputs inputs(const Value& x, const Matrices& matrices);
    void apply(const Norm& norm, const float* row, int cols, float* out) const;
    void multiply(const Product* products, size_t count) { multiplier.multiply(products, count, num_threads); }
    // W x alone; `maxima` as Product has them.
    void multiply(const Linear& linear, const Value& x, const Epilogue& result, float* maxima = nullptr);
    // Products of matrices with the same rows, side by side, into out[x.n][stride]; `part` and `finish` as Product has
    // them, of places in a row.
    void products(const std::vector<Linear>& matrices, const Value& x, float* out, size_t stride, int part = 0,
                  const std::function<void(int at, int row, int end)>* finish = nullptr);
    Value products(const std::vector<Linear>& matrices, const Value& x, size_t stride);
    // x + norm(W y + b), scaled as the model has it.
    Value add(const Value& x, const Value& y, const Linear& linear, const Norm& norm);
    // Writes a token's row of the embedding, scaled.
    void embed_token(int32_t token, float* out) const;

    const Model& model;
    const Hyperparameters& h;
    const Kernel& kernel;
    const Pass* pass = nullptr;
    int num_threads = 1;  // of the pass in hand
    Arena arena;
    Multiplier multiplier;
    std::vector<TextRows> texts;  // the first `num_texts`; the others keep their memory
    int num_texts = 0;
    // [rows][conv_width - 1] where layers are recurrent, as PackedState::ancestor() has them.
    std::vector<int> ancestors;
    // Angles of the pass's rows, [rows][half], in layers without a window and with one.
    struct Rotation {
        int half = 0;
        float *cosines = nullptr, *sines = nullptr;
    } rotations[2];
    float* row_scales = nullptr;    // [rows] of attention's scores, or none
    float* layer_inputs = nullptr;  // what tokens mean to each layer, [layers][rows][padded width of such an embedding]
    Value first_input;     // what the first layer reads where that is not the residual stream; see hidden_beside()
    int num_mixtures = 0;  // layers of the pass that have chosen experts
    const std::vector<float> unit;  // weights of a norm that makes a delta net's keys as long as 1
    AttentionRows attention_rows;
    AttentionScratch attention_scratch;

private:
    void rotate(bool windowed, const Rope& rope);

    float* stream[3] = {};
    int in_stream = 0;
};

Epilogue epilogue(const Linear& linear, float* out, size_t stride);

// What a layer's mixer makes of `input`, as its last matrix reads it. It updates the texts' states with all rows, and
// returns those from `first_row` on: perhaps none, where the pass is for the states alone.
Value mix(Workspace& w, const Attention& attention, const Value& input, int layer, int first_row);
Value mix(Workspace& w, const LatentAttention& attention, const Value& input, int layer, int first_row);
Value mix(Workspace& w, const ShortConvolution& mixer, const Value& input, int layer, int first_row);
Value mix(Workspace& w, const DeltaNet& mixer, const Value& input, int layer, int first_row);
Value mix(Workspace& w, const StateSpace& mixer, const Value& input, int layer, int first_row);

// What the two kinds of attention have in common: what it does in a layer, and to which rows; norms, queries, keys and
// values are not set. And attention of all heads, once they are written, as `output` reads it.
AttentionLayer attention_layer(const Workspace& w, int layer);
AttentionRows& attention_rows(Workspace& w, int num_inputs, int layer, int first_row);
Value attend(Workspace& w, const AttentionLayer& how, const AttentionRows& rows, const Linear& output);

// The products of a dense network before its last matrix: `up`, after `gate` where that is apart. They write out[n] and
// gates[n], as wide as `down` takes them, and quantized to `handed`.
void open(const Workspace& w, const Dense& dense, const Activations& of_gate, const Activations& of_up, float* out,
          float* gates, const QuantizedRows& handed, Product& gate, Product& up);
// x plus the branch of a network that reads `input`.
Value add(Workspace& w, const Dense& dense, const Value& x, const Value& input, const Norm& post_norm);
Value add(Workspace& w, const Experts& experts, const Value& x, const Value& input, const Norm& post_norm);

// A draft's first rows: of an embedding's rows and hidden ones, joined in one row; or the hidden ones, while the first
// layer reads both (EAGLE-3); or hidden ones as context.
Value join_hidden(Workspace& w);
Value hidden_beside(Workspace& w, const Value& embedded);
Value hidden_context(Workspace& w);
// Of a draft without keys and values, what it hands on of its last rows.
void hand_on(Workspace& w, const Value& x);
// As Backend::add_markov(), of one pass.
void add_markov_rows(Workspace& w, const int32_t* before, int n, float* logits, float* maxima);

}  // namespace pystaged
