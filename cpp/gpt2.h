// A GPT-2 model: hyperparameters and weights, immutable and shared by any number of sessions. Weights are packed for
// our kernels, or lie as they are in the file in the memory of ggml's devices.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device.h"
#include "gguf_file.h"
#include "memory.h"
#include "packed_matrix.h"

namespace pystaged {

struct Gpt2Shape {
    int vocab_size = 0;
    int max_context = 0;  // positions the model was trained for
    int width = 0;
    int ffn_width = 0;
    int num_layers = 0;
    int num_heads = 0;
    float norm_epsilon = 1e-5f;

    int head_dim() const { return width / num_heads; }
    int padded_width() const { return padded(width, kBlock); }
};

// A weight and its bias where they are on a device, null otherwise.
struct OnDevice {
    ggml_tensor* weight = nullptr;
    ggml_tensor* bias = nullptr;
};

// Vectors are padded with zeros like the rows they meet.
struct LayerNorm {
    std::vector<float> weight, bias;
    OnDevice device{};
};

struct Linear {
    PackedMatrix weight;
    std::vector<float> bias;
    OnDevice device{};
};

struct Gpt2Layer {
    LayerNorm attn_norm, ffn_norm;
    Linear attn_qkv, attn_output, ffn_up, ffn_down;
};

class Gpt2 {
public:
    // Loads a GGUF file; `kernel` as in find_kernel(), `num_threads` 0 for one per physical core.
    // Throws ModelError for a file that is damaged, incomplete or not GPT-2; std::invalid_argument for the rest.
    // Weights are packed for the kernels where there are no `devices`; else layers are split over them by their memory,
    // and `progress` is called after each tensor. Throws DeviceError where that memory is too small.
    Gpt2(const std::string& path, const std::string& kernel, int num_threads, const Devices& devices = {},
         const std::function<void()>& progress = {});

    const Gpt2Shape& shape() const { return shape_; }
    const Kernel& kernel() const { return kernel_; }
    int num_threads() const { return num_threads_; }
    size_t file_bytes() const { return file_bytes_; }
    // Bytes of weights that one pass reads.
    size_t weight_bytes() const;
    // Multiply-adds of one row of a pass, attention aside.
    size_t num_weights() const;
    // ggml's name of the type most weights have.
    const std::string& weight_type() const { return weight_type_; }
    const std::string& name() const { return name_; }

    // Null where the weights are packed.
    const DeviceMemory* device_memory() const { return device_memory_.get(); }
    ggml_tensor* device_token_embedding() const { return device_token_embedding_; }
    ggml_tensor* device_position_embedding() const { return device_position_embedding_; }
    ggml_tensor* device_head() const { return device_head_; }

    const PackedMatrix& token_embedding() const { return token_embedding_; }
    const PackedMatrix& head() const { return tied_ ? token_embedding_ : output_; }
    const std::vector<float>& position_embedding() const { return position_embedding_; }  // [max_context][padded width]
    const std::vector<Gpt2Layer>& layers() const { return layers_; }
    const LayerNorm& output_norm() const { return output_norm_; }

private:
    template <class Size>
    size_t sum_over_pass(const Size& size) const;
    void load_shape(const GgufFile& file);
    void load_weights(const GgufFile& file);
    void load_on_devices(const GgufFile& file, const Devices& devices, const std::function<void()>& progress);
    PackedMatrix load_matrix(const GgufFile& file, const std::string& name, int rows, int cols);

    const Kernel& kernel_;
    int num_threads_;
    Gpt2Shape shape_;
    size_t file_bytes_ = 0;
    std::string weight_type_, name_;
    bool tied_ = true;
    Memory arena_;
    size_t arena_used_ = 0;
    PackedMatrix token_embedding_, output_;
    std::vector<float> position_embedding_;
    std::vector<Gpt2Layer> layers_;
    LayerNorm output_norm_;
    std::unique_ptr<DeviceMemory> device_memory_;
    ggml_tensor *device_token_embedding_ = nullptr, *device_position_embedding_ = nullptr, *device_head_ = nullptr;
    size_t weight_bytes_ = 0, num_weights_ = 0;  // of a pass, where they are on devices
};

}  // namespace pystaged
