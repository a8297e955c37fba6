// What the operations of a pass over packed weights share: the pass and its texts, memory, products and norms.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
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

inline Epilogue epilogue(const Linear& linear, float* out, size_t stride) {
    return {.bias = linear.bias.data(), .out = out, .stride = stride};
}

struct Workspace {
    explicit Workspace(const Model& model)
        : model(model),
          h(model.numbers()),
          kernel(model.kernel()),
          multiplier(model.kernel()),
          unit(h.delta.head_dim, 1 / std::sqrt(static_cast<float>(std::max(1, h.delta.head_dim)))),
          attention_scratch(model.num_threads(), model.numbers().head_dim) {}

    // Before the operations of a pass, and after.
    void begin(const Pass& next) {
        pass = &next;
        begin(next.num_rows);
        first_input = {};
        for (float*& rows : stream) {
            rows = take(next.num_rows, h.padded_width());
        }
        num_texts = 0;
        for (const Segment& segment : next.segments) {
            auto* const state = static_cast<PackedState*>(segment.state);
            const auto known = std::ranges::find(texts.begin(), texts.begin() + num_texts, state, &TextRows::state);
            const size_t at = known - texts.begin();
            if (static_cast<int>(at) == num_texts) {
                texts.resize(std::max(texts.size(), at + 1));
                TextRows& text = texts[num_texts++];
                text.state = state;
                text.num_committed = segment.num_committed;
                text.first = segment.first_pending;
                text.is_reading = segment.is_reading;
                text.rows.clear();
            }
            texts[at].rows.resize(segment.first_pending, -1);
            for (int i = 0; i < segment.num_rows; ++i) {
                texts[at].rows.push_back(segment.first_row + i);
            }
        }
        const int before = std::max(0, h.conv_width - 1);
        ancestors.resize(size_t(next.num_rows) * before);
        for (int i = 0; i < num_texts; ++i) {
            TextRows& text = texts[i];
            PackedState& state = *text.state;
            const int num_rows = static_cast<int>(text.rows.size()) - text.first;
            int32_t* const parents = state.begin(text.num_committed, text.first, num_rows, text.is_reading);
            text.for_rows([&](int row, int pending) { parents[pending - text.first] = next.rows[row].parent; });
            text.for_rows([&](int row, int pending) {
                for (int back = 1; back <= before; ++back) {
                    ancestors[row * size_t(before) + back - 1] = state.ancestor(pending, back);
                }
            });
            if (h.delta.head_dim > 0 || h.space.head_dim > 0) {
                // Rows of a reading's passes before are included in the state.
                text.walk.make(state.parents(), text.first, text.is_reading ? text.first : 0);
            }
        }
        rotate(false, h.rope);
        rotate(true, h.windowed_rope);
        row_scales = h.temperature_scale != 0 ? take(next.num_rows, 1) : nullptr;
        for (int i = 0; row_scales && i < next.num_rows; ++i) {
            row_scales[i] = h.query_scale(next.rows[i].position);
        }
    }
    void end() {
        pass = nullptr;
        arena.clear();
    }
    // Before operations without a pass, of so many rows.
    void begin(int num_rows) {
        num_threads = model.num_threads_for(num_rows);
        arena.clear();
    }

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
    QuantizedRows quantized(const Linear& next, int n, size_t cols) {
        if (!next.packed.integer()) {
            return {};
        }
        return {n, next.packed.packing(), arena.take<int8_t>(n * cols), arena.take<BlockFactors>(n * cols / kBlock)};
    }
    // The rows of x, normalized, and quantized as each of the matrices needs it.
    Inputs inputs(const Value& x, const Matrices& matrices) {
        Inputs result;
        const int cols = static_cast<int>(x.stride);
        if (x.handed.quants) {
            result.fill({x.n, cols, x.rows, x.handed});
            return result;
        }
        float* const normed = x.norm ? take(x.n, x.stride) : nullptr;
        result.fill({x.n, cols, normed ? normed : x.rows, {}});
        QuantizedRows sets[std::tuple_size<Matrices>()];
        int num_sets = 0;
        // What adds a zero point needs factors of its own kind; the others take any.
        for (const bool with_zero_point : {true, false}) {
            for (size_t i = 0; i < matrices.size(); ++i) {
                if (!matrices[i] || !matrices[i]->present() || !matrices[i]->packed.integer() ||
                    (layout_of(matrices[i]->packed.packing()).zero_point > 0) != with_zero_point) {
                    continue;
                }
                const PackedMatrix& matrix = matrices[i]->packed;
                const auto set = std::find_if(sets, sets + num_sets,
                                              [&](const QuantizedRows& made) { return matrix.reads(made.packing); });
                if (set == sets + num_sets) {
                    *set = quantized(*matrices[i], x.n, x.stride);
                    ++num_sets;
                }
                result[i].quantized = *set;
            }
        }
        if (normed || num_sets > 0) {
            for_rows(x.n, x.stride, [&](int i, int) {
                const float* row = x.rows + i * x.stride;
                if (normed) {
                    apply(*x.norm, row, matrices[0]->packed.cols(), normed + i * x.stride);
                    row = normed + i * x.stride;
                }
                for (int set = 0; set < num_sets; ++set) {
                    kernel.quantize(row, cols, i, sets[set]);
                }
            });
        }
        return result;
    }
    void apply(const Norm& norm, const float* row, int cols, float* out) const {
        if (model.family().has(kLayerNorm)) {
            kernel.layer_norm(row, norm.weight.data(), norm.bias.data(), h.norm_epsilon, cols, padded(cols, kBlock),
                              out);
        } else {
            kernel.rms_norm(row, norm.weight.data(), h.norm_epsilon, cols, padded(cols, kBlock), out);
        }
    }
    void multiply(const Product* products, size_t count) { multiplier.multiply(products, count, num_threads); }
    // W x alone; `maxima` as Product has them.
    void multiply(const Linear& linear, const Value& x, const Epilogue& result, float* maxima = nullptr) {
        const Product product{&linear.packed, inputs(x, {&linear})[0], result, {}, nullptr, maxima};
        multiply(&product, 1);
    }
    // Products of matrices with the same rows, side by side, into out[x.n][stride]; `part` and `finish` as Product has
    // them, of places in a row.
    void products(const std::vector<Linear>& all, const Value& x, float* out, size_t stride, int part = 0,
                  const std::function<void(int at, int row, int end)>* finish = nullptr) {
        Matrices matrices = {};
        std::transform(all.begin(), all.end(), matrices.begin(), [](const Linear& linear) { return &linear; });
        const Inputs read = inputs(x, matrices);
        Product products[std::tuple_size<Matrices>()];
        int at = 0;
        for (size_t i = 0; i < all.size(); ++i) {
            products[i] = {&all[i].packed, read[i], epilogue(all[i], out + at, stride), {}, nullptr, nullptr, part, at,
                           finish};
            at += all[i].packed.padded_rows();
        }
        multiply(products, all.size());
    }
    // x + norm(W y + b), scaled as the model has it.
    Value add(const Value& x, const Value& y, const Linear& linear, const Norm& norm) {
        float* const out = next_rows();
        float* const branch = norm.present() ? take(x.n, x.stride) : out;
        Epilogue result = epilogue(linear, branch, x.stride);
        if (!norm.present()) {
            result.scale = h.residual_scale;
            result.residual = x.rows;
        }
        multiply(linear, y, result);
        for_rows(norm.present() ? x.n : 0, x.stride, [&](int i, int) {
            float *row = branch + i * x.stride, *sum = out + i * x.stride;
            apply(norm, row, h.width, row);
            for (size_t d = 0; d < x.stride; ++d) {
                sum[d] = x.rows[i * x.stride + d] + h.residual_scale * row[d];
            }
        });
        return {out, x.n, x.stride};
    }
    // Writes a token's row of the embedding, scaled.
    void embed_token(int32_t token, float* out) const {
        const PackedMatrix& embedding = model.token_embedding().packed;
        embedding.row(token, out);
        for (int d = 0; h.embedding_scale != 1 && d < embedding.cols(); ++d) {
            out[d] *= h.embedding_scale;
        }
    }

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
    Value first_input;  // what the first layer reads where that is not the residual stream; see hidden_beside()
    const std::vector<float> unit;  // weights of a norm that makes a delta net's keys as long as 1
    AttentionRows attention_rows;
    AttentionScratch attention_scratch;

private:
    void rotate(bool windowed, const Rope& rope) {
        Rotation& angles = rotations[windowed];
        angles.half = h.rope.dims > 0 && (h.window > 0 || !windowed) ? rope.dims / 2 : 0;
        angles.cosines = take(pass->num_rows, angles.half);
        angles.sines = take(pass->num_rows, angles.half);
        const double amplitude = rope.amplitude();
        for (int i = 0; angles.half > 0 && i < num_texts; ++i) {
            const std::vector<double>& frequencies = texts[i].state->frequencies(windowed);
            texts[i].for_rows([&](int row, int) {
                const size_t at = size_t(row) * angles.half;
                rotation(frequencies, amplitude, pass->rows[row].position, angles.cosines + at, angles.sines + at);
            });
        }
    }

    float* stream[3] = {};
    int in_stream = 0;
};

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
// What one network has before that matrix; and the product of its input with a matrix beside it, into out[n][kBlock].
Value open(Workspace& w, const Dense& dense, const Value& input, const Linear* beside = nullptr, float* out = nullptr);
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
