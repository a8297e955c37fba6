// A GPT-2 model: hyperparameters and packed weights, immutable and shared by any number of sessions.
#pragma once

#include <string>
#include <vector>

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

// Vectors are padded with zeros like the rows they meet.
struct LayerNorm {
    std::vector<float> weight, bias;
};

struct Linear {
    PackedMatrix weight;
    std::vector<float> bias;
};

struct Gpt2Layer {
    LayerNorm attn_norm, ffn_norm;
    Linear attn_qkv, attn_output, ffn_up, ffn_down;
};

class Gpt2 {
public:
    // Loads a GGUF file; `kernel` as in find_kernel(), `num_threads` 0 for one per physical core.
    // Throws ModelError for a file that is damaged, incomplete or not GPT-2; std::invalid_argument for the rest.
    Gpt2(const std::string& path, const std::string& kernel, int num_threads);

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
};

}  // namespace pystaged
