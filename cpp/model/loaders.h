// How a file's tensors become a model's weights.
#pragma once

#include <vector>

#include "model/manifest.h"
#include "model/model.h"
#include "weights/packed_file.h"

namespace pystaged {

// The floats of a tensor, all rows in turn. Throws ModelError where they are of another type.
std::vector<float> read_floats(const GgufFile& file, const TensorView& tensor);

// Packs for our kernels, or finds the matrices packed.
class PackedLoader {
public:
    // Throws ModelError for a type that has no packing. `content` is told of each matrix where it is not empty. With
    // `packed` matrices are taken from there; that they are what they should be is not checked.
    PackedLoader(const GgufFile& file, const Manifest& manifest, const Family& family, const Hyperparameters& numbers,
                 int num_threads, PackedContent& content, const PackedFile* packed = nullptr);

    void begin_layer(int layer) { layer_ = layer; }
    Linear token_embedding() { return find(Role::token_embedding) ? linear(Role::token_embedding) : Linear(); }
    Linear head() { return manifest_.find(Role::head) ? linear(Role::head) : Linear(); }
    Vector vector(Role role);
    Vector taps(Role role);
    Vector per_head(Role role);  // a number for each head
    Norm norm(Role weight, Role bias) { return {vector(weight), vector(bias)}; }
    Linear linear(Role weight) { return pack_alone(*find(weight)); }
    Linear linear(Role weight, Role bias) { return pack_alone(*find(weight), find(bias)); }
    Attention attention();
    LatentAttention latent_attention();
    DeltaNet delta_inputs();  // a delta net's matrices for its input, and where their products are
    Dense dense();
    Experts experts();
    // The memory that the matrices are in, and how much of it they take.
    Memory take_arena() { return std::move(arena_); }
    size_t used() const { return used_; }
    // What was taken besides at most, for a moment.
    size_t buffer_bytes() const { return buffer_bytes_; }

private:
    // Tensors of which a matrix is made, the rows of all in this order, and its bias if it has one.
    struct Parts {
        std::vector<const TensorView*> weights, biases;
        RowOrder order;
    };

    const TensorView* find(Role role) const { return manifest_.find(role, role < Role::attn_norm ? 0 : layer_); }
    Linear pack(const Parts& parts);
    Linear pack_alone(const TensorView& weight, const TensorView* bias = nullptr);
    // Matrices and biases of a network that is `width` wide; the gate may be null, and each bias.
    struct DenseParts {
        const TensorView *gate, *up, *down, *gate_bias = nullptr, *up_bias = nullptr, *down_bias = nullptr;
    };
    Dense pack_dense(const DenseParts& parts, int width);
    Vector head_norm(Role role);
    void pack_qkv(Attention& attention);
    // A matrix, and where the products of its rows begin, to be joined with others that have the same input.
    struct Part {
        const TensorView *weight, *bias;
        RowOrder order;
        size_t* place;
    };
    // Joins neighbours of one type; `stride` is of a row of all products, each matrix padded to kBlock.
    std::vector<Linear> pack_side_by_side(const std::vector<Part>& parts, size_t& stride);

    const GgufFile& file_;
    const Manifest& manifest_;
    const Family& family_;
    const Hyperparameters& numbers_;
    int num_threads_, layer_ = 0;
    PackedContent& content_;
    const PackedFile* packed_;
    Memory arena_;
    size_t used_ = 0, buffer_bytes_ = 0;
};

}  // namespace pystaged
