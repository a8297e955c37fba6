#include "device_graph.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "error.h"
#include "ggml-cpu.h"

namespace pystaged {

// One graph and its inputs.
struct DeviceGraph::Built {
    int num_rows, num_logits;
    int num_cells;  // that attention reads
    ContextPtr context;
    ggml_cgraph* graph = nullptr;
    ggml_tensor *tokens = nullptr, *positions = nullptr;
    ggml_tensor* places = nullptr;  // I64, where each row's key and value go
    ggml_tensor* mask = nullptr;    // F16 [cells, rows], 0 for what a row sees and -inf
    ggml_tensor *logits = nullptr, *shortlist = nullptr, *shortlist_logits = nullptr;
};

namespace {

// Attention reads whole runs of cells: fewer shapes of graphs, and some devices' kernels are fastest so.
constexpr int kCells = 256;
constexpr int kShortlist = 64;

}  // namespace

DeviceGraph::DeviceGraph(const Gpt2& model, int num_cells)
    : Graph(model), places_(padded(num_cells, kCells)), most_nodes_(64 * size_t(model.shape().num_layers) + 64) {
    const DeviceMemory& memory = *model.device_memory();
    std::iota(places_.begin(), places_.end(), 0);
    std::vector<ggml_backend_t> backends;
    for (ggml_backend_dev_t device : memory.devices()) {
        backends_.emplace_back(ggml_backend_dev_init(device, nullptr));
        if (!backends_.back()) {
            throw DeviceError(std::string("device '") + ggml_backend_dev_name(device) + "' does not start");
        }
        if (ggml_backend_is_cpu(backends_.back().get())) {
            ggml_backend_cpu_set_n_threads(backends_.back().get(), model.num_threads());
        }
        backends.push_back(backends_.back().get());
    }
    for (int device = 0; device < memory.num_devices(); ++device) {
        ContextPtr context = cache_context(memory, device);
        if (ggml_get_first_tensor(context.get())) {
            buffers_.push_back(allocate(context.get(), memory.devices()[device], "a cache"));
            // Masked cells count as zero times what they hold, which must be a number.
            ggml_backend_buffer_clear(buffers_.back().get(), 0);
        }
        contexts_.push_back(std::move(context));
    }
    shortlist_size_ = supported_shortlist(memory.devices()[memory.num_devices() - 1]);
    scheduler_.reset(ggml_backend_sched_new(backends.data(), nullptr, static_cast<int>(backends.size()), most_nodes_,
                                            /*parallel=*/false, /*op_offload=*/false));
    // The largest graph, so that memory is there for every other.
    build_graph(kMaxRows, kMaxRows, this->num_cells());
    const bool reserved = ggml_backend_sched_reserve(scheduler_.get(), built_->graph);
    built_.reset();
    if (!reserved) {
        throw DeviceError("there is too little memory on the device for the values of a pass");
    }
}

DeviceGraph::~DeviceGraph() = default;

ContextPtr DeviceGraph::cache_context(const DeviceMemory& memory, int device) {
    const int num_layers = model_.shape().num_layers;
    ContextPtr context(ggml_init({ggml_tensor_overhead() * 2 * num_layers, nullptr, /*no_alloc=*/true}));
    if (!context) {
        throw std::bad_alloc();
    }
    const bool flash = supports_flash_attention(memory.devices()[device]);
    for (int layer = 0; layer < num_layers; ++layer) {
        if (memory.device_of(layer, num_layers) == device) {
            for (auto* tensors : {&keys_, &values_}) {
                tensors->push_back(ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, model_.shape().width, num_cells()));
            }
            flash_.push_back(flash);
        }
    }
    return context;
}

bool DeviceGraph::supports_flash_attention(ggml_backend_dev_t device) const {
    const Gpt2Shape& shape = model_.shape();
    const ContextPtr context(ggml_init({16 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_context* c = context.get();
    const auto heads = [&](ggml_type type, int n) {
        ggml_tensor* rows = ggml_new_tensor_2d(c, type, shape.width, n);
        return ggml_permute(c, ggml_reshape_3d(c, rows, shape.head_dim(), shape.num_heads, n), 0, 2, 1, 3);
    };
    ggml_tensor* cells = heads(GGML_TYPE_F16, kCells);
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, kCells, 4);
    return ggml_backend_dev_supports_op(
        device, ggml_flash_attn_ext(c, heads(GGML_TYPE_F32, 4), cells, cells, mask, 1.0f, 0.0f, 0.0f));
}

int DeviceGraph::supported_shortlist(ggml_backend_dev_t device) const {
    const ContextPtr context(ggml_init({16 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_context* c = context.get();
    const int vocab = model_.shape().vocab_size, size = std::min(kShortlist, vocab);
    ggml_tensor* logits = ggml_new_tensor_2d(c, GGML_TYPE_F32, vocab, 4);
    ggml_tensor* top = ggml_top_k(c, logits, size);
    ggml_tensor* values = ggml_get_rows(c, ggml_reshape_3d(c, logits, 1, vocab, 4), top);
    return ggml_backend_dev_supports_op(device, top) && ggml_backend_dev_supports_op(device, values) ? size : 0;
}

void DeviceGraph::build_graph(int num_rows, int num_logits, int num_cells) {
    built_ = std::make_unique<Built>();
    Built& built = *built_;
    built.num_rows = num_rows;
    built.num_logits = num_logits;
    built.num_cells = num_cells;
    built.context.reset(
        ggml_init({ggml_tensor_overhead() * most_nodes_ + ggml_graph_overhead_custom(most_nodes_, false),
                   /*mem_buffer=*/nullptr, /*no_alloc=*/true}));
    if (!built.context) {
        built_.reset();
        throw std::bad_alloc();
    }
    ggml_context* c = built.context.get();
    built.graph = ggml_new_graph_custom(c, most_nodes_, false);
    built.places = ggml_new_tensor_1d(c, GGML_TYPE_I64, num_rows);
    built.mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, num_cells, num_rows);
    ggml_set_input(built.places);
    ggml_set_input(built.mask);
    ggml_tensor* end = build(c, num_rows, num_logits);
    ggml_set_output(end);
    ggml_build_forward_expand(built.graph, end);
    if (num_logits > 0 && shortlist_size_ > 0) {
        built.shortlist = ggml_top_k(c, end, shortlist_size_);
        built.shortlist_logits = ggml_get_rows(c, ggml_reshape_3d(c, end, 1, end->ne[0], num_logits), built.shortlist);
        ggml_set_output(built.shortlist);
        ggml_set_output(built.shortlist_logits);
        ggml_build_forward_expand(built.graph, built.shortlist_logits);
    }
}

ggml_tensor* DeviceGraph::embed(ggml_context* c, int num_rows) {
    for (ggml_tensor** ids : {&built_->tokens, &built_->positions}) {
        *ids = ggml_new_tensor_1d(c, GGML_TYPE_I32, num_rows);
        ggml_set_input(*ids);
    }
    return ggml_add(c, ggml_get_rows(c, model_.device_token_embedding(), built_->tokens),
                    ggml_get_rows(c, model_.device_position_embedding(), built_->positions));
}

ggml_tensor* DeviceGraph::layer_norm(ggml_context* c, ggml_tensor* x, const LayerNorm& norm) const {
    x = ggml_norm(c, x, model_.shape().norm_epsilon);
    return ggml_add(c, ggml_mul(c, x, norm.device.weight), norm.device.bias);
}

ggml_tensor* DeviceGraph::linear(ggml_context* c, ggml_tensor* x, const Dense& dense) {
    if (dense.norm) {
        x = layer_norm(c, x, *dense.norm);
    }
    x = ggml_add(c, ggml_mul_mat(c, dense.weights->device.weight, x), dense.weights->device.bias);
    if (dense.gelu) {
        x = ggml_gelu(c, x);
    }
    return dense.residual ? ggml_add(c, x, dense.residual) : x;
}

ggml_tensor* DeviceGraph::attention(ggml_context* c, ggml_tensor* qkv, int layer, int first_row, const Linear*) {
    const Gpt2Shape& shape = model_.shape();
    const int width = shape.width, head_dim = shape.head_dim(), num_heads = shape.num_heads;
    const int num_rows = static_cast<int>(qkv->ne[1]), num_out = num_rows - first_row, num_cells = built_->num_cells;
    int part = 0;
    for (ggml_tensor* cache : {keys_[layer], values_[layer]}) {
        ggml_tensor* rows = ggml_view_2d(c, qkv, width, num_rows, qkv->nb[1], ++part * width * sizeof(float));
        ggml_build_forward_expand(built_->graph, ggml_set_rows(c, cache, rows, built_->places));
    }
    if (num_out == 0) {
        return qkv;
    }
    // [head_dim, rows or cells, heads]
    const auto by_head = [&](ggml_tensor* t, int n, size_t offset) {
        const size_t head_bytes = ggml_row_size(t->type, head_dim);
        return ggml_permute(c, ggml_view_3d(c, t, head_dim, num_heads, n, head_bytes, t->nb[1], offset), 0, 2, 1, 3);
    };
    ggml_tensor* q = by_head(qkv, num_out, first_row * qkv->nb[1]);
    ggml_tensor* k = by_head(keys_[layer], num_cells, 0);
    ggml_tensor* v = by_head(values_[layer], num_cells, 0);
    ggml_tensor* mask = built_->mask;
    if (first_row > 0) {
        mask = ggml_view_2d(c, mask, num_cells, num_out, mask->nb[1], first_row * mask->nb[1]);
    }
    const float scale = 1 / std::sqrt(static_cast<float>(head_dim));
    if (flash_[layer]) {
        ggml_tensor* mixed = ggml_flash_attn_ext(c, q, k, v, mask, scale, 0.0f, 0.0f);
        // As in llama.cpp: a GPU's sums in half precision would show in the logits.
        ggml_flash_attn_ext_set_prec(mixed, GGML_PREC_F32);
        return ggml_reshape_2d(c, mixed, width, num_out);
    }
    ggml_tensor* scores = ggml_mul_mat(c, k, q);
    ggml_mul_mat_set_prec(scores, GGML_PREC_F32);
    ggml_tensor* weights = ggml_soft_max_ext(c, scores, mask, scale, 0.0f);
    ggml_tensor* mixed = ggml_mul_mat(c, ggml_cont(c, ggml_transpose(c, v)), weights);
    return ggml_cont_2d(c, ggml_permute(c, mixed, 0, 2, 1, 3), width, num_out);
}

ggml_tensor* DeviceGraph::head(ggml_context* c, ggml_tensor* x) {
    return built_->logits = ggml_mul_mat(c, model_.device_head(), layer_norm(c, x, model_.output_norm()));
}

void DeviceGraph::compute(const Pass& pass) {
    const int end = pass.first_cell + pass.num_rows;
    const int num_cells = padded(*std::max_element(places_.begin(), places_.begin() + end) + 1, kCells);
    const bool same = built_ && built_->num_rows == pass.num_rows && built_->num_logits == pass.num_logits &&
                      built_->num_cells == num_cells;
    try {
        if (!same) {
            built_.reset();
            ggml_backend_sched_reset(scheduler_.get());
            build_graph(pass.num_rows, pass.num_logits, num_cells);
            if (!ggml_backend_sched_alloc_graph(scheduler_.get(), built_->graph)) {
                throw DeviceError("there is too little memory on the device for the values of a pass");
            }
        }
        std::vector<int64_t> places(places_.begin() + pass.first_cell, places_.begin() + end);
        std::vector<ggml_fp16_t> mask(size_t(num_cells) * pass.num_rows, ggml_fp32_to_fp16(-INFINITY));
        const ggml_fp16_t seen = ggml_fp32_to_fp16(0);
        for (int i = 0; i < pass.num_rows; ++i) {
            const RowContext& context = pass.contexts[i];
            ggml_fp16_t* row = mask.data() + size_t(i) * num_cells;
            for (int j = 0; j < context.length; ++j) {
                row[places_[j < context.direct ? j : context.tail[j - context.direct]]] = seen;
            }
        }
        const size_t ids = sizeof(int32_t) * pass.num_rows;
        ggml_backend_tensor_set(built_->tokens, pass.tokens, 0, ids);
        ggml_backend_tensor_set(built_->positions, pass.positions, 0, ids);
        ggml_backend_tensor_set(built_->places, places.data(), 0, sizeof(int64_t) * places.size());
        if (built_->mask->buffer) {
            ggml_backend_tensor_set(built_->mask, mask.data(), 0, sizeof(ggml_fp16_t) * mask.size());
        }
        const ggml_status status = ggml_backend_sched_graph_compute(scheduler_.get(), built_->graph);
        if (status != GGML_STATUS_SUCCESS) {
            throw DeviceError(std::string("the pass failed on the device: ") + ggml_status_to_string(status));
        }
    } catch (const std::bad_alloc&) {
        built_.reset();
        throw;
    } catch (const std::exception& error) {
        // Some backends throw exceptions of their own.
        built_.reset();
        throw DeviceError(error.what());
    }
}

void DeviceGraph::move(const std::vector<std::pair<int, int>>& cells) {
    for (const auto& [from, to] : cells) {
        std::swap(places_[from], places_[to]);
    }
}

void DeviceGraph::read_shortlist(int32_t* tokens, float* logits) {
    ggml_backend_tensor_get(built_->shortlist, tokens, 0, ggml_nbytes(built_->shortlist));
    ggml_backend_tensor_get(built_->shortlist_logits, logits, 0, ggml_nbytes(built_->shortlist_logits));
}

void DeviceGraph::read_logits(float* out) {
    const size_t vocab = model_.shape().vocab_size, stride = logits_stride();
    ggml_backend_tensor_get_2d(built_->logits, out, 0, vocab * sizeof(float), built_->num_logits, built_->logits->nb[1],
                               stride * sizeof(float));
    for (int i = 0; i < built_->num_logits; ++i) {
        std::fill(out + i * stride + vocab, out + (i + 1) * stride, -INFINITY);
    }
}

}  // namespace pystaged
