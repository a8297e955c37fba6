#include "packed_graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ggml-cpu.h"
#include "thread_pool.h"
#include "tree_attention.h"

namespace pystaged {

// The arguments of one custom operation.
struct PackedGraph::Node {
    PackedGraph* self = nullptr;
    int layer = 0;
    const LayerNorm* norm = nullptr;
    const Linear* weights = nullptr;
    bool gelu = false;
    int first_row = 0;                   // of those whose attention anyone reads
    const PackedMatrix* next = nullptr;  // the integer matrix that alone reads the result, which is quantized for it
    bool handed = false;                 // whether the input came quantized
};

struct PackedGraph::Built {
    ContextPtr context;
    std::deque<Node> nodes;
    ggml_cgraph* graph = nullptr;
    ggml_tensor* positions = nullptr;
};

namespace {

constexpr size_t kMostGraphs = 64;
// Below this many values the rows of an operation are prepared by the caller alone.
constexpr int kValuesWorthSharing = 4 << 10;

}  // namespace

PackedGraph::PackedGraph(const Gpt2& model, int num_cells)
    : Graph(model),
      cache_(model.shape().num_layers, model.shape().num_heads, model.shape().head_dim(), num_cells),
      backend_(ggml_backend_cpu_init()),
      allocator_(ggml_gallocr_new(ggml_backend_cpu_buffer_type())) {
    if (!backend_ || !allocator_) {
        throw std::bad_alloc();
    }
    ggml_backend_cpu_set_n_threads(backend_.get(), 1);
    const Gpt2Shape& shape = model.shape();
    const size_t widest = padded(std::max(shape.width, shape.ffn_width), kBlock);
    normed_.resize(kMaxRows * shape.padded_width());
    input_.resize(kMaxRows * widest);
    handed_.resize(kMaxRows * widest);
    attention_scratch_.resize(model.num_threads() * attention_scratch(cache_.num_cells()));
    // The largest graph needs at least the memory of every other, so addresses once given stay valid.
    Built largest;
    build_into(largest, kMaxRows, kMaxRows - 1);
    if (!ggml_gallocr_reserve(allocator_.get(), largest.graph)) {
        throw std::bad_alloc();
    }
}

PackedGraph::~PackedGraph() = default;

void PackedGraph::Quantized::resize(size_t values) {
    quants.resize(values);
    factors.resize(values / kBlock);
}

QuantizedRows PackedGraph::Quantized::rows(int n, const PackedMatrix& weight) {
    return {n, weight.packing(), quants.data(), factors.data()};
}

PackedGraph::Built& PackedGraph::built(int num_rows, int num_logits) {
    const auto key = std::make_pair(num_rows, num_logits);
    const auto found = graphs_.find(key);
    if (found != graphs_.end()) {
        return *found->second;
    }
    if (graphs_.size() >= kMostGraphs) {
        graphs_.clear();
    }
    auto graph = std::make_unique<Built>();
    build_into(*graph, num_rows, num_logits);
    const size_t size = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    if (!ggml_gallocr_alloc_graph(allocator_.get(), graph->graph)) {
        throw std::bad_alloc();
    }
    if (ggml_gallocr_get_buffer_size(allocator_.get(), 0) != size) {
        graphs_.clear();
    }
    return *(graphs_[key] = std::move(graph));
}

void PackedGraph::build_into(Built& built, int num_rows, int num_logits) {
    const size_t most_nodes = 8 * (size_t(model_.shape().num_layers) + 2);
    built.context.reset(ggml_init({ggml_tensor_overhead() * most_nodes + ggml_graph_overhead_custom(most_nodes, false),
                                   /*mem_buffer=*/nullptr, /*no_alloc=*/true}));
    if (!built.context) {
        throw std::bad_alloc();
    }
    built.graph = ggml_new_graph_custom(built.context.get(), most_nodes, false);
    building_ = &built;
    ggml_tensor* end = build(built.context.get(), num_rows, num_logits);
    building_ = nullptr;
    ggml_set_output(end);
    ggml_build_forward_expand(built.graph, end);
}

ggml_tensor* PackedGraph::custom(ggml_context* c, int width, int rows, const std::vector<ggml_tensor*>& inputs,
                                 ggml_custom_op_t op, Node node) {
    node.self = this;
    building_->nodes.push_back(node);
    return ggml_custom_4d(c, GGML_TYPE_F32, width, rows, 1, 1, const_cast<ggml_tensor**>(inputs.data()),
                          static_cast<int>(inputs.size()), op, /*n_tasks=*/1, &building_->nodes.back());
}

ggml_tensor* PackedGraph::embed(ggml_context* c, int num_rows) {
    const int width = model_.shape().padded_width();
    building_->positions = ggml_new_tensor_1d(c, GGML_TYPE_I32, num_rows);
    ggml_set_input(building_->positions);
    ggml_tensor* table = ggml_new_tensor_2d(c, GGML_TYPE_F32, width, model_.shape().max_context);
    table->data = const_cast<float*>(model_.position_embedding().data());
    ggml_tensor* tokens = custom(c, width, num_rows, {}, &PackedGraph::run_embed, {});
    return ggml_add(c, tokens, ggml_get_rows(c, table, building_->positions));
}

ggml_tensor* PackedGraph::linear(ggml_context* c, ggml_tensor* x, const Dense& dense) {
    Node node;
    node.norm = dense.norm;
    node.weights = dense.weights;
    node.gelu = dense.gelu;
    if (dense.next && dense.next->weight.integer()) {
        node.next = &dense.next->weight;
    }
    node.handed = building_->nodes.back().next == &dense.weights->weight;
    std::vector<ggml_tensor*> inputs = {x};
    if (dense.residual) {
        inputs.push_back(dense.residual);
    }
    return custom(c, dense.weights->weight.padded_rows(), static_cast<int>(x->ne[1]), inputs, &PackedGraph::run_linear,
                  node);
}

ggml_tensor* PackedGraph::attention(ggml_context* c, ggml_tensor* qkv, int layer, int first_row, const Linear* next) {
    const Gpt2Shape& shape = model_.shape();
    Node node;
    node.layer = layer;
    node.first_row = first_row;
    if (next->weight.integer() && shape.head_dim() % kBlock == 0) {
        node.next = &next->weight;
    }
    return custom(c, shape.padded_width(), std::max(1, static_cast<int>(qkv->ne[1]) - first_row), {qkv},
                  &PackedGraph::run_attention, node);
}

// The logits go straight to the caller's memory; this tensor only ends the graph.
ggml_tensor* PackedGraph::head(ggml_context* c, ggml_tensor* x) {
    Node node;
    node.norm = &model_.output_norm();
    return custom(c, 1, 1, {x}, &PackedGraph::run_head, node);
}

void PackedGraph::compute(const Pass& pass) {
    Built& graph = built(pass.num_rows, pass.num_logits);
    std::memcpy(graph.positions->data, pass.positions, sizeof(int32_t) * pass.num_rows);
    pass_ = &pass;
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph.graph);
    pass_ = nullptr;
    if (status != GGML_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("the pass failed: ") + ggml_status_to_string(status));
    }
}

void PackedGraph::move(const std::vector<std::pair<int, int>>& cells) {
    ThreadPool::shared().run(model_.shape().num_layers, model_.num_threads(), [&](int layer, int) {
        for (const auto& [from, to] : cells) {
            cache_.move(layer, from, to);
        }
    });
}

void PackedGraph::run_embed(ggml_tensor* out, int, int, void* node) {
    const PackedGraph& self = *static_cast<Node*>(node)->self;
    auto* values = static_cast<float*>(out->data);
    for (int i = 0; i < self.pass_->num_rows; ++i, values += out->ne[0]) {
        self.model_.token_embedding().row(self.pass_->tokens[i], values);
        std::fill(values + self.model_.shape().width, values + out->ne[0], 0.0f);
    }
}

// The rows of x, normalized and quantized as the matrix that will multiply them needs it.
Activations PackedGraph::activations(const Node& node, const PackedMatrix& weight, const ggml_tensor* x) {
    const Kernel& kernel = model_.kernel();
    const int n = static_cast<int>(x->ne[1]), cols = static_cast<int>(x->ne[0]);
    const auto* values = static_cast<const float*>(x->data);
    if (node.handed) {
        return {n, cols, values, handed_.rows(n, weight)};
    }
    const QuantizedRows quantized = input_.rows(n, weight);
    const auto prepare = [&](int i, int) {
        const float* row = values + size_t(i) * cols;
        if (node.norm) {
            float* normed = normed_.data() + size_t(i) * cols;
            kernel.layer_norm(row, node.norm->weight.data(), node.norm->bias.data(), model_.shape().norm_epsilon,
                              weight.cols(), cols, normed);
            row = normed;
        }
        if (weight.integer()) {
            kernel.quantize(row, cols, i, quantized);
        }
    };
    ThreadPool::shared().run(n, n * cols < kValuesWorthSharing ? 1 : model_.num_threads(), prepare);
    return {n, cols, node.norm ? normed_.data() : values, quantized};
}

void PackedGraph::run_linear(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    PackedGraph& self = *node.self;
    const PackedMatrix& weight = node.weights->weight;
    const Activations x = self.activations(node, weight, out->src[0]);
    Epilogue epilogue;
    epilogue.bias = node.weights->bias.data();
    epilogue.activation = node.gelu ? Activation::gelu : Activation::none;
    epilogue.residual = out->src[1] ? static_cast<const float*>(out->src[1]->data) : nullptr;
    epilogue.out = static_cast<float*>(out->data);
    epilogue.stride = static_cast<size_t>(out->ne[0]);
    QuantizedRows handed;
    if (node.next) {
        handed = self.handed_.rows(x.n, *node.next);
    }
    weight.multiply(self.model_.kernel(), x, epilogue, node.next ? &handed : nullptr, self.model_.num_threads());
}

void PackedGraph::run_attention(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    PackedGraph& self = *node.self;
    QuantizedRows handed;
    if (node.next) {
        handed = self.handed_.rows(self.pass_->num_rows - node.first_row, *node.next);
    }
    const Gpt2Shape& shape = self.model_.shape();
    AttentionLayer how;
    how.num_heads = how.num_kv_heads = shape.num_heads;
    how.head_dim = shape.head_dim();
    how.scale = 1.0f / std::sqrt(static_cast<float>(how.head_dim));
    AttentionRows rows;
    rows.n = self.pass_->num_rows;
    rows.first_row = node.first_row;
    rows.first_cell = self.pass_->first_cell;
    rows.contexts = self.pass_->contexts;
    rows.q = static_cast<float*>(out->src[0]->data);
    rows.k = rows.q + shape.width;
    rows.v = rows.k + shape.width;
    rows.stride = static_cast<size_t>(out->src[0]->ne[0]);
    tree_attention(self.model_.kernel(), self.model_.num_threads(), self.cache_, node.layer, how, rows,
                   static_cast<float*>(out->data), static_cast<size_t>(out->ne[0]), node.next ? &handed : nullptr,
                   self.attention_scratch_.data());
}

void PackedGraph::run_head(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    PackedGraph& self = *node.self;
    const PackedMatrix& weight = self.model_.head();
    Epilogue epilogue;
    epilogue.out = self.pass_->logits;
    epilogue.stride = self.logits_stride();
    weight.multiply(self.model_.kernel(), self.activations(node, weight, out->src[0]), epilogue, nullptr,
                    self.model_.num_threads());
    for (int i = 0; i < self.pass_->num_logits; ++i) {
        float* row = epilogue.out + i * epilogue.stride;
        std::fill(row + weight.rows(), row + epilogue.stride, -INFINITY);
    }
}

}  // namespace pystaged
