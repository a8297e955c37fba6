// The ggml graph of one pass over rows of tokens: built once per (rows, outputs), then reused.
//
// ggml runs the graph on one thread; the custom operations share their work over the thread pool themselves, so that a
// layer has five joins and a busy machine does not stall at a spinning barrier.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "gpt2.h"
#include "kv_cache.h"

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

    Graph(const Gpt2& model, KvCache& cache);
    ~Graph();
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    // Floats from one row of logits to the next; entries past the vocabulary are -inf.
    size_t logits_stride() const { return padded(model_.shape().vocab_size, 64); }
    // At most kMaxRows rows.
    void compute(const Pass& pass);

private:
    struct Node;
    struct Built;

    Built& built(int num_rows, int num_logits);
    void build(Built& graph, int num_rows, int num_logits);

    static void embed(ggml_tensor* out, int, int, void* node);
    static void linear(ggml_tensor* out, int, int, void* node);
    static void attention(ggml_tensor* out, int, int, void* node);
    static void logits(ggml_tensor* out, int, int, void* node);

    // Memory for the quantized rows of one operation's input.
    struct Quantized {
        std::vector<int8_t> quants;
        std::vector<BlockFactors> factors;

        void resize(size_t values);
        QuantizedRows rows(int n, const PackedMatrix& weight);
    };

    Activations activations(const Node& node, const PackedMatrix& weight, const ggml_tensor* x);

    const Gpt2& model_;
    KvCache& cache_;
    const Pass* pass_ = nullptr;

    struct FreeBackend {
        void operator()(ggml_backend_t backend) const { ggml_backend_free(backend); }
    };
    struct FreeAllocator {
        void operator()(ggml_gallocr_t allocator) const { ggml_gallocr_free(allocator); }
    };
    std::unique_ptr<ggml_backend, FreeBackend> backend_;
    std::unique_ptr<ggml_gallocr, FreeAllocator> allocator_;
    std::map<std::pair<int, int>, std::unique_ptr<Built>> graphs_;

    std::vector<float> normed_;
    Quantized input_;                       // what an operation quantizes for itself
    Quantized handed_;                      // what the operation before it has quantized already
    std::vector<float> attention_scratch_;  // [threads][attention_scratch()]
};

}  // namespace pystaged
