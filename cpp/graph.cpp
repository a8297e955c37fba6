#include "graph.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "ggml-cpu.h"
#include "thread_pool.h"
#include "tree_attention.h"

namespace pystaged {

// The arguments of one custom operation.
struct Graph::Node {
    Graph* self = nullptr;
    int layer = 0;
    const LayerNorm* norm = nullptr;
    const Linear* weights = nullptr;
    bool gelu = false;
    int first_row = 0;                   // of those whose attention anyone reads
    const PackedMatrix* next = nullptr;  // the integer matrix that alone reads the result, which is quantized for it
    bool handed = false;                 // whether the input came quantized
};

struct Graph::Built {
    struct FreeContext {
        void operator()(ggml_context* context) const { ggml_free(context); }
    };
    std::unique_ptr<ggml_context, FreeContext> context;
    std::deque<Node> nodes;
    ggml_cgraph* graph = nullptr;
    ggml_tensor* positions = nullptr;
};

namespace {

constexpr size_t kMostGraphs = 64;
// Below this many values the rows of an operation are prepared by the caller alone.
constexpr int kValuesWorthSharing = 4 << 10;

}  // namespace

Graph::Graph(const Gpt2& model, KvCache& cache)
    : model_(model),
      cache_(cache),
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
    attention_scratch_.resize(model.num_threads() * attention_scratch(cache.num_cells()));
    // The largest graph needs at least the memory of every other, so addresses once given stay valid.
    Built largest;
    build(largest, kMaxRows, kMaxRows - 1);
    if (!ggml_gallocr_reserve(allocator_.get(), largest.graph)) {
        throw std::bad_alloc();
    }
}

Graph::~Graph() = default;

void Graph::Quantized::resize(size_t values) {
    quants.resize(values);
    factors.resize(values / kBlock);
}

QuantizedRows Graph::Quantized::rows(int n, const PackedMatrix& weight) {
    return {n, weight.packing(), quants.data(), factors.data()};
}

Graph::Built& Graph::built(int num_rows, int num_logits) {
    const auto key = std::make_pair(num_rows, num_logits);
    const auto found = graphs_.find(key);
    if (found != graphs_.end()) {
        return *found->second;
    }
    if (graphs_.size() >= kMostGraphs) {
        graphs_.clear();
    }
    auto graph = std::make_unique<Built>();
    build(*graph, num_rows, num_logits);
    const size_t size = ggml_gallocr_get_buffer_size(allocator_.get(), 0);
    if (!ggml_gallocr_alloc_graph(allocator_.get(), graph->graph)) {
        throw std::bad_alloc();
    }
    if (ggml_gallocr_get_buffer_size(allocator_.get(), 0) != size) {
        graphs_.clear();
    }
    return *(graphs_[key] = std::move(graph));
}

void Graph::build(Built& built, int num_rows, int num_logits) {
    const Gpt2Shape& shape = model_.shape();
    const size_t most_nodes = 8 * (size_t(shape.num_layers) + 2);
    built.context.reset(ggml_init({ggml_tensor_overhead() * most_nodes + ggml_graph_overhead_custom(most_nodes, false),
                                   /*mem_buffer=*/nullptr, /*no_alloc=*/true}));
    if (!built.context) {
        throw std::bad_alloc();
    }
    ggml_context* c = built.context.get();
    built.graph = ggml_new_graph_custom(c, most_nodes, false);

    const auto custom = [&](int width, int rows, std::vector<ggml_tensor*> inputs, ggml_custom_op_t op, Node node) {
        node.self = this;
        built.nodes.push_back(node);
        return ggml_custom_4d(c, GGML_TYPE_F32, width, rows, 1, 1, inputs.data(), static_cast<int>(inputs.size()), op,
                              /*n_tasks=*/1, &built.nodes.back());
    };
    const auto dense = [&](ggml_tensor* x, ggml_tensor* residual, Node node) {
        std::vector<ggml_tensor*> inputs = {x};
        if (residual) {
            inputs.push_back(residual);
        }
        return custom(node.weights->weight.padded_rows(), static_cast<int>(x->ne[1]), inputs, &Graph::linear, node);
    };

    const int width = shape.padded_width();
    built.positions = ggml_new_tensor_1d(c, GGML_TYPE_I32, num_rows);
    ggml_set_input(built.positions);
    ggml_tensor* table = ggml_new_tensor_2d(c, GGML_TYPE_F32, width, shape.max_context);
    table->data = const_cast<float*>(model_.position_embedding().data());

    Node embedding;
    ggml_tensor* tokens = custom(width, num_rows, {}, &Graph::embed, embedding);
    ggml_tensor* x = ggml_add(c, tokens, ggml_get_rows(c, table, built.positions));
    for (int i = 0; i < shape.num_layers; ++i) {
        const Gpt2Layer& layer = model_.layers()[i];
        const bool last = i + 1 == shape.num_layers;

        Node qkv, attention, output, up, down;
        qkv.norm = &layer.attn_norm;
        qkv.weights = &layer.attn_qkv;
        attention.layer = i;
        attention.first_row = last ? num_rows - num_logits : 0;
        output.weights = &layer.attn_output;
        up.norm = &layer.ffn_norm;
        up.weights = &layer.ffn_up;
        up.gelu = true;
        down.weights = &layer.ffn_down;
        if (layer.attn_output.weight.integer() && shape.head_dim() % kBlock == 0) {
            attention.next = &layer.attn_output.weight;
            output.handed = true;
        }
        if (layer.ffn_down.weight.integer()) {
            up.next = &layer.ffn_down.weight;
            down.handed = true;
        }

        ggml_tensor* mixed = custom(width, std::max(1, num_rows - attention.first_row), {dense(x, nullptr, qkv)},
                                    &Graph::attention, attention);
        if (last && num_logits == 0) {
            x = mixed;  // the cache is all that this pass is for
            break;
        }
        if (attention.first_row > 0) {
            x = ggml_view_2d(c, x, width, num_logits, x->nb[1], attention.first_row * x->nb[1]);
        }
        x = dense(mixed, x, output);
        x = dense(dense(x, nullptr, up), x, down);
    }
    if (num_logits > 0) {
        // The logits go straight to the caller's memory; this tensor only ends the graph.
        Node head;
        head.norm = &model_.output_norm();
        x = custom(1, 1, {x}, &Graph::logits, head);
    }
    ggml_set_output(x);
    ggml_build_forward_expand(built.graph, x);
}

void Graph::compute(const Pass& pass) {
    Built& graph = built(pass.num_rows, pass.num_logits);
    std::memcpy(graph.positions->data, pass.positions, sizeof(int32_t) * pass.num_rows);
    pass_ = &pass;
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph.graph);
    pass_ = nullptr;
    if (status != GGML_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("the pass failed: ") + ggml_status_to_string(status));
    }
}

void Graph::embed(ggml_tensor* out, int, int, void* node) {
    const Graph& self = *static_cast<Node*>(node)->self;
    auto* values = static_cast<float*>(out->data);
    for (int i = 0; i < self.pass_->num_rows; ++i, values += out->ne[0]) {
        self.model_.token_embedding().row(self.pass_->tokens[i], values);
        std::fill(values + self.model_.shape().width, values + out->ne[0], 0.0f);
    }
}

// The rows of x, normalized and quantized as the matrix that will multiply them needs it.
Activations Graph::activations(const Node& node, const PackedMatrix& weight, const ggml_tensor* x) {
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

void Graph::linear(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    Graph& self = *node.self;
    const PackedMatrix& weight = node.weights->weight;
    const Activations x = self.activations(node, weight, out->src[0]);
    Epilogue epilogue;
    epilogue.bias = node.weights->bias.data();
    epilogue.gelu = node.gelu;
    epilogue.residual = out->src[1] ? static_cast<const float*>(out->src[1]->data) : nullptr;
    epilogue.out = static_cast<float*>(out->data);
    epilogue.stride = static_cast<size_t>(out->ne[0]);
    QuantizedRows handed;
    if (node.next) {
        handed = self.handed_.rows(x.n, *node.next);
    }
    weight.multiply(self.model_.kernel(), x, epilogue, node.next ? &handed : nullptr, self.model_.num_threads());
}

void Graph::attention(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    Graph& self = *node.self;
    QuantizedRows handed;
    if (node.next) {
        handed = self.handed_.rows(self.pass_->num_rows - node.first_row, *node.next);
    }
    tree_attention(self.model_, self.cache_, node.layer, *self.pass_, static_cast<const float*>(out->src[0]->data),
                   node.first_row, static_cast<float*>(out->data), node.next ? &handed : nullptr,
                   self.attention_scratch_.data());
}

void Graph::logits(ggml_tensor* out, int, int, void* data) {
    const Node& node = *static_cast<Node*>(data);
    Graph& self = *node.self;
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
