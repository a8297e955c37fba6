// The graph of a pass over packed weights, on the CPU: built once per (rows, outputs), then reused.
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
#include "graph.h"
#include "kv_cache.h"

namespace pystaged {

class PackedGraph : public Graph {
public:
    PackedGraph(const Gpt2& model, int num_cells);
    ~PackedGraph() override;

    int num_cells() const override { return cache_.num_cells(); }
    void compute(const Pass& pass) override;
    void move(const std::vector<std::pair<int, int>>& cells) override;

private:
    struct Node;
    struct Built;

    ggml_tensor* embed(ggml_context* c, int num_rows) override;
    ggml_tensor* linear(ggml_context* c, ggml_tensor* x, const Dense& dense) override;
    ggml_tensor* attention(ggml_context* c, ggml_tensor* qkv, int layer, int first_row, const Linear* next) override;
    ggml_tensor* head(ggml_context* c, ggml_tensor* x) override;

    Built& built(int num_rows, int num_logits);
    void build_into(Built& graph, int num_rows, int num_logits);
    ggml_tensor* custom(ggml_context* c, int width, int rows, const std::vector<ggml_tensor*>& inputs,
                        ggml_custom_op_t op, Node node);

    static void run_embed(ggml_tensor* out, int, int, void* node);
    static void run_linear(ggml_tensor* out, int, int, void* node);
    static void run_attention(ggml_tensor* out, int, int, void* node);
    static void run_head(ggml_tensor* out, int, int, void* node);

    // Memory for the quantized rows of one operation's input.
    struct Quantized {
        std::vector<int8_t> quants;
        std::vector<BlockFactors> factors;

        void resize(size_t values);
        QuantizedRows rows(int n, const PackedMatrix& weight);
    };

    Activations activations(const Node& node, const PackedMatrix& weight, const ggml_tensor* x);

    KvCache cache_;
    const Pass* pass_ = nullptr;
    Built* building_ = nullptr;

    struct FreeAllocator {
        void operator()(ggml_gallocr_t allocator) const { ggml_gallocr_free(allocator); }
    };
    BackendPtr backend_;
    std::unique_ptr<ggml_gallocr, FreeAllocator> allocator_;
    std::map<std::pair<int, int>, std::unique_ptr<Built>> graphs_;

    std::vector<float> normed_;
    Quantized input_;                       // what an operation quantizes for itself
    Quantized handed_;                      // what the operation before it has quantized already
    std::vector<float> attention_scratch_;  // [threads][attention_scratch()]
};

}  // namespace pystaged
