#include "pass/device_pass.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "error.h"
#include "ggml-cpu.h"
#include "machine/pool.h"
#include "pass/transformer.h"
#include "weights/product.h"

namespace pystaged {

namespace {

// Attention reads whole runs of cells: fewer shapes of graphs, and some devices' kernels are fastest so.
constexpr int kCells = 256;
constexpr int kShortlist = 64;

// Calls act(); some backends throw exceptions of their own.
template <class Act>
void with_device_errors(const Act& act) {
    try {
        act();
    } catch (const std::bad_alloc&) {
        throw;
    } catch (const std::exception& error) {
        throw DeviceError(error.what());
    }
}

}  // namespace

DevicePass::DevicePass(const Model& model, int num_cells, int context)
    : model_(model),
      rope_factors_(model.rope_factors(context).device),
      places_(padded(num_cells, kCells)),
      most_nodes_(128 * size_t(model.numbers().num_layers) + 128) {
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
    const int earlier = is_recurrent() ? kMostPending : 0;
    build_graph({kMaxRows, kMaxRows, room(), earlier, earlier});
    const bool reserved = ggml_backend_sched_reserve(scheduler_.get(), built_->graph);
    built_.reset();
    if (!reserved) {
        throw DeviceError("there is too little memory on the device for the values of a pass");
    }
}

DevicePass::~DevicePass() = default;

ContextPtr DevicePass::cache_context(const DeviceMemory& memory, int device) {
    const Hyperparameters& h = model_.numbers();
    const int num_layers = h.num_layers;
    ContextPtr context(ggml_init({ggml_tensor_overhead() * 5 * num_layers, nullptr, /*no_alloc=*/true}));
    if (!context) {
        throw std::bad_alloc();
    }
    const bool flash = supports_flash_attention(memory.devices()[device]);
    for (int layer = 0; layer < num_layers; ++layer) {
        if (memory.device_of(layer, num_layers) != device) {
            continue;
        }
        const bool attends = h.layers[layer].attends();
        for (auto* tensors : {&keys_, &values_}) {
            tensors->push_back(attends ? ggml_new_tensor_2d(context.get(), GGML_TYPE_F16, h.kv_width(), room())
                                       : nullptr);
        }
        flash_.push_back(flash);
        Recurrent& recurrent = recurrent_.emplace_back();
        if (const RecurrentSizes sizes = h.recurrent_sizes(layer); sizes.state > 0) {
            const auto floats = [&](size_t count, int places) {
                return ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, int64_t(count), places);
            };
            recurrent.tail = floats(sizes.tail, 2);
            recurrent.state = sizes.state > sizes.tail ? floats(sizes.state - sizes.tail, 2) : nullptr;
            recurrent.inputs = floats(sizes.own_input, 2 * kMostPending);
        }
    }
    return context;
}

bool DevicePass::supports_flash_attention(ggml_backend_dev_t device) const {
    const Hyperparameters& h = model_.numbers();
    const ContextPtr context(ggml_init({16 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_context* c = context.get();
    const auto heads = [&](ggml_type type, int num_heads, int n) {
        return ggml_permute(c, ggml_new_tensor_3d(c, type, h.head_dim, num_heads, n), 0, 2, 1, 3);
    };
    ggml_tensor* cells = heads(GGML_TYPE_F16, h.num_kv_heads, kCells);
    ggml_tensor* mask = ggml_new_tensor_2d(c, GGML_TYPE_F16, kCells, 4);
    return ggml_backend_dev_supports_op(device, ggml_flash_attn_ext(c, heads(GGML_TYPE_F32, h.num_heads, 4), cells,
                                                                    cells, mask, 1.0f, 0.0f, h.attention_softcap));
}

int DevicePass::supported_shortlist(ggml_backend_dev_t device) const {
    const ContextPtr context(ggml_init({16 * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    ggml_context* c = context.get();
    const int vocab = model_.numbers().vocab_size, size = std::min(kShortlist, vocab);
    ggml_tensor* logits = ggml_new_tensor_2d(c, GGML_TYPE_F32, vocab, 4);
    ggml_tensor* top = ggml_top_k(c, logits, size);
    ggml_tensor* values = ggml_get_rows(c, ggml_reshape_3d(c, logits, 1, vocab, 4), top);
    return ggml_backend_dev_supports_op(device, top) && ggml_backend_dev_supports_op(device, values) ? size : 0;
}

void DevicePass::build_graph(const Shape& shape) {
    const auto [num_rows, num_logits, num_cells, num_earlier, num_applied, is_reading] = shape;
    built_ = std::make_unique<Built>();
    Built& built = *built_;
    built.shape = shape;
    built.context.reset(
        ggml_init({ggml_tensor_overhead() * most_nodes_ + ggml_graph_overhead_custom(most_nodes_, false),
                   /*mem_buffer=*/nullptr, /*no_alloc=*/true}));
    if (!built.context) {
        built_.reset();
        throw std::bad_alloc();
    }
    ggml_context* c = built.context.get();
    built.graph = ggml_new_graph_custom(c, most_nodes_, false);
    built.places = input(GGML_TYPE_I64, num_rows, 1);
    built.mask = input(GGML_TYPE_F16, num_cells, num_rows);
    built.window_mask = input(GGML_TYPE_F16, num_cells, num_rows);
    built.row_scales = input(GGML_TYPE_F32, num_rows, 1);
    if (is_recurrent()) {
        built.from = input(GGML_TYPE_I32, 1, 1);
        built.zero = input(GGML_TYPE_I32, 1, 1);
        built.earlier = num_earlier > 0 ? input(GGML_TYPE_I32, num_earlier, 1) : nullptr;
        built.own = is_reading ? nullptr : input(GGML_TYPE_I64, num_rows, 1);
        built.to = num_applied > 0 ? input(GGML_TYPE_I64, 1, 1) : nullptr;
    }
    ggml_tensor* end = run_transformer(*this, model_, num_rows, num_logits).rows;
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

ggml_tensor* DevicePass::input(ggml_type type, int64_t cols, int64_t rows) {
    ggml_tensor* tensor = ggml_new_tensor_2d(built_->context.get(), type, cols, rows);
    ggml_set_input(tensor);
    return tensor;
}

DevicePass::Value DevicePass::embed(int num_rows) {
    ggml_context* c = built_->context.get();
    built_->tokens = input(GGML_TYPE_I32, num_rows, 1);
    built_->positions = input(GGML_TYPE_I32, num_rows, 1);
    ggml_tensor* x = ggml_get_rows(c, model_.token_embedding().device, built_->tokens);
    if (model_.numbers().embedding_scale != 1) {
        x = ggml_scale(c, x, model_.numbers().embedding_scale);
    }
    if (model_.position_embedding().present()) {
        x = ggml_add(c, x, ggml_get_rows(c, model_.position_embedding().device, built_->positions));
    }
    return {x};
}

DevicePass::Value DevicePass::tail(const Value& x, int first_row) {
    ggml_tensor* t = x.rows;
    return first_row == 0 ? x
                          : Value{ggml_view_2d(built_->context.get(), t, t->ne[0], t->ne[1] - first_row, t->nb[1],
                                               first_row * t->nb[1])};
}

ggml_tensor* DevicePass::normed(ggml_tensor* x, const Norm& norm) {
    ggml_context* c = built_->context.get();
    const float epsilon = model_.numbers().norm_epsilon;
    x = model_.family().has(kLayerNorm) ? ggml_norm(c, x, epsilon) : ggml_rms_norm(c, x, epsilon);
    x = ggml_mul(c, x, norm.weight.device);
    return norm.bias.present() ? ggml_add(c, x, norm.bias.device) : x;
}

ggml_tensor* DevicePass::linear(ggml_tensor* x, const Linear& linear) {
    ggml_context* c = built_->context.get();
    x = ggml_mul_mat(c, linear.device, x);
    return linear.bias.present() ? ggml_add(c, x, linear.bias.device) : x;
}

ggml_tensor* DevicePass::softcapped(ggml_tensor* x, float cap) {
    ggml_context* c = built_->context.get();
    return ggml_scale(c, ggml_tanh(c, ggml_scale(c, x, 1 / cap)), cap);
}

DevicePass::Value DevicePass::norm(const Value& x, const Norm& norm) {
    return norm.present() ? Value{normed(x.rows, norm)} : x;
}

std::array<ggml_tensor*, 3> DevicePass::qkv(const Attention& attention, ggml_tensor* x) {
    if (attention.qkv.size() == 3) {
        return {linear(x, attention.qkv[0]), linear(x, attention.qkv[1]), linear(x, attention.qkv[2])};
    }
    ggml_tensor* all = linear(x, attention.qkv[0]);
    const Hyperparameters& h = model_.numbers();
    const auto part = [&](int first, int width) {
        return ggml_view_2d(built_->context.get(), all, width, all->ne[1], all->nb[1], first * sizeof(float));
    };
    return {part(0, h.q_width()), part(h.q_width(), h.kv_width()), part(h.q_width() + h.kv_width(), h.kv_width())};
}

// Queries or keys as [head_dim, heads, rows], normalized and turned.
ggml_tensor* DevicePass::heads(ggml_tensor* x, const Norm& norm, int num_heads, int layer) {
    ggml_context* c = built_->context.get();
    const Hyperparameters& h = model_.numbers();
    const bool whole = model_.family().required & kWholeNorms;
    if (whole) {
        x = normed(x, norm);
    }
    x = ggml_view_3d(c, x, h.head_dim, num_heads, x->ne[1], x->ne[0] / num_heads * sizeof(float), x->nb[1], 0);
    if (norm.present() && !whole) {
        x = normed(x, norm);
    }
    if (!h.layers[layer].rotates || h.rope.dims == 0) {
        return x;
    }
    const Rope& rope = h.layers[layer].windowed ? h.windowed_rope : h.rope;
    const int mode = model_.family().rope == Pairs::halves ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL;
    return ggml_rope_ext(c, x, built_->positions, rope_factors_, rope.dims, mode, rope.original_context, rope.base,
                         rope.scale, rope.yarn ? 1.0f : 0.0f, rope.magnitude, rope.beta_fast, rope.beta_slow);
}

DevicePass::Value DevicePass::branch(const Attention& attention, const Value& x, const Value& input, int index,
                                     int first_row) {
    ggml_context* c = built_->context.get();
    const Hyperparameters& h = model_.numbers();
    auto [q, keys, values] = qkv(attention, input.rows);
    ggml_tensor* const products = q;
    const int num_rows = static_cast<int>(q->ne[1]), num_out = num_rows - first_row;
    keys = heads(keys, attention.k_norm, h.num_kv_heads, index);
    keys = ggml_view_2d(c, keys, h.kv_width(), num_rows, keys->nb[2], 0);
    ggml_build_forward_expand(built_->graph, ggml_set_rows(c, keys_[index], keys, built_->places));
    ggml_build_forward_expand(built_->graph, ggml_set_rows(c, values_[index], values, built_->places));
    if (num_out == 0) {
        return {keys};
    }
    q = heads(q, attention.q_norm, h.num_heads, index);
    if (h.temperature_scale != 0) {
        q = ggml_mul(c, q, ggml_reshape_3d(c, built_->row_scales, 1, 1, num_rows));
    }
    float scale = h.attention_scale;
    if (model_.family().has(kScaledEmbedding)) {
        // As llama.cpp computes Gemma, before queries are rounded.
        q = ggml_scale(c, q, scale);
        scale = 1;
    }
    q = ggml_view_3d(c, q, h.head_dim, h.num_heads, num_out, q->nb[1], q->nb[2], first_row * q->nb[2]);
    // [head_dim, cells, heads]
    const auto cells = [&](ggml_tensor* cache) {
        const size_t head_bytes = ggml_row_size(cache->type, h.head_dim);
        return ggml_permute(
            c, ggml_view_3d(c, cache, h.head_dim, h.num_kv_heads, built_->shape.num_cells, head_bytes, cache->nb[1], 0),
            0, 2, 1, 3);
    };
    ggml_tensor* mask = h.layers[index].windowed ? built_->window_mask : built_->mask;
    if (first_row > 0) {
        mask = ggml_view_2d(c, mask, mask->ne[0], num_out, mask->nb[1], first_row * mask->nb[1]);
    }
    ggml_tensor* mixed =
        attend(ggml_permute(c, q, 0, 2, 1, 3), cells(keys_[index]), cells(values_[index]), mask, scale, flash_[index]);
    if (model_.family().has(kGatedAttention)) {
        // Behind each query stands a gate.
        const size_t at = h.head_dim * sizeof(float);
        ggml_tensor* gate = ggml_view_3d(c, products, h.head_dim, h.num_heads, num_out, 2 * at, products->nb[1],
                                         first_row * products->nb[1] + at);
        mixed = ggml_mul(c, mixed, ggml_sigmoid(c, ggml_cont_2d(c, gate, h.q_width(), num_out)));
    }
    return add(x, mixed, attention.output, model_.layers()[index].mixer_post_norm);
}

DevicePass::Value DevicePass::branch(const LatentAttention&, const Value&, const Value&, int, int) {
    throw std::logic_error("models with latent attention are not loaded into devices");
}

DevicePass::Value DevicePass::branch(const Experts&, const Value&, const Value&, const Norm&) {
    throw std::logic_error("mixtures of experts are not loaded into devices");
}

ggml_tensor* DevicePass::attend(ggml_tensor* q, ggml_tensor* k, ggml_tensor* v, ggml_tensor* mask, float scale,
                                bool flash) {
    ggml_context* c = built_->context.get();
    const Hyperparameters& h = model_.numbers();
    if (flash) {
        ggml_tensor* mixed = ggml_flash_attn_ext(c, q, k, v, mask, scale, 0.0f, h.attention_softcap);
        // As in llama.cpp: a GPU's sums in half precision would show in the logits.
        ggml_flash_attn_ext_set_prec(mixed, GGML_PREC_F32);
        return ggml_reshape_2d(c, mixed, h.q_width(), q->ne[1]);
    }
    ggml_tensor* scores = ggml_mul_mat(c, k, q);
    ggml_mul_mat_set_prec(scores, GGML_PREC_F32);
    if (h.attention_softcap > 0) {
        scores = softcapped(ggml_scale(c, scores, scale), h.attention_softcap);
        scale = 1;
    }
    ggml_tensor* weights = ggml_soft_max_ext(c, scores, mask, scale, 0.0f);
    ggml_tensor* mixed = ggml_mul_mat(c, ggml_cont(c, ggml_transpose(c, v)), weights);
    return ggml_cont_2d(c, ggml_permute(c, mixed, 0, 2, 1, 3), h.q_width(), q->ne[1]);
}

DevicePass::Value DevicePass::branch(const Dense& dense, const Value& x, const Value& input, const Norm& norm) {
    ggml_context* c = built_->context.get();
    const bool silu = model_.family().gate == Gate::silu;
    ggml_tensor* up = linear(input.rows, dense.up);
    if (model_.family().has(kSquaredRelu)) {
        up = ggml_sqr(c, ggml_relu(c, up));
    } else if (model_.family().gate == Gate::none) {
        up = ggml_gelu(c, up);
    } else if (!dense.gate.present()) {
        up = silu ? ggml_swiglu(c, up) : ggml_geglu(c, up);
    } else {
        ggml_tensor* gate = linear(input.rows, dense.gate);
        up = silu ? ggml_swiglu_split(c, gate, up) : ggml_geglu_split(c, gate, up);
    }
    return add(x, up, dense.down, norm);
}

DevicePass::Value DevicePass::add(const Value& x, ggml_tensor* y, const Linear& weights, const Norm& norm) {
    ggml_context* c = built_->context.get();
    ggml_tensor* branch = linear(y, weights);
    if (norm.present()) {
        branch = normed(branch, norm);
    }
    if (model_.numbers().residual_scale != 1) {
        branch = ggml_scale(c, branch, model_.numbers().residual_scale);
    }
    return {ggml_add(c, branch, x.rows)};
}

DevicePass::Value DevicePass::logits(const Value& x) {
    const Hyperparameters& h = model_.numbers();
    ggml_tensor* logits = linear(x.rows, {{}, model_.head_bias(), model_.head().device});
    if (h.logit_scale != 1) {
        logits = ggml_scale(built_->context.get(), logits, h.logit_scale);
    }
    if (h.logit_softcap > 0) {
        logits = softcapped(logits, h.logit_softcap);
    }
    return {built_->logits = logits};
}

void DevicePass::compute(const Pass& pass) {
    const Segment& segment = pass.segments[0];
    if (!is_recurrent()) {
        compute_piece(pass, {});
        return;
    }
    if (!segment.is_reading) {
        parents_.resize(segment.first_pending);
        parents_.insert(parents_.end(), pass.parents, pass.parents + pass.num_rows);
        std::vector<int32_t> path;
        for (int row = pass.parents[0]; row >= 0; row = parents_[row]) {
            path.push_back(row);
        }
        std::reverse(path.begin(), path.end());
        compute_piece(pass, states_.plan(segment.first_pending, pass.num_rows, path, false));
        states_.applied();
        return;
    }
    if (segment.first_pending == 0) {
        states_.begin_reading();
    }
    // In pieces that end where states are to be kept.
    for (int done = 0; done < pass.num_rows;) {
        const int begin = segment.first_cell() + done;
        int end = segment.first_cell() + pass.num_rows;
        const std::vector<int>& asked = states_.kept().asked();
        if (const auto next = std::upper_bound(asked.begin(), asked.end(), begin); next != asked.end()) {
            end = std::min(end, *next);
        }
        Pass piece = pass;
        piece.num_rows = piece.segments[0].num_rows = end - begin;
        piece.segments[0].first_pending += done;
        piece.tokens += done;
        piece.positions += done;
        piece.contexts += done;
        compute_piece(piece, states_.plan(piece.segments[0].first_pending, piece.num_rows, {}, true));
        if (states_.kept().is_asked(end)) {
            states_.has_read({end, state_values(1 - states_.state())});
        }
        done += piece.num_rows;
    }
}

void DevicePass::compute_piece(const Pass& pass, const DeviceStates::Plan& plan) {
    const int end = pass.segments[0].first_cell() + pass.num_rows;
    const int num_cells = padded(*std::max_element(places_.begin(), places_.begin() + end) + 1, kCells);
    const Shape shape{pass.num_rows,    pass.num_logits, num_cells, static_cast<int>(plan.earlier.size()),
                      plan.num_applied, plan.own.empty()};
    try {
        with_device_errors([&] {
            if (!built_ || !(built_->shape == shape)) {
                built_.reset();
                ggml_backend_sched_reset(scheduler_.get());
                build_graph(shape);
                if (!ggml_backend_sched_alloc_graph(scheduler_.get(), built_->graph)) {
                    throw DeviceError("there is too little memory on the device for the values of a pass");
                }
            }
            set_inputs(pass, plan);
            const ggml_status status = ggml_backend_sched_graph_compute(scheduler_.get(), built_->graph);
            if (status != GGML_STATUS_SUCCESS) {
                throw DeviceError(std::string("the pass failed on the device: ") + ggml_status_to_string(status));
            }
        });
    } catch (...) {
        built_.reset();
        throw;
    }
}

void DevicePass::set_inputs(const Pass& pass, const DeviceStates::Plan& plan) {
    const Hyperparameters& h = model_.numbers();
    const int num_cells = built_->shape.num_cells;
    const auto first_place = places_.begin() + pass.segments[0].first_cell();
    const std::vector<int64_t> places(first_place, first_place + pass.num_rows);
    std::vector<ggml_fp16_t> mask(size_t(num_cells) * pass.num_rows, ggml_fp32_to_fp16(-INFINITY)), window_mask(mask);
    std::vector<float> row_scales(pass.num_rows, 1.0f);
    const ggml_fp16_t seen = ggml_fp32_to_fp16(0);
    for (int i = 0; i < pass.num_rows; ++i) {
        const RowContext& context = pass.contexts[i];
        for (int j = 0; j < context.length; ++j) {
            const size_t cell =
                size_t(i) * num_cells + places_[j < context.direct ? j : context.tail[j - context.direct]];
            mask[cell] = seen;
            if (context.length - j <= h.window) {
                window_mask[cell] = seen;
            }
        }
        if (h.temperature_scale != 0) {
            row_scales[i] = h.query_scale(pass.positions[i]);
        }
    }
    // Inputs that no operation reads have no memory.
    const auto set = [](ggml_tensor* tensor, const void* data) {
        if (tensor && tensor->buffer) {
            ggml_backend_tensor_set(tensor, data, 0, ggml_nbytes(tensor));
        }
    };
    set(built_->tokens, pass.tokens);
    set(built_->positions, pass.positions);
    set(built_->places, places.data());
    set(built_->mask, mask.data());
    set(built_->window_mask, window_mask.data());
    set(built_->row_scales, row_scales.data());
    const int32_t zero = 0;
    set(built_->from, &plan.from);
    set(built_->zero, &zero);
    set(built_->earlier, plan.earlier.data());
    set(built_->own, plan.own.data());
    set(built_->to, &plan.to);
}

void DevicePass::keep(int length, const std::vector<int32_t>& path, bool was_read) {
    if (is_recurrent()) {
        states_.keep(length, path, was_read);
    }
    for (size_t i = 0; i < path.size(); ++i) {
        std::swap(places_[length + path[i]], places_[length + i]);
    }
}

template <class Act>
void DevicePass::for_each_part(const Act& act) const {
    with_device_errors([&] {
        size_t first = 0;
        for (const Recurrent& layer : recurrent_) {
            for (ggml_tensor* part : {layer.tail, layer.state}) {
                if (part) {
                    act(part, first);
                    first += part->ne[0];
                }
            }
        }
    });
}

std::shared_ptr<KeptStates::Values> DevicePass::state_values(int64_t place) const {
    auto values = std::make_shared<KeptStates::Values>(model_.kept_state_bytes() / sizeof(float));
    for_each_part([&](ggml_tensor* part, size_t first) {
        ggml_backend_tensor_get(part, values->data() + first, place * part->nb[1], part->nb[1]);
    });
    return values;
}

void DevicePass::load_state(int length, const KeptStates::Values* values) {
    const int place = 1 - states_.state();
    const KeptStates::Values zeros(values ? 0 : model_.kept_state_bytes() / sizeof(float));
    for_each_part([&](ggml_tensor* part, size_t first) {
        ggml_backend_tensor_set(part, (values ? *values : zeros).data() + first, place * part->nb[1], part->nb[1]);
    });
    states_.go_to(place, length);
}

int DevicePass::cut(int length) {
    length = reachable(length);
    if (is_recurrent()) {
        if (length < states_.length()) {
            load_state(length, states_.kept().at(length));
        }
        states_.cut(length);
    }
    return length;
}

// Of attention, up to the last place that one of the cells has.
int DevicePass::copy(const TextState& from, int length) {
    const auto& source = static_cast<const DevicePass&>(from);
    length = source.reachable(length);
    if (length == 0) {
        return 0;
    }
    const int end = *std::max_element(source.places_.begin(), source.places_.begin() + length) + 1;
    const ContextPtr context(ggml_init({8 * keys_.size() * ggml_tensor_overhead(), nullptr, /*no_alloc=*/true}));
    if (!context) {
        throw std::bad_alloc();
    }
    const auto view = [&](ggml_tensor* whole, int64_t first, int64_t count) {
        ggml_tensor* part = ggml_view_2d(context.get(), whole, whole->ne[0], count, whole->nb[1], first * whole->nb[1]);
        ggml_backend_view_init(part);
        return part;
    };
    const bool has_state = length >= source.states_.length();
    with_device_errors([&] {
        for (size_t layer = 0; layer < keys_.size(); ++layer) {
            if (keys_[layer]) {
                ggml_backend_tensor_copy(view(source.keys_[layer], 0, end), view(keys_[layer], 0, end));
                ggml_backend_tensor_copy(view(source.values_[layer], 0, end), view(values_[layer], 0, end));
            }
            const Recurrent &theirs = source.recurrent_[layer], &own = recurrent_[layer];
            if (own.tail && has_state) {
                const int place = source.states_.state();
                ggml_backend_tensor_copy(view(theirs.tail, place, 1), view(own.tail, 0, 1));
                if (own.state) {
                    ggml_backend_tensor_copy(view(theirs.state, place, 1), view(own.state, 0, 1));
                }
                ggml_backend_tensor_copy(theirs.inputs, own.inputs);
            }
        }
    });
    places_ = source.places_;
    if (is_recurrent()) {
        states_.copy(source.states_);
        if (!has_state) {
            load_state(length, states_.kept().at(length));
        }
        states_.cut(length);
    }
    return length;
}

void DevicePass::read_shortlist(int32_t* tokens, float* logits) const {
    with_device_errors([&] {
        ggml_backend_tensor_get(built_->shortlist, tokens, 0, ggml_nbytes(built_->shortlist));
        ggml_backend_tensor_get(built_->shortlist_logits, logits, 0, ggml_nbytes(built_->shortlist_logits));
    });
}

void DevicePass::read_logits(float* logits, float* maxima) const {
    const size_t vocab = model_.numbers().vocab_size, stride = model_.numbers().logits_stride();
    const int num_logits = built_->shape.num_logits;
    with_device_errors([&] {
        ggml_backend_tensor_get_2d(built_->logits, logits, 0, vocab * sizeof(float), num_logits, built_->logits->nb[1],
                                   stride * sizeof(float));
    });
    ThreadPool::shared().run(num_logits, model_.num_threads(), [&](int i, int) {
        find_maxima(model_.kernel(), logits + i * stride, static_cast<int>(vocab), static_cast<int>(stride),
                    maxima + i * stride / kRun);
    });
}

}  // namespace pystaged
