#include "model/loaders.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <stdexcept>

namespace pystaged {

namespace {

constexpr size_t kAlignment = 64;

std::vector<float> read_floats(const GgufFile& file, const std::vector<const TensorView*>& tensors) {
    std::vector<float> all;
    for (const TensorView* tensor : tensors) {
        const std::vector<float> values = read_floats(file, *tensor);
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

}  // namespace

std::vector<float> read_floats(const GgufFile& file, const TensorView& tensor) {
    const size_t size = size_t(tensor.ne[0]) * tensor.ne[1];
    const Memory data = file.read(tensor);
    std::vector<float> values(size);
    switch (tensor.type) {
        case GGML_TYPE_F32: std::copy_n(reinterpret_cast<const float*>(data.data()), size, values.data()); break;
        case GGML_TYPE_F16:
            ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(data.data()), values.data(), int64_t(size));
            break;
        case GGML_TYPE_BF16:
            ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t*>(data.data()), values.data(), int64_t(size));
            break;
        default:
            file.fail("tensor '" + tensor.name + "' is of type " + ggml_type_name(tensor.type) +
                      " where F32, F16 or BF16 is needed");
    }
    return values;
}

PackedLoader::PackedLoader(const GgufFile& file, const Manifest& manifest, const Family& family,
                           const Hyperparameters& numbers, int num_threads, PackedContent& content,
                           const PackedFile* packed)
    : file_(file),
      manifest_(manifest),
      family_(family),
      numbers_(numbers),
      num_threads_(num_threads),
      content_(content),
      packed_(packed) {
    size_t total = 0;
    for (const TensorView* tensor : manifest.matrices()) {
        try {
            // Two halves that are packed in turns are padded each.
            total += tensor->ne[2] *
                     (PackedMatrix::packed_bytes(tensor->type, int(tensor->ne[1]) + kBlock, int(tensor->ne[0])) +
                      kAlignment);
        } catch (const std::invalid_argument& error) {
            file.refuse("tensor '" + tensor->name + "': " + error.what());
        }
    }
    if (!packed) {
        arena_ = Memory(total, /*huge=*/true);
    }
}

Vector PackedLoader::vector(Role role) {
    const TensorView* tensor = find(role);
    if (!tensor) {
        return {};
    }
    const std::vector<float> values = read_floats(file_, *tensor);
    buffer_bytes_ = std::max(buffer_bytes_, tensor->bytes + values.size() * sizeof(float));
    const int cols = int(tensor->ne[0]), rows = int(tensor->ne[1]);
    // Norms of heads lie side by side, as heads do.
    const bool heads = role == Role::attn_q_norm || role == Role::attn_k_norm;
    const size_t stride = heads ? cols : padded(cols, kBlock);
    Vector result;
    result.values.resize(stride * rows);
    for (int i = 0; i < rows; ++i) {
        std::copy_n(values.data() + size_t(i) * cols, cols, result.values.data() + i * stride);
    }
    return result;
}

Linear PackedLoader::pack(const Parts& parts) {
    const ggml_type type = parts.weights[0]->type;
    const int cols = static_cast<int>(parts.weights[0]->ne[0]);
    const size_t row_bytes = ggml_row_size(type, cols);
    const auto read = [&](int first, int count, uint8_t* rows) {
        for (const TensorView* weight : parts.weights) {
            const int size = static_cast<int>(weight->ne[1]), here = std::clamp(size - first, 0, count);
            if (here > 0) {
                file_.read(*weight, first * row_bytes, here * row_bytes, rows);
            }
            rows += here * row_bytes;
            count -= here;
            first = std::max(first - size, 0);
        }
    };
    if (!content_.empty()) {
        content_.add(type, cols, parts.order);
    }
    const int rows = static_cast<int>(parts.order.size());
    Linear result;
    try {
        if (packed_) {
            result.packed =
                PackedMatrix(type, rows, cols, packed_->matrix(used_, PackedMatrix::packed_bytes(type, rows, cols)));
        } else {
            for (const TensorView* weight : parts.weights) {
                file_.prefetch(*weight);
            }
            result.packed = PackedMatrix(type, cols, read, parts.order, arena_.data() + used_, num_threads_);
            buffer_bytes_ = std::max(buffer_bytes_, num_threads_ * kLanes * row_bytes);
        }
    } catch (const std::invalid_argument& error) {
        file_.fail("tensor '" + parts.weights[0]->name + "': " + error.what());
    }
    used_ += (result.packed.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    if (!parts.biases.empty()) {
        const std::vector<float> values = read_floats(file_, parts.biases);
        result.bias.values.resize(result.packed.padded_rows());
        for (size_t i = 0; i < parts.order.size(); ++i) {
            result.bias.values[i] = parts.order[i] < 0 ? 0 : values[parts.order[i]];
        }
    }
    return result;
}

Linear PackedLoader::pack_alone(const TensorView& weight, const TensorView* bias) {
    Parts parts{{&weight}, {}, in_order(int(weight.ne[1]))};
    if (bias) {
        parts.biases = {bias};
    }
    return pack(parts);
}

Attention PackedLoader::attention() {
    Attention result;
    result.q_norm.weight = head_norm(Role::attn_q_norm);
    result.k_norm.weight = head_norm(Role::attn_k_norm);
    if (family_.has(kNormedValues)) {
        result.v_norm.values.assign(numbers_.layers[layer_].head_dim, 1.0f);
    }
    result.sinks = vector(Role::attn_sinks);
    pack_qkv(result);
    result.output = linear(Role::attn_output, Role::attn_output_bias);
    return result;
}

LatentAttention PackedLoader::latent_attention() {
    const LatentNumbers& latent = numbers_.latent;
    // The last numbers of a query and of a latent row are turned.
    const auto turned = [&](const TensorView* tensor, int width) {
        const int own = width - latent.turned;
        RowOrder order = in_order(int(tensor->ne[1]));
        for (int first = own; first < int(order.size()); first += width) {
            const RowOrder pairs = halves_of_pairs(latent.turned, latent.turned, latent.turned);
            std::transform(pairs.begin(), pairs.end(), order.begin() + first, [&](int row) { return first + row; });
        }
        return order;
    };
    const auto heads = [&](Role role) {
        std::vector<Linear> result;
        const TensorView* whole = find(role);
        for (int head = 0; whole && head < numbers_.num_heads; ++head) {
            TensorView part = *whole;
            part.bytes /= part.ne[2];
            part.at += head * part.bytes;
            part.ne[2] = 1;
            result.push_back(pack_alone(part));
        }
        return result;
    };
    LatentAttention result;
    const TensorView *q = find(Role::attn_q), *rows = find(Role::attn_latent);
    size_t q_at = 0;
    std::vector<Part> parts;
    if (q) {
        parts.push_back({q, nullptr, turned(q, latent.query()), &q_at});
    } else {
        parts.push_back({find(Role::attn_q_a), nullptr, in_order(latent.query_rank), &q_at});
        result.q_norm.weight = vector(Role::attn_q_a_norm);
        q = find(Role::attn_q_b);
        result.queries = pack({{q}, {}, turned(q, latent.query())});
    }
    parts.push_back({rows, nullptr, turned(rows, latent.row()), &result.latent_at});
    result.input = pack_side_by_side(parts, result.stride);
    result.norm.weight = vector(Role::attn_latent_norm);
    result.keys = heads(Role::attn_k_b);
    result.values = heads(Role::attn_v_b);
    if (!latent.absorbed) {
        result.expansion = linear(Role::attn_kv_b);
    }
    result.output = linear(Role::attn_output);
    return result;
}

// In the order that pack_qkv() gives a head's numbers.
Vector PackedLoader::head_norm(Role role) {
    Vector result = vector(role);
    if (family_.rope == Pairs::adjacent && result.present()) {
        const std::vector<float> values = std::move(result.values);
        for (const int i : halves_of_pairs(static_cast<int>(values.size()), numbers_.head_dim, numbers_.rope.dims)) {
            result.values.push_back(values[i]);
        }
    }
    return result;
}

// A file has the taps of a channel side by side.
Vector PackedLoader::taps(Role role) {
    const TensorView& tensor = *find(role);
    const std::vector<float> values = read_floats(file_, tensor);
    const int num_taps = int(tensor.ne[0]), channels = int(tensor.ne[1]);
    const size_t stride = padded(channels, kBlock);
    Vector result;
    result.values.resize(num_taps * stride);
    for (int i = 0; i < channels; ++i) {
        for (int tap = 0; tap < num_taps; ++tap) {
            result.values[tap * stride + i] = values[size_t(i) * num_taps + tap];
        }
    }
    return result;
}

// A file has them as columns.
Vector PackedLoader::per_head(Role role) {
    Vector result;
    result.values = read_floats(file_, *find(role));
    return result;
}

DeltaNet PackedLoader::delta_inputs() {
    DeltaNet result;
    const DeltaNumbers& delta = numbers_.delta;
    std::vector<Part> parts;
    if (const TensorView* joined = find(Role::delta_qkv_gate)) {
        const int size = delta.head_dim, values = delta.group() * size;
        parts.push_back({joined, nullptr, part_by_part(delta.key_heads, {size, size, values, values}), &result.qkv_at});
    } else {
        parts.push_back({find(Role::delta_qkv), nullptr, in_order(delta.channels()), &result.qkv_at});
        parts.push_back({find(Role::delta_gate), nullptr, in_order(delta.values()), &result.gate_at});
    }
    if (const TensorView* joined = find(Role::delta_beta_alpha)) {
        parts.push_back(
            {joined, nullptr, part_by_part(delta.key_heads, {delta.group(), delta.group()}), &result.beta_at});
    } else {
        parts.push_back({find(Role::delta_beta), nullptr, in_order(delta.value_heads), &result.beta_at});
        parts.push_back({find(Role::delta_alpha), nullptr, in_order(delta.value_heads), &result.alpha_at});
    }
    result.input = pack_side_by_side(parts, result.stride);
    if (find(Role::delta_qkv_gate)) {
        result.gate_at = result.qkv_at + delta.channels();
    }
    if (find(Role::delta_beta_alpha)) {
        result.alpha_at = result.beta_at + delta.value_heads;
    }
    return result;
}

std::vector<Linear> PackedLoader::pack_side_by_side(const std::vector<Part>& parts, size_t& stride) {
    std::vector<Parts> matrices;
    int end = 0;
    for (const Part& part : parts) {
        if (!matrices.empty() && matrices.back().weights[0]->type == part.weight->type) {
            matrices.back().order = stacked(std::move(matrices.back().order), part.order);
        } else {
            end = padded(end, kBlock);
            matrices.push_back({{}, {}, part.order});
        }
        matrices.back().weights.push_back(part.weight);
        if (part.bias) {
            matrices.back().biases.push_back(part.bias);
        }
        *part.place = static_cast<size_t>(end);
        end += static_cast<int>(part.order.size());
    }
    stride = padded(end, kBlock);
    std::vector<Linear> packed;
    for (const Parts& each : matrices) {
        packed.push_back(pack(each));
    }
    return packed;
}

void PackedLoader::pack_qkv(Attention& attention) {
    const LayerNumbers& layer = numbers_.layers[layer_];
    const int q = numbers_.num_heads * layer.head_dim, kv = layer.num_kv_heads * layer.head_dim;
    // Our kernel turns pairs (i, i + half). A score is the same in any order of a head's numbers that queries and keys
    // share.
    const auto turned = [&](int rows) {
        return family_.rope == Pairs::adjacent ? halves_of_pairs(rows, layer.head_dim, numbers_.rope.dims)
                                               : in_order(rows);
    };
    if (const TensorView* fused = find(Role::attn_qkv)) {
        Parts parts{{fused}, {}, stacked(stacked(turned(q), turned(kv)), in_order(kv))};
        if (const TensorView* bias = find(Role::attn_qkv_bias)) {
            parts.biases = {bias};
        } else if (find(Role::attn_q_bias)) {
            parts.biases = {find(Role::attn_q_bias), find(Role::attn_k_bias), find(Role::attn_v_bias)};
        }
        attention.k_at = q;
        attention.v_at = q + kv;
        attention.qkv_stride = padded(q + 2 * kv, kBlock);
        attention.qkv.push_back(pack(parts));
        return;
    }
    RowOrder queries = turned(q);
    if (family_.has(kGatedAttention)) {
        queries = part_by_part(numbers_.num_heads, {numbers_.head_dim, numbers_.head_dim});
        attention.gate_at = q;  // a file has each head's gate behind its query, here all come behind all
    }
    size_t q_at = 0;
    std::vector<Part> parts = {{find(Role::attn_q), find(Role::attn_q_bias), queries, &q_at}};
    if (find(Role::attn_k)) {
        parts.push_back({find(Role::attn_k), find(Role::attn_k_bias), turned(kv), &attention.k_at});
    }
    if (find(Role::attn_v)) {
        parts.push_back({find(Role::attn_v), find(Role::attn_v_bias), in_order(kv), &attention.v_at});
    }
    attention.qkv = pack_side_by_side(parts, attention.qkv_stride);
    if (!find(Role::attn_k)) {
        attention.k_at = attention.qkv_stride;
    }
    if (!find(Role::attn_v)) {
        attention.v_at = attention.qkv_stride;
    }
}

Dense PackedLoader::pack_dense(const DenseParts& parts, int width) {
    Dense result;
    // Gate and up are one matrix where they can be joined, or where the file has them as one.
    if (parts.gate ? parts.gate->type == parts.up->type : family_.gate != Gate::none) {
        Parts both{{parts.up}, {}, gate_in_turns(width)};
        if (parts.gate) {
            both.weights = {parts.gate, parts.up};
        }
        if (parts.gate_bias) {
            both.biases = {parts.gate_bias, parts.up_bias};
        }
        result.up = pack(both);
    } else {
        if (parts.gate) {
            result.gate = pack_alone(*parts.gate, parts.gate_bias);
        }
        result.up = pack_alone(*parts.up, parts.up_bias);
    }
    result.down = pack_alone(*parts.down, parts.down_bias);
    return result;
}

Dense PackedLoader::dense() {
    return pack_dense({find(Role::ffn_gate), find(Role::ffn_up), find(Role::ffn_down), find(Role::ffn_gate_bias),
                       find(Role::ffn_up_bias), find(Role::ffn_down_bias)},
                      numbers_.layers[layer_].ffn_width);
}

Experts PackedLoader::experts() {
    std::map<Role, TensorView> parts;  // of one expert
    const auto slice = [&](Role role, int dimension, int expert) -> const TensorView* {
        const TensorView* whole = find(role);
        if (!whole) {
            return nullptr;
        }
        TensorView& part = parts[role] = *whole;
        part.bytes /= part.ne[dimension];
        part.at += expert * part.bytes;
        part.ne[dimension] = 1;
        return &part;
    };
    Experts result;
    result.router = linear(Role::router, Role::router_bias);
    result.bias = vector(Role::selection_bias);
    for (int i = 0; i < numbers_.experts.count; ++i) {
        result.each.push_back(pack_dense({slice(Role::experts_gate, 2, i), slice(Role::experts_up, 2, i),
                                          slice(Role::experts_down, 2, i), slice(Role::experts_gate_bias, 1, i),
                                          slice(Role::experts_up_bias, 1, i), slice(Role::experts_down_bias, 1, i)},
                                         numbers_.experts.width));
    }
    if (numbers_.experts.shared_width > 0) {
        result.all = pack_dense({find(Role::shared_gate), find(Role::shared_up), find(Role::shared_down)},
                                numbers_.experts.shared_width);
    }
    if (family_.has(kDenseBeside)) {
        result.all = dense();
        result.router_norm.weight = vector(Role::router_norm);
        for (float& weight : result.router_norm.weight.values) {
            weight /= std::sqrt(static_cast<float>(numbers_.width));
        }
        result.norm.weight = vector(Role::experts_norm);
        result.post_norm.weight = vector(Role::experts_post_norm);
        result.all_post_norm.weight = vector(Role::beside_post_norm);
        result.factors = vector(Role::experts_down_factors);
    }
    if (find(Role::shared_opening)) {
        result.gate = linear(Role::shared_opening);
    }
    return result;
}

}  // namespace pystaged
