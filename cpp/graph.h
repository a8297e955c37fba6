// One pass of GPT-2 over rows of tokens as a ggml graph, and the cache it reads and writes.
//
// The model is written down once, in build(); two operations have two forms each. PackedGraph has them as custom
// operations of our kernels, bit-exact on the CPU; DeviceGraph as ggml's standard ones, on any device ggml knows.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "ggml.h"
#include "gpt2.h"

namespace pystaged {

// What one pass evaluates and where its results go.
struct Pass {
    int num_rows = 0;
    const int32_t* tokens = nullptr;       // [num_rows]
    const int32_t* positions = nullptr;    // [num_rows]
    const RowContext* contexts = nullptr;  // [num_rows]
    int first_cell = 0;                    // row i writes its key and value into cell first_cell + i
    int num_logits = 0;                    // how many of the last rows need logits
    float* logits = nullptr;               // [num_logits][logits_stride()]
};

class Graph {
public:
    static constexpr int kMaxRows = 64;

    virtual ~Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    // Floats from one row of logits to the next; entries past the vocabulary are -inf.
    size_t logits_stride() const { return padded(model_.shape().vocab_size, kRun); }
    virtual int num_cells() const = 0;
    // At most kMaxRows rows.
    virtual void compute(const Pass& pass) = 0;
    // Moves cells, in order, each from .first to .second; what .second held is lost.
    virtual void move(const std::vector<std::pair<int, int>>& cells) = 0;

    // How many of a row's largest logits a pass brings back; 0 where it writes all of them to Pass::logits at once. The
    // rest then stays on the device until read or until the next pass.
    virtual int shortlist_size() const { return 0; }
    // The largest logits of each row of the last pass, in no order: both [num_logits][shortlist_size()].
    virtual void read_shortlist(int32_t*, float*) {}
    // All logits of the last pass, [num_logits][logits_stride()].
    virtual void read_logits(float*) {}

protected:
    explicit Graph(const Gpt2& model) : model_(model) {}

    // y = W norm(x) + b, then GELU or + residual.
    struct Dense {
        const Linear* weights = nullptr;
        const LayerNorm* norm = nullptr;
        bool gelu = false;
        ggml_tensor* residual = nullptr;
        const Linear* next = nullptr;  // the one that alone reads the result
    };

    // The last tensor of a pass: the logits, or whatever ends it where none are needed.
    ggml_tensor* build(ggml_context* c, int num_rows, int num_logits);

    virtual ggml_tensor* embed(ggml_context* c, int num_rows) = 0;
    virtual ggml_tensor* linear(ggml_context* c, ggml_tensor* x, const Dense& dense) = 0;
    // Stores the keys and values of all rows; attends for those from `first_row` on, perhaps none. `next` as in Dense.
    virtual ggml_tensor* attention(ggml_context* c, ggml_tensor* qkv, int layer, int first_row, const Linear* next) = 0;
    virtual ggml_tensor* head(ggml_context* c, ggml_tensor* x) = 0;

    const Gpt2& model_;
};

}  // namespace pystaged
