#include "gpt2.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "error.h"
#include "thread_pool.h"

namespace pystaged {

namespace {

constexpr int64_t kMostRows = int64_t(1) << 24;  // far beyond any model, far below any overflow
constexpr int64_t kMostLayers = 512;             // ggml visits a graph by recursion, for which a stack must do
constexpr size_t kAlignment = 64;

int checked_threads(int num_threads) {
    if (num_threads < 0 || num_threads > ThreadPool::kMaxThreads) {
        throw std::invalid_argument("the number of threads must be between 0 (automatic) and " +
                                    std::to_string(ThreadPool::kMaxThreads) + ", not " + std::to_string(num_threads));
    }
    return num_threads > 0 ? num_threads : physical_cores();
}

// `rows` vectors of `size` floats, each padded with zeros.
std::vector<float> load_floats(const GgufFile& file, const std::string& name, int size, int rows = 1) {
    const TensorView tensor = rows == 1 ? file.tensor(name, {size}) : file.tensor(name, {size, rows});
    const Memory data = file.read(tensor);
    const size_t stride = padded(size, kBlock);
    std::vector<float> values(stride * rows);
    for (int i = 0; i < rows; ++i) {
        const size_t at = size_t(i) * size;
        float* out = values.data() + i * stride;
        switch (tensor.type) {
            case GGML_TYPE_F32: std::copy_n(reinterpret_cast<const float*>(data.data()) + at, size, out); break;
            case GGML_TYPE_F16:
                ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(data.data()) + at, out, size);
                break;
            case GGML_TYPE_BF16:
                ggml_bf16_to_fp32_row(reinterpret_cast<const ggml_bf16_t*>(data.data()) + at, out, size);
                break;
            default:
                file.fail("tensor '" + name + "' is of type " + ggml_type_name(tensor.type) +
                          " where F32, F16 or BF16 is needed");
        }
    }
    return values;
}

}  // namespace

Gpt2::Gpt2(const std::string& path, const std::string& kernel, int num_threads, const Devices& devices,
           const std::function<void()>& progress)
    : kernel_(find_kernel(kernel)), num_threads_(checked_threads(num_threads)) {
    const FloatEnvironment pinned;
    const GgufFile file(path);
    file_bytes_ = file.bytes();
    load_shape(file);
    tied_ = !file.has_tensor("output.weight");
    if (devices.empty()) {
        load_weights(file);
    } else {
        load_on_devices(file, devices, progress);
    }
}

void Gpt2::load_shape(const GgufFile& file) {
    const std::string architecture = file.text("general.architecture");
    if (architecture != "gpt2") {
        file.fail("architecture '" + architecture + "' is not supported, only 'gpt2'");
    }
    name_ = file.text("general.name", "");
    shape_.width = static_cast<int>(file.integer("gpt2.embedding_length", 1, kMostRows));
    shape_.max_context = static_cast<int>(file.integer("gpt2.context_length", 1, kMostRows));
    shape_.num_layers = static_cast<int>(file.integer("gpt2.block_count", 1, kMostLayers));
    shape_.num_heads = static_cast<int>(file.integer("gpt2.attention.head_count", 1, shape_.width));
    shape_.ffn_width =
        static_cast<int>(file.integer("gpt2.feed_forward_length", 1, kMostRows, int64_t(4) * shape_.width));
    shape_.norm_epsilon = file.real("gpt2.attention.layer_norm_epsilon", 1e-5f);
    if (!(shape_.norm_epsilon > 0 && shape_.norm_epsilon < 1)) {
        file.fail("metadata 'gpt2.attention.layer_norm_epsilon' is not between 0 and 1");
    }
    if (shape_.width % shape_.num_heads != 0) {
        file.fail("a width of " + std::to_string(shape_.width) + " does not split into " +
                  std::to_string(shape_.num_heads) + " heads");
    }
    const int64_t vocab_size = file.tensor("token_embd.weight").ne[1];
    if (vocab_size < 1 || vocab_size > kMostRows) {
        file.fail("tensor 'token_embd.weight' has " + std::to_string(vocab_size) + " rows");
    }
    shape_.vocab_size = static_cast<int>(vocab_size);
}

void Gpt2::load_weights(const GgufFile& file) {
    const int width = shape_.width, ffn = shape_.ffn_width;
    struct Matrix {
        std::string name;
        int rows, cols;
    };
    std::vector<Matrix> matrices = {{"token_embd", shape_.vocab_size, width}};
    if (!tied_) {
        matrices.push_back({"output", shape_.vocab_size, width});
    }
    for (int i = 0; i < shape_.num_layers; ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        // Each name is looked up as it comes, so an absurd layer count ends at the first missing one.
        for (const auto& [name, rows, cols] : {Matrix{"attn_qkv", 3 * width, width},
                                               {"attn_output", width, width},
                                               {"ffn_up", ffn, width},
                                               {"ffn_down", width, ffn}}) {
            file.tensor(prefix + name + ".weight", {cols, rows});
            matrices.push_back({prefix + name, rows, cols});
        }
    }
    size_t total = 0;
    std::map<ggml_type, size_t> bytes_by_type;
    for (const auto& [name, rows, cols] : matrices) {
        const TensorView tensor = file.tensor(name + ".weight", {cols, rows});
        try {
            total += PackedMatrix::packed_bytes(tensor.type, rows, cols) + kAlignment;
        } catch (const std::invalid_argument& error) {
            file.fail("tensor '" + tensor.name + "': " + error.what());
        }
        bytes_by_type[tensor.type] += tensor.bytes;
    }
    weight_type_ = ggml_type_name(std::max_element(bytes_by_type.begin(), bytes_by_type.end(), [](auto& a, auto& b) {
                                      return a.second < b.second;
                                  })->first);
    arena_ = Memory(total, /*huge=*/true);

    const auto load_norm = [&](const std::string& name) {
        return LayerNorm{load_floats(file, name + ".weight", width), load_floats(file, name + ".bias", width)};
    };
    const auto load_linear = [&](const std::string& name, int rows, int cols) {
        return Linear{load_matrix(file, name, rows, cols), load_floats(file, name + ".bias", rows)};
    };
    token_embedding_ = load_matrix(file, "token_embd", shape_.vocab_size, width);
    if (!tied_) {
        output_ = load_matrix(file, "output", shape_.vocab_size, width);
    }
    position_embedding_ = load_floats(file, "position_embd.weight", width, shape_.max_context);
    output_norm_ = load_norm("output_norm");
    for (int i = 0; i < shape_.num_layers; ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        layers_.push_back({load_norm(prefix + "attn_norm"), load_norm(prefix + "ffn_norm"),
                           load_linear(prefix + "attn_qkv", 3 * width, width),
                           load_linear(prefix + "attn_output", width, width),
                           load_linear(prefix + "ffn_up", ffn, width), load_linear(prefix + "ffn_down", width, ffn)});
    }
}

PackedMatrix Gpt2::load_matrix(const GgufFile& file, const std::string& name, int rows, int cols) {
    const TensorView tensor = file.tensor(name + ".weight", {cols, rows});
    const Memory data = file.read(tensor, num_threads_);
    PackedMatrix matrix(tensor.type, rows, cols, data.data(), arena_.data() + arena_used_, num_threads_);
    arena_used_ += padded(1, kAlignment) * ((matrix.bytes() + kAlignment - 1) / kAlignment);
    return matrix;
}

void Gpt2::load_on_devices(const GgufFile& file, const Devices& devices, const std::function<void()>& progress) {
    const int width = shape_.width, ffn = shape_.ffn_width;
    device_memory_ = std::make_unique<DeviceMemory>(devices);
    DeviceMemory& memory = *device_memory_;
    std::map<ggml_type, size_t> bytes_by_type;
    // Lookups are by the CPU, so that only the rows looked up travel, not the table.
    const int first = memory.cpu(), last = memory.num_devices() - 1;
    const auto matrix = [&](const std::string& name, int rows, int cols, int device) {
        const TensorView tensor = file.tensor(name, {cols, rows});
        if (!DeviceMemory::can_multiply(tensor.type)) {
            file.fail("tensor '" + name + "' is of type " + ggml_type_name(tensor.type) +
                      ", which ggml cannot multiply");
        }
        bytes_by_type[tensor.type] += tensor.bytes;
        return memory.place(tensor.type, cols, rows, device,
                            [&file, tensor, this](const auto& copy) { copy(file.read(tensor, num_threads_).data()); });
    };
    // ggml's backends add and scale in F32 alone.
    const auto vectors = [&](const std::string& name, int size, int rows, int device) {
        std::vector<float> padded_rows = load_floats(file, name, size, rows), values(size_t(rows) * size);
        for (int i = 0; i < rows; ++i) {
            std::copy_n(padded_rows.data() + i * padded(size, kBlock), size, values.data() + size_t(i) * size);
        }
        return memory.place(GGML_TYPE_F32, size, rows, device,
                            [values = std::move(values)](const auto& copy) { copy(values.data()); });
    };
    const auto norm = [&](const std::string& name, int device) {
        LayerNorm result;
        result.device = {vectors(name + ".weight", width, 1, device), vectors(name + ".bias", width, 1, device)};
        return result;
    };
    const auto linear = [&](const std::string& name, int rows, int cols, int device) {
        Linear result;
        result.device = {matrix(name + ".weight", rows, cols, device), vectors(name + ".bias", rows, 1, device)};
        weight_bytes_ += ggml_nbytes(result.device.weight);
        num_weights_ += size_t(rows) * cols;
        return result;
    };
    device_token_embedding_ = matrix("token_embd.weight", shape_.vocab_size, width, first);
    device_position_embedding_ = vectors("position_embd.weight", width, shape_.max_context, first);
    device_head_ = tied_ && first == last
                       ? device_token_embedding_
                       : matrix(tied_ ? "token_embd.weight" : "output.weight", shape_.vocab_size, width, last);
    weight_bytes_ += ggml_nbytes(device_head_);
    num_weights_ += size_t(shape_.vocab_size) * width;
    output_norm_ = norm("output_norm", last);
    for (int i = 0; i < shape_.num_layers; ++i) {
        const std::string prefix = "blk." + std::to_string(i) + ".";
        const int device = memory.device_of(i, shape_.num_layers);
        layers_.push_back({norm(prefix + "attn_norm", device), norm(prefix + "ffn_norm", device),
                           linear(prefix + "attn_qkv", 3 * width, width, device),
                           linear(prefix + "attn_output", width, width, device),
                           linear(prefix + "ffn_up", ffn, width, device),
                           linear(prefix + "ffn_down", width, ffn, device)});
    }
    weight_type_ = ggml_type_name(std::max_element(bytes_by_type.begin(), bytes_by_type.end(), [](auto& a, auto& b) {
                                      return a.second < b.second;
                                  })->first);
    memory.fill(progress);
}

template <class Size>
size_t Gpt2::sum_over_pass(const Size& size) const {
    size_t sum = size(head());
    for (const Gpt2Layer& layer : layers_) {
        for (const Linear* linear : {&layer.attn_qkv, &layer.attn_output, &layer.ffn_up, &layer.ffn_down}) {
            sum += size(linear->weight);
        }
    }
    return sum;
}

size_t Gpt2::weight_bytes() const {
    if (device_memory_) {
        return weight_bytes_;
    }
    return sum_over_pass([](const PackedMatrix& matrix) { return matrix.bytes(); });
}

size_t Gpt2::num_weights() const {
    if (device_memory_) {
        return num_weights_;
    }
    return sum_over_pass([](const PackedMatrix& matrix) { return size_t(matrix.rows()) * matrix.cols(); });
}

}  // namespace pystaged
